// Prefill and batched decode with AMX: exact products of K-quant weights and 8-bit activations in 16 x 16 tiles.
//
// A weight's integer q*sc needs more than a byte, so it is split as high * 2^shift + low into two byte planes; both are
// multiplied exactly and joined as integers, which gives the very sum that the vector kernels compute. How the planes
// are made cheaply is each format's business (see below). Weights are the A operand, 16 rows of 64 values, unpacked
// once per panel and block; activations are packed beforehand as B, [k/4][16 columns][4 bytes].
//
// The sums of mins run through the tiles too: sum_j m_j * sums32_j as bfloat16 with sums32 = high + low, both exact
// (a multiple of 64 up to 64 * 64, and 0..63). The result stays below 2^24, so float32 holds it exactly in any order.
//
// One step is 16 rows x 32 columns x one 256-block: 16 integer and 2 bfloat16 tile products. The float step of a step
// before runs between them, out of a scratch copy of its tiles.

// One column tile of one block, as pack_block lays it out.
struct PackedBlock {
  int8_t q[4][16][16][4];    // [64 values][k / 4][column][k % 4]
  uint16_t sums[16][16][2];  // bfloat16 [sub-block][column][high, low]; rows 8 to 15 are zero
  float d[16];
  uint8_t padding[64];  // keeps neighbours off the same cache sets
};
static_assert(sizeof(PackedBlock) == 5248 && sizeof(PackedBlock) % 64 == 0);

inline uint16_t bfloat16_of(int exact) {
  const float f = float(exact);
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return uint16_t(bits >> 16);
}

void pack_block(const BlockQ8K* x, int64_t blocks, int64_t columns, int64_t tile, int64_t block, uint8_t* packed) {
  const int64_t first = 16 * tile, count = columns - first < 16 ? columns - first : 16;
  const int64_t tiles = (columns + 15) / 16;
  const BlockQ8K* const from = x + first * blocks + block;  // columns are `blocks` apart
  auto* out = reinterpret_cast<PackedBlock*>(packed) + block * tiles + tile;
  for (int part = 0; part < 4; part++) {
    __m512i r[16];
    for (int c = 0; c < 16; c++)
      r[c] = c < count ? _mm512_load_si512(from[c * blocks].q + 64 * part) : _mm512_setzero_si512();
    transpose16(r);
    for (int k = 0; k < 16; k++) _mm512_store_si512(out->q[part][k], r[k]);
  }
  __builtin_memset(out->sums, 0, sizeof out->sums);
  for (int c = 0; c < 16; c++) {
    out->d[c] = c < count ? from[c * blocks].d : 0.0f;
    for (int j = 0; j < 8 && c < count; j++) {
      const int sum = from[c * blocks].sums32[j], low = sum & 63;
      out->sums[j][c][0] = bfloat16_of(sum - low);
      out->sums[j][c][1] = bfloat16_of(low);
    }
  }
}

// Sixteen rows of weights for one block: what the tiles read, and the scales of the rows.
struct alignas(64) RowTile {
  uint8_t high[4][16][64];  // [64 values][row][value]
  uint8_t low[4][16][64];
  uint16_t mins[16][32];  // bfloat16 [row][m_0, m_0, m_1, m_1, ... zeros]
  float d[16];
  float dmin[16];
};
// With many columns a panel of eight row tiles goes through the blocks together, so that the activations of a block
// come from the third cache once for all of them; two of the eight are unpacked at a time, since two stay in L1.
constexpr int kPanelTiles = 8, kGroupTiles = 2;

// Of the eight words in the lane of each of four rows: words 2c and 2c + 1 of row r, each in half the lanes. In memory,
// because gcc would build them anew each time, on the very port that shuffles need.
struct alignas(64) ScaleOrders {
  uint16_t word[4][4][32] = {};  // [r][c][lane]
  constexpr ScaleOrders() {
    for (int r = 0; r < 4; r++)
      for (int c = 0; c < 4; c++)
        for (int lane = 0; lane < 32; lane++) word[r][c][lane] = uint16_t(8 * r + 2 * c + lane / 16);
  }
};
constexpr ScaleOrders kScaleOrders;

// Q4_K and Q5_K: sc = 8 * (sc >> 3) + (sc & 7), so high = q * (sc >> 3) and low = q * (sc & 7) stay below 256, and one
// 16-bit multiplication makes two byte products at once without a carry between them.
template <class Quant>
struct MinPlanes {
  static constexpr bool has_min = true, is_signed = false;
  static constexpr int shift = 3;
  static constexpr int64_t bytes = Quant::bytes;
  // Blocks of four rows to rows [row, row + 4). The upper halves of mins are zero already.
  static void unpack(const uint8_t* const* place, RowTile& to, int row) {
    const FourHeaders h = headers_with_mins(place);
    const __m512i high = _mm512_srli_epi16(h.scales[0], 3), low = _mm512_and_si512(h.scales[0], _mm512_set1_epi16(7));
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      __m512i q[4];
      Quant::values(place[r], q);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {  // two scales in each, of the eight in the row's lane
        __m512i order = _mm512_load_si512(kScaleOrders.word[r][c]);
        in_register(order);
        _mm512_store_si512(to.high[c][row + r], _mm512_mullo_epi16(q[c], _mm512_permutexvar_epi16(order, high)));
        _mm512_store_si512(to.low[c][row + r], _mm512_mullo_epi16(q[c], _mm512_permutexvar_epi16(order, low)));
      }
    }
    for (int r = 0; r < 4; r += 2) {
      const __m256i words = r == 0 ? _mm512_castsi512_si256(h.mins) : _mm512_extracti64x4_epi64(h.mins, 1);
      const __m512i floats = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(words)));
      const __m512i upper = _mm512_srli_epi32(floats, 16);  // exact: mins are below 64
      const __m512i twice = _mm512_or_si512(upper, _mm512_slli_epi32(upper, 16));
      _mm256_store_si256((__m256i*)to.mins[row + r], _mm512_castsi512_si256(twice));
      _mm256_store_si256((__m256i*)to.mins[row + r + 1], _mm512_extracti64x4_epi64(twice, 1));
    }
    _mm_store_ps(to.d + row, h.d);
    _mm_store_ps(to.dmin + row, h.dmin);
  }
};
// Q6_K: sc * (q - 32) lies in [-4064, 4096] = 256 * high + low, its upper and its lower byte. Bytes at even and at odd
// places are multiplied apart, as (q - 32) * 256 with sc * 256, whose upper half is the product.
struct SignedPlanes {
  static constexpr bool has_min = false, is_signed = true;  // the upper byte is
  static constexpr int shift = 8;
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static void unpack(const uint8_t* const* place, RowTile& to, int row) {
    for (int r = 0; r < 4; r++) unpack_row(place[r], to, row + r);
    _mm_store_ps(to.d + row, load_halves(place, offsetof(BlockQ6_K, d)));
  }
  static void unpack_row(const uint8_t* block, RowTile& to, int row) {
    __m512i q[4];
    Q6_K512::values(block, q);
    const __m256i scales = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(block + offsetof(BlockQ6_K, scales))));
    const __m512i words = _mm512_castsi256_si512(_mm256_slli_epi16(scales, 8));
    const __m512i lanes = _mm512_setr_epi64(0, 0, 0x0001000100010001, 0x0001000100010001, 0x0002000200020002,
                                            0x0002000200020002, 0x0003000300030003, 0x0003000300030003);
    const __m512i middle = _mm512_set1_epi8(32), upper = _mm512_set1_epi16(short(0xff00));
    constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaa;
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {  // the scale of each 128-bit lane of q[c]
      const __m512i order = _mm512_add_epi16(lanes, _mm512_set1_epi16(short(4 * c)));
      const __m512i scale = _mm512_permutexvar_epi16(order, words), centred = _mm512_sub_epi8(q[c], middle);
      const __m512i even = _mm512_mulhi_epi16(_mm512_slli_epi16(centred, 8), scale);
      const __m512i odd = _mm512_mulhi_epi16(_mm512_and_si512(centred, upper), scale);
      _mm512_store_si512(to.high[c][row], _mm512_mask_blend_epi8(odd_bytes, _mm512_srli_epi16(even, 8), odd));
      _mm512_store_si512(to.low[c][row], _mm512_mask_blend_epi8(odd_bytes, even, _mm512_slli_epi16(odd, 8)));
    }
  }
};

// The tiles of one step, as they were stored: [column tile][row][column].
struct alignas(64) StepSums {
  int32_t high[2][16][16];
  int32_t low[2][16][16];
  float mins[2][16][16];
};

// A step whose tiles are stored but whose floats are still due.
struct Pending {
  const StepSums* sums = nullptr;
  const float (*mins)[16][16] = nullptr;
  const RowTile* rows = nullptr;
  const PackedBlock* columns = nullptr;
  float* acc = nullptr;  // [column tile][row][column]
  bool first = false;    // there is nothing in acc yet
};

// The float step for rows [from, from + 4) of a finished step of COLUMN_TILES tiles. In acc rows and column tiles are
// so many floats apart.
template <class Planes, int COLUMN_TILES, int64_t ROWS_APART = 16, int64_t TILES_APART = 256>
inline __attribute__((always_inline)) void float_step(const Pending& due, int from) {
  __m512 dx[COLUMN_TILES];
  for (int t = 0; t < COLUMN_TILES; t++) dx[t] = _mm512_load_ps(due.columns[t].d);
#pragma GCC unroll 4
  for (int r = from; r < from + 4; r++) {
    const __m512 d = _mm512_set1_ps(due.rows->d[r]);
    for (int t = 0; t < COLUMN_TILES; t++) {
      const __m512i high = _mm512_load_si512(due.sums->high[t][r]), low = _mm512_load_si512(due.sums->low[t][r]);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, Planes::shift), low);
      __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), d);
      if (Planes::has_min) f = _mm512_fnmadd_ps(_mm512_load_ps(due.mins[t][r]), _mm512_set1_ps(due.rows->dmin[r]), f);
      float* at = due.acc + t * TILES_APART + r * ROWS_APART;
      _mm512_store_ps(at, _mm512_fmadd_ps(f, dx[t], due.first ? _mm512_setzero_ps() : _mm512_load_ps(at)));
    }
  }
}

#define QTENSOR_HIGH_PRODUCT(acc, a, b) \
  do {                                  \
    if (Planes::is_signed)              \
      _tile_dpbssd(acc, a, b);          \
    else                                \
      _tile_dpbusd(acc, a, b);          \
  } while (0)

// 64 values of a step: both planes with each column tile. All four operands are asked for before
// the first product needs one.
template <class Planes, int COLUMN_TILES>
inline __attribute__((always_inline)) void tile_part(const RowTile& rows, const PackedBlock* columns, int part) {
  _tile_loadd(4, rows.high[part], 64);
  _tile_loadd(6, columns[0].q[part], 64);
  _tile_loadd(5, rows.low[part], 64);
  if (COLUMN_TILES == 2) _tile_loadd(7, columns[1].q[part], 64);
  QTENSOR_HIGH_PRODUCT(0, 4, 6);
  _tile_dpbusd(2, 5, 6);
  if (COLUMN_TILES == 2) {
    QTENSOR_HIGH_PRODUCT(1, 4, 7);
    _tile_dpbusd(3, 5, 7);
  }
}

template <class Planes, int COLUMN_TILES>
inline __attribute__((always_inline)) void store_sums(const RowTile& rows, const PackedBlock* columns, StepSums& sums) {
  _tile_stored(0, sums.high[0], 64);
  _tile_stored(2, sums.low[0], 64);
  if (COLUMN_TILES == 2) {
    _tile_stored(1, sums.high[1], 64);
    _tile_stored(3, sums.low[1], 64);
  }
  if (Planes::has_min) {
    _tile_zero(0);
    _tile_loadd(4, rows.mins, 64);
    _tile_loadd(6, columns[0].sums, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (COLUMN_TILES == 2) {
      _tile_zero(1);
      _tile_loadd(7, columns[1].sums, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stored(1, sums.mins[1], 64);
    }
    _tile_stored(0, sums.mins[0], 64);
  }
}

// One step of COLUMN_TILES column tiles. `shade(part)` is what else is done beside the products of each part.
template <class Planes, int COLUMN_TILES, class Shade>
inline __attribute__((always_inline)) void tile_step(const RowTile& rows, const PackedBlock* columns, StepSums& sums,
                                                     Shade shade) {
  before_tile_loads();
  _tile_zero(0);
  _tile_zero(2);
  if (COLUMN_TILES == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
#pragma GCC unroll 4
  for (int part = 0; part < 4; part++) {
    tile_part<Planes, COLUMN_TILES>(rows, columns, part);
    shade(part);
  }
  store_sums<Planes, COLUMN_TILES>(rows, columns, sums);
}

// One step among many. The integer tiles of the step before are stored when this one's first products are under way, so
// that nobody waits for the last ones; its float step follows in shade(1) to shade(3) and in the next step's shade(0).
// The mins of each column tile take tile 7 in turn. Few loads and little else that touches L1 is what counts here.
template <class Planes, class Shade>
inline __attribute__((always_inline)) void panel_step(const RowTile& rows, const PackedBlock* columns, StepSums* before,
                                                      float (*mins)[16][16], Shade shade) {
  const auto begin_mins = [&](const PackedBlock& column) __attribute__((always_inline)) {
    _tile_zero(7);
    _tile_loadd(4, rows.mins, 64);
    _tile_loadd(5, column.sums, 64);
    _tile_dpbf16ps(7, 4, 5);
  };
  before_tile_loads();
  if (Planes::has_min) begin_mins(columns[0]);
  shade(0);
  before_tile_loads();
  if (before != nullptr) {
    _tile_stored(0, before->high[0], 64);
    _tile_stored(1, before->high[1], 64);
  }
  _tile_zero(0);
  _tile_zero(1);
#pragma GCC unroll 4
  for (int part = 0; part < 4; part++) {
    _tile_loadd(4, rows.high[part], 64);
    _tile_loadd(5, columns[0].q[part], 64);
    _tile_loadd(6, columns[1].q[part], 64);
    QTENSOR_HIGH_PRODUCT(0, 4, 5);
    QTENSOR_HIGH_PRODUCT(1, 4, 6);
    if (part == 0) {
      if (before != nullptr) {
        _tile_stored(2, before->low[0], 64);
        _tile_stored(3, before->low[1], 64);
      }
      before_tile_loads();  // nor does gcc know that stores write
      _tile_zero(2);
      _tile_zero(3);
    }
    _tile_loadd(4, rows.low[part], 64);
    _tile_dpbusd(2, 4, 5);
    _tile_dpbusd(3, 4, 6);
    if (Planes::has_min && part == 1) {
      _tile_stored(7, mins[0], 64);
      begin_mins(columns[1]);
    }
    if (part > 0) shade(part);
  }
  if (Planes::has_min) _tile_stored(7, mins[1], 64);
}
#undef QTENSOR_HIGH_PRODUCT

// Four rows of one block, the first of them at `weight`, to rows [row, row + 4).
template <class Planes>
inline __attribute__((always_inline)) void unpack_four(const uint8_t* weight, int64_t row_bytes, int row, RowTile& to) {
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = weight + r * row_bytes;
  Planes::unpack(place, to, row);
}

// One row tile after another with each pair of column tiles, then the floats that are still due.
// at: [pair][row tile][column tile][16 rows][16 columns]. `between` is what else is done once per step.
template <class Planes, class Between>
inline __attribute__((always_inline)) void group_product(const RowTile* group, int count, const PackedBlock* columns,
                                                         int64_t pairs, bool first, StepSums* sums, float* at,
                                                         Between between) {
  Pending due, last;
  int turn = 0;  // integer sums are read before the next are stored, mins are not
  for (int64_t c = 0; c < pairs; c++)
    for (int tile = 0; tile < count; tile++, turn ^= 1, at += 512) {
      between();
      panel_step<Planes>(group[tile], columns + 2 * c, last.sums == nullptr ? nullptr : sums, sums[turn].mins,
                         [&](int part) __attribute__((always_inline)) {
                           if (due.sums != nullptr) float_step<Planes, 2>(due, (4 * part + 12) % 16);
                           if (part == 0) due = last;
                         });
      last = {sums, sums[turn].mins, group + tile, columns + 2 * c, at, first};
    }
  if (due.sums != nullptr) float_step<Planes, 2>(due, 12);
  _tile_stored(0, sums->high[0], 64);
  _tile_stored(1, sums->high[1], 64);
  _tile_stored(2, sums->low[0], 64);
  _tile_stored(3, sums->low[1], 64);
  before_tile_loads();
  for (int from = 0; from < 16; from += 4) float_step<Planes, 2>(last, from);
}

// Row tiles of one panel through every block, group after group. acc: [group][pair][row tile][column tile][16][16].
template <class Planes>
inline void panel_product(const TileTask& t, int64_t row, int row_tiles, RowTile* group, StepSums* sums, float* acc) {
  const int64_t tiles = (t.columns + 15) / 16, pairs = tiles / 2, rounded = (tiles + 1) / 2;
  for (int64_t b = 0; b < t.blocks; b++) {
    const auto* columns = reinterpret_cast<const PackedBlock*>(t.packed) + b * tiles;
    // memory is asked for the weights of the block after the next one, or of the next panel, a few rows per step
    const int64_t later = b + 2 < t.blocks ? 0 : 16 * row_tiles, block = b + 2 - (later > 0 ? t.blocks : 0);
    const uint8_t* asked = t.weight + (row + later) * t.row_bytes + block * Planes::bytes;
    int64_t share = 0;
    const auto ask = [&]() __attribute__((always_inline)) {
      for (share += 16; share >= pairs; share -= pairs, asked += t.row_bytes)
        for (int64_t i = 0; i < Planes::bytes + 63; i += 64) _mm_prefetch((const char*)(asked + i), _MM_HINT_T1);
    };
    for (int first = 0; first < row_tiles; first += kGroupTiles) {
      const int count = row_tiles - first < kGroupTiles ? row_tiles - first : kGroupTiles;
      for (int tile = 0; tile < count; tile++)
        for (int r = 0; r < 16; r += 4)
          unpack_four<Planes>(t.weight + (row + 16 * (first + tile) + r) * t.row_bytes + b * Planes::bytes, t.row_bytes,
                              r, group[tile]);
      float* const mine = acc + first * rounded * 512;
      group_product<Planes>(group, count, columns, pairs, b == 0, sums, mine, ask);
      if (pairs < rounded)
        for (int tile = 0; tile < count; tile++) {
          tile_step<Planes, 1>(group[tile], columns + tiles - 1, *sums, [](int) {});
          const Pending due = {
              sums, sums->mins, group + tile, columns + tiles - 1, mine + (pairs * count + tile) * 512, b == 0};
          for (int from = 0; from < 16; from += 4) float_step<Planes, 1>(due, from);
        }
      if (b + 1 < t.blocks) continue;
      for (int64_t c = 0; c < tiles; c++)
        for (int tile = 0; tile < count; tile++) {
          const int64_t left = t.columns - 16 * c;
          const float* const from = mine + (c / 2 * count + tile) * 512 + c % 2 * 256;
          store_columns([&](int64_t i) { return from + 16 * i; }, t.y + 16 * c * t.y_stride + row + 16 * (first + tile),
                        t.y_stride, left < 16 ? left : 16, t.past_cache);
        }
    }
  }
}

// Few columns: unpacking takes longer than the products, so the block after the one at hand is unpacked between them,
// and the float step of the step before is done there too, without a pause between one tile of rows and the next: the
// unpacked rows are there twice.
//
// The sixteen rows of a tile come from sixteen equal parts of a panel, a row of each, then the next row of each. So
// memory is read in sixteen places at a time, each in order, and asked for a little early: see Ahead in x86_rows.h.
constexpr int64_t kFewShortly = 2048;
constexpr int kFewTiles = 4;
constexpr int64_t kFewRowsApart = 16 * kPanelTiles, kFewTilesApart = 16 * kFewRowsApart;  // in acc: [part][row][column]

template <class Planes, int TILES>
inline void few_columns(const TileTask& t, RowTile* unpacked, StepSums* sums, float* acc) {
  constexpr int kSteps = (TILES + 1) / 2;
  const auto* const packed = reinterpret_cast<const PackedBlock*>(t.packed);
  const int64_t part_rows = (t.row_end - t.row_begin) / 16, part_bytes = part_rows * t.row_bytes;
  const uint8_t* const weight = t.weight + t.row_begin * t.row_bytes;
  // With one column tile half of a StepSums is unused: the second one lies in its gaps, and less of L1 is wanted.
  constexpr int64_t kApart = TILES == 1 ? int64_t(sizeof sums->high[0]) : int64_t(sizeof *sums);
  const auto sums_at = [&](int i) -> StepSums& {
    return *reinterpret_cast<StepSums*>(reinterpret_cast<uint8_t*>(sums) + i * kApart);
  };
  Pending due;
  const auto finish = [&](bool half, int from) __attribute__((always_inline)) {
    if (half)
      float_step<Planes, 1, kFewRowsApart, kFewTilesApart>(due, from);
    else
      float_step<Planes, 2, kFewRowsApart, kFewTilesApart>(due, from);
  };
  int turn = 0, item = 0;
  for (int r = 0; r < 16; r += 4) unpack_four<Planes>(weight + r * part_bytes, part_bytes, r, unpacked[0]);
  for (int64_t row = 0; row < part_rows; row++)
    for (int64_t b = 0; b < t.blocks; b++, item ^= 1) {
      const bool ends = b + 1 == t.blocks, more = !ends || row + 1 < part_rows;
      const uint8_t* const next = weight + (ends ? row + 1 : row) * t.row_bytes + (ends ? 0 : b + 1) * Planes::bytes;
      // behind a part's end the same part of the next panel follows
      const int64_t later = kFewShortly + (next + kFewShortly < weight + part_bytes ? 0 : 15 * part_bytes);
      RowTile &mine = unpacked[item], &other = unpacked[item ^ 1];
      const PackedBlock* const columns = packed + b * TILES;
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; step++) {
        // What is due may still need the scales in `other`, so its rows come before those that are unpacked there.
        const auto shade = [&](int part) __attribute__((always_inline)) {
          if (due.sums != nullptr) finish(TILES % 2 == 1 && step == 0, 4 * part);
          const int four = (4 * step + part) / kSteps * 4;
          if (more && (4 * step + part) % kSteps == 0) {
            for (int r = 0; r < 4; r++)
              for (int64_t i = 0; i < Planes::bytes; i += 64)
                _mm_prefetch((const char*)(next + (four + r) * part_bytes + later + i), _MM_HINT_T1);
            unpack_four<Planes>(next + four * part_bytes, part_bytes, four, other);
          }
        };
        if (2 * step + 2 <= TILES)
          tile_step<Planes, 2>(mine, columns + 2 * step, sums_at(turn), shade);
        else
          tile_step<Planes, 1>(mine, columns + 2 * step, sums_at(turn), shade);
        float* const at = acc + 2 * step * kFewTilesApart + 16 * row;
        due = {&sums_at(turn), sums_at(turn).mins, &mine, columns + 2 * step, at, b == 0};
        turn ^= 1;
      }
    }
  for (int from = 0; from < 16; from += 4) finish(TILES % 2 == 1, from);
  for (int c = 0; c < TILES; c++) {
    const int64_t left = t.columns - 16 * c;
    float* const y = t.y + 16 * c * t.y_stride + t.row_begin;
    for (int64_t first = 0; first < 16 * part_rows; first += 16) {
      const auto row_at = [&](int64_t i) {
        return acc + c * kFewTilesApart + (first + i) / part_rows * kFewRowsApart + (first + i) % part_rows * 16;
      };
      store_columns(row_at, y + first, t.y_stride, left < 16 ? left : 16, t.past_cache);
    }
  }
}

template <class Planes>
inline void matmul_tiles(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  auto* unpacked = reinterpret_cast<RowTile*>(t.scratch);
  auto* sums = reinterpret_cast<StepSums*>(unpacked + kGroupTiles);
  auto* acc = reinterpret_cast<float*>(sums + 2);
  if (Planes::has_min)  // the halves of mins that stay zero
    for (int i = 0; i < kGroupTiles; i++) __builtin_memset(unpacked[i].mins, 0, sizeof unpacked[i].mins);
  configure_tiles();
  for (int64_t row = t.row_begin; row < t.row_end; row += 16 * kPanelTiles) {
    TileTask panel = t;
    panel.row_begin = row;
    panel.row_end = t.row_end - row < 16 * kPanelTiles ? t.row_end : row + 16 * kPanelTiles;
    switch ((t.columns + 15) / 16) {
      case 1:
        few_columns<Planes, 1>(panel, unpacked, sums, acc);
        break;
      case 2:
        few_columns<Planes, 2>(panel, unpacked, sums, acc);
        break;
      case 3:
        few_columns<Planes, 3>(panel, unpacked, sums, acc);
        break;
      case kFewTiles:
        few_columns<Planes, 4>(panel, unpacked, sums, acc);
        break;
      default:
        panel_product<Planes>(t, row, int((panel.row_end - row) / 16), unpacked, sums, acc);
    }
  }
  _mm_sfence();
  _tile_release();
}
int64_t packed_tile_bytes(int64_t blocks) { return blocks * int64_t(sizeof(PackedBlock)); }
int64_t tile_scratch_bytes(int64_t columns) {
  return int64_t(kGroupTiles * sizeof(RowTile) + 2 * sizeof(StepSums)) + (columns + 31) / 32 * kPanelTiles * 512 * 4;
}
void matmul_tiles_q4_k(const TileTask& t) { matmul_tiles<MinPlanes<Q4_K512>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_tiles<MinPlanes<Q5_K512>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_tiles<SignedPlanes>(t); }
