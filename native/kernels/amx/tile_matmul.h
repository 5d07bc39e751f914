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
// One step is 16 rows x 32 columns x one 256-block: 16 integer and 2 bfloat16 tile products. The float step of the step
// before runs between them, out of a scratch copy of its tiles.

// One column tile of one block, as pack_tile lays it out.
struct PackedBlock {
  int8_t q[4][16][16][4];    // [64 values][k / 4][column][k % 4]
  uint16_t sums[16][16][2];  // bfloat16 [sub-block][column][high, low]; rows 8 to 15 are zero
  float d[16];
  uint8_t padding[64];  // keeps neighbours off the same cache sets
};
static_assert(sizeof(PackedBlock) == 5248 && sizeof(PackedBlock) % 64 == 0);

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline void configure_tiles() {
  // volatile: gcc 12 believes ldtilecfg to read eight bytes and drops the other stores
  volatile TileConfig config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

inline uint16_t bfloat16_of(int exact) {
  const float f = float(exact);
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return uint16_t(bits >> 16);
}

// Rows of 16 dwords to columns of 16 dwords.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

void pack_tile(const BlockQ8K* x, int64_t blocks, int64_t columns, int64_t tile, uint8_t* packed) {
  const int64_t first = 16 * tile, count = columns - first < 16 ? columns - first : 16;
  const int64_t tiles = (columns + 15) / 16;
  for (int64_t b = 0; b < blocks; b++) {
    auto* out = reinterpret_cast<PackedBlock*>(packed) + b * tiles + tile;
    for (int part = 0; part < 4; part++) {
      __m512i r[16];
      for (int c = 0; c < 16; c++)
        r[c] = c < count ? _mm512_load_si512(x[(first + c) * blocks + b].q + 64 * part) : _mm512_setzero_si512();
      transpose16(r);
      for (int k = 0; k < 16; k++) _mm512_store_si512(out->q[part][k], r[k]);
    }
    __builtin_memset(out->sums, 0, sizeof out->sums);
    for (int c = 0; c < 16; c++) {
      out->d[c] = c < count ? x[(first + c) * blocks + b].d : 0.0f;
      for (int j = 0; j < 8 && c < count; j++) {
        const int sum = x[(first + c) * blocks + b].sums32[j], low = sum & 63;
        out->sums[j][c][0] = bfloat16_of(sum - low);
        out->sums[j][c][1] = bfloat16_of(low);
      }
    }
  }
}

// A panel of weights for one block: what the tiles read, and the scales of its rows.
// Its 72 KB stay in L2; smaller panels would fit L1 but stream the activations more often, which measured slower.
constexpr int kPanelTiles = 8;
struct alignas(64) Panel {
  uint8_t high[kPanelTiles][4][16][64];  // [row tile][64 values][row][value]
  uint8_t low[kPanelTiles][4][16][64];
  uint16_t mins[kPanelTiles][16][32];  // bfloat16 [row tile][row][m_0, m_0, m_1, m_1, ... zeros]
  float d[kPanelTiles][16];
  float dmin[kPanelTiles][16];
};

// Q4_K and Q5_K: sc = 8 * (sc >> 3) + (sc & 7), so high = q * (sc >> 3) and low = q * (sc & 7) stay below 256, and one
// 16-bit multiplication makes two byte products at once without a carry between them.
template <class Quant>
struct MinPlanes {
  static constexpr bool has_min = true, is_signed = false;
  static constexpr int shift = 3;
  static constexpr int64_t bytes = Quant::bytes;
  static void unpack(const uint8_t* block, Panel& panel, int tile, int row) {
    const ScaleBytes packed = unpack_scales(block + 4);
    const __m128i sc = _mm_cvtsi64_si128((long long)packed.scale);
    const __m512i words = _mm512_castsi128_si512(_mm_cvtepu8_epi16(sc));
    const __m512i high = _mm512_srli_epi16(words, 3), low = _mm512_and_si512(words, _mm512_set1_epi16(7));
    __m512i q[4];
    Quant::values(block, q);
    for (int c = 0; c < 4; c++) {
      const __m512i order = halves16(short(2 * c), short(2 * c + 1));
      _mm512_store_si512(panel.high[tile][c][row], _mm512_mullo_epi16(q[c], _mm512_permutexvar_epi16(order, high)));
      _mm512_store_si512(panel.low[tile][c][row], _mm512_mullo_epi16(q[c], _mm512_permutexvar_epi16(order, low)));
    }
    const __m256 mins = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)packed.min)));
    const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(mins), 16);  // exact: mins are below 64
    _mm512_store_si512(panel.mins[tile][row],
                       _mm512_zextsi256_si512(_mm256_or_si256(upper, _mm256_slli_epi32(upper, 16))));
    uint16_t d, dmin;
    __builtin_memcpy(&d, block, 2);
    __builtin_memcpy(&dmin, block + 2, 2);
    panel.d[tile][row] = half_to_float(d);
    panel.dmin[tile][row] = half_to_float(dmin);
  }
};
// Q6_K: sc * (q - 32) lies in [-4096, 4096] = 64 * high + low with high in [-64, 64] and low in [0, 63].
struct SignedPlanes {
  static constexpr bool has_min = false, is_signed = true;
  static constexpr int shift = 6;
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static void unpack(const uint8_t* block, Panel& panel, int tile, int row) {
    __m512i q[4];
    Q6_K512::values(block, q);
    const __m512i words = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(block + 192))));
    const __m512i lanes = _mm512_setr_epi64(0, 0, 0x0001000100010001, 0x0001000100010001, 0x0002000200020002,
                                            0x0002000200020002, 0x0003000300030003, 0x0003000300030003);
    const __m512i zero = _mm512_setzero_si512(), middle = _mm512_set1_epi16(32), low_bits = _mm512_set1_epi16(63);
    for (int c = 0; c < 4; c++) {  // the scale of each 128-bit lane of q[c]
      const __m512i order = _mm512_add_epi16(lanes, _mm512_set1_epi16(short(4 * c)));
      const __m512i scale = _mm512_permutexvar_epi16(order, words);
      const __m512i a = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_unpacklo_epi8(q[c], zero), middle), scale);
      const __m512i b = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_unpackhi_epi8(q[c], zero), middle), scale);
      _mm512_store_si512(panel.high[tile][c][row],
                         _mm512_packs_epi16(_mm512_srai_epi16(a, 6), _mm512_srai_epi16(b, 6)));
      _mm512_store_si512(panel.low[tile][c][row],
                         _mm512_packs_epi16(_mm512_and_si512(a, low_bits), _mm512_and_si512(b, low_bits)));
    }
    uint16_t d;
    __builtin_memcpy(&d, block + offsetof(BlockQ6_K, d), 2);
    panel.d[tile][row] = half_to_float(d);
  }
};

// The tiles of one step, as they were stored: [column tile][row][column].
struct alignas(64) StepSums {
  int32_t high[2][16][16];
  int32_t low[2][16][16];
  float mins[2][16][16];
};

// The float step for rows [from, from + 4) of a finished step: acc[row][column] of COLUMN_TILES tiles.
template <class Planes, int COLUMN_TILES>
inline __attribute__((always_inline)) void float_step(const StepSums& sums, const Panel& panel, int tile,
                                                      const PackedBlock* columns, float* acc, bool first, int from) {
  __m512 dx[COLUMN_TILES];
  for (int t = 0; t < COLUMN_TILES; t++) dx[t] = _mm512_load_ps(columns[t].d);
#pragma GCC unroll 4
  for (int r = from; r < from + 4; r++) {
    const __m512 d = _mm512_set1_ps(panel.d[tile][r]);
    for (int t = 0; t < COLUMN_TILES; t++) {
      const __m512i high = _mm512_load_si512(sums.high[t][r]), low = _mm512_load_si512(sums.low[t][r]);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, Planes::shift), low);
      __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), d);
      if (Planes::has_min)
        f = _mm512_fnmadd_ps(_mm512_load_ps(sums.mins[t][r]), _mm512_set1_ps(panel.dmin[tile][r]), f);
      float* at = acc + (t * 16 + r) * 16;
      _mm512_store_ps(at, _mm512_fmadd_ps(f, dx[t], first ? _mm512_setzero_ps() : _mm512_load_ps(at)));
    }
  }
}

#define QTENSOR_TILE_PRODUCT(acc, a, b) \
  do {                                  \
    if (Planes::is_signed)              \
      _tile_dpbssd(acc, a, b);          \
    else                                \
      _tile_dpbusd(acc, a, b);          \
  } while (0)

// 64 values of a step: both planes with each column tile. All four operands are asked for before
// the first product needs one.
template <class Planes, int COLUMN_TILES>
inline __attribute__((always_inline)) void tile_part(const Panel& panel, int tile, const PackedBlock* columns,
                                                     int part) {
  _tile_loadd(4, panel.high[tile][part], 64);
  _tile_loadd(6, columns[0].q[part], 64);
  _tile_loadd(5, panel.low[tile][part], 64);
  if (COLUMN_TILES == 2) _tile_loadd(7, columns[1].q[part], 64);
  QTENSOR_TILE_PRODUCT(0, 4, 6);
  QTENSOR_TILE_PRODUCT(2, 5, 6);
  if (COLUMN_TILES == 2) {
    QTENSOR_TILE_PRODUCT(1, 4, 7);
    QTENSOR_TILE_PRODUCT(3, 5, 7);
  }
}
#undef QTENSOR_TILE_PRODUCT

template <class Planes, int COLUMN_TILES>
inline __attribute__((always_inline)) void store_sums(const Panel& panel, int tile, const PackedBlock* columns,
                                                      StepSums& sums) {
  _tile_stored(0, sums.high[0], 64);
  _tile_stored(2, sums.low[0], 64);
  if (COLUMN_TILES == 2) {
    _tile_stored(1, sums.high[1], 64);
    _tile_stored(3, sums.low[1], 64);
  }
  if (Planes::has_min) {
    _tile_zero(0);
    _tile_loadd(4, panel.mins[tile], 64);
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

// A step whose tiles are stored but whose floats are still due.
struct Pending {
  const StepSums* sums = nullptr;
  const PackedBlock* columns = nullptr;
  float* acc = nullptr;
  int tile = 0;
};

// One step of COLUMN_TILES column tiles; the pending one (of two column tiles) is finished between its products.
template <class Planes, int COLUMN_TILES>
inline void tile_step(const Panel& panel, int tile, const PackedBlock* columns, StepSums& sums, bool first,
                      const Pending& due) {
  _tile_zero(0);
  _tile_zero(2);
  if (COLUMN_TILES == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
#pragma GCC unroll 4
  for (int part = 0; part < 4; part++) {
    tile_part<Planes, COLUMN_TILES>(panel, tile, columns, part);
    if (due.sums != nullptr) float_step<Planes, 2>(*due.sums, panel, due.tile, due.columns, due.acc, first, 4 * part);
  }
  store_sums<Planes, COLUMN_TILES>(panel, tile, columns, sums);
}

inline void store_columns(const float* acc, float* y, int64_t y_stride, int64_t columns, bool past_cache) {
  __m512i r[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(acc + 16 * i);
  transpose16(r);
  for (int64_t c = 0; c < columns; c++) {
    if (past_cache)
      _mm512_stream_si512((__m512i*)(y + c * y_stride), r[c]);
    else
      _mm512_storeu_si512(y + c * y_stride, r[c]);
  }
}

// Row tiles of one panel through every block. acc: [column tile][row tile][16 rows][16 columns] for pairs of column
// tiles: [pair][row tile][2][16][16].
template <class Planes>
inline void panel_product(const TileTask& t, int64_t row, int row_tiles, Panel& panel, StepSums* sums, float* acc) {
  const int64_t tiles = (t.columns + 15) / 16;
  for (int64_t b = 0; b < t.blocks; b++) {
    for (int tile = 0; tile < row_tiles; tile++)
      for (int r = 0; r < 16; r++) {
        const uint8_t* block = t.weight + (row + 16 * tile + r) * t.row_bytes + b * Planes::bytes;
        prefetch_block(block + 2 * Planes::bytes, Planes::bytes);
        Planes::unpack(block, panel, tile, r);
      }
    const auto* columns = reinterpret_cast<const PackedBlock*>(t.packed) + b * tiles;
    Pending due;
    int turn = 0;
    int64_t c = 0;
    for (; c + 2 <= tiles; c += 2)
      for (int tile = 0; tile < row_tiles; tile++) {
        StepSums& mine = sums[turn];
        turn ^= 1;
        tile_step<Planes, 2>(panel, tile, columns + c, mine, b == 0, due);
        due = {&mine, columns + c, acc + (c / 2 * row_tiles + tile) * 512, tile};
      }
    if (due.sums != nullptr)
      for (int from = 0; from < 16; from += 4)
        float_step<Planes, 2>(*due.sums, panel, due.tile, due.columns, due.acc, b == 0, from);
    if (c < tiles)
      for (int tile = 0; tile < row_tiles; tile++) {
        tile_step<Planes, 1>(panel, tile, columns + c, sums[0], b == 0, {});
        for (int from = 0; from < 16; from += 4)
          float_step<Planes, 1>(sums[0], panel, tile, columns + c, acc + (c / 2 * row_tiles + tile) * 512, b == 0,
                                from);
      }
  }
  for (int64_t c = 0; c < tiles; c++)
    for (int tile = 0; tile < row_tiles; tile++) {
      const int64_t left = t.columns - 16 * c;
      store_columns(acc + (c / 2 * row_tiles + tile) * 512 + c % 2 * 256, t.y + 16 * c * t.y_stride + row + 16 * tile,
                    t.y_stride, left < 16 ? left : 16, t.past_cache);
    }
}

template <class Planes>
inline void matmul_tiles(const TileTask& t) {
  configure_tiles();
  auto* panel = reinterpret_cast<Panel*>(t.scratch);
  auto* sums = reinterpret_cast<StepSums*>(panel + 1);
  auto* acc = reinterpret_cast<float*>(sums + 2);
  for (int64_t row = t.row_begin; row < t.row_end; row += 16 * kPanelTiles) {
    const int64_t left = (t.row_end - row) / 16;
    panel_product<Planes>(t, row, int(left < kPanelTiles ? left : kPanelTiles), *panel, sums, acc);
  }
  _mm_sfence();
  _tile_release();
}
int64_t packed_tile_bytes(int64_t blocks) { return blocks * int64_t(sizeof(PackedBlock)); }
int64_t tile_scratch_bytes(int64_t columns) {
  return int64_t(sizeof(Panel) + 2 * sizeof(StepSums)) + (columns + 31) / 32 * kPanelTiles * 512 * 4;
}
void matmul_tiles_q4_k(const TileTask& t) { matmul_tiles<MinPlanes<Q4_K512>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_tiles<MinPlanes<Q5_K512>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_tiles<SignedPlanes>(t); }
