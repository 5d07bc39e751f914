// Many columns without AMX: sixteen activation columns lie in the lanes of a vector, a weight's bytes are broadcast to
// all of them. Each column's sum grows in its own lane, so nothing is ever folded. Included inside an anonymous
// namespace, after integer_kernels.h of the instruction set, which has `values` for each format and then gives Columns
// (see below).

// Sixteen columns of one 256-block, as pack_tile lays them out.
struct PackedColumns {
  int8_t q[64][16][4];       // [k / 4][column][k % 4]
  int16_t sums16[8][16][2];  // [pair of groups of 16][column][group]
  int16_t sums32[4][16][2];  // [pair of sub-blocks][column][sub-block]
  float d[16];
};
static_assert(sizeof(PackedColumns) == 4928 && sizeof(PackedColumns) % 64 == 0);

void pack_tile(const BlockQ8K* x, int64_t blocks, int64_t columns, int64_t tile, uint8_t* packed) {
  const int64_t first = 16 * tile, tiles = (columns + 15) / 16;
  for (int64_t b = 0; b < blocks; b++) {
    auto* out = reinterpret_cast<PackedColumns*>(packed) + b * tiles + tile;
    if (first + 16 > columns) __builtin_memset(out, 0, sizeof *out);
    for (int64_t c = 0; c < 16 && first + c < columns; c++) {
      const BlockQ8K& from = x[(first + c) * blocks + b];
      for (int k = 0; k < 64; k++) __builtin_memcpy(out->q[k][c], from.q + 4 * k, 4);
      for (int i = 0; i < 8; i++) __builtin_memcpy(out->sums16[i][c], from.sums16 + 2 * i, 4);
      for (int i = 0; i < 4; i++) __builtin_memcpy(out->sums32[i][c], from.sums32 + 2 * i, 4);
      out->d[c] = from.d;
    }
  }
}

// From 32-bit scales to what the products of the instruction set are multiplied by.
inline __m256i column_scales(__m256i scales);

// One 256-block of a few weight rows, unpacked for broadcasting.
constexpr int kTileRows = 4;
struct alignas(64) RowBlocks {
  uint8_t q[kTileRows][256];
  int32_t scale[kTileRows][16];        // of each sub-block, or each group of 16, as Columns multiplies by it
  int16_t scale_pairs[kTileRows][16];  // the same, two to a dword
  int16_t min_pairs[kTileRows][8];
  float d[kTileRows], dmin[kTileRows];
};

template <class Values>
struct RowsWithMins {
  static constexpr bool has_min = true;
  static constexpr int group = 32, largest = Values::largest;
  static constexpr int64_t bytes = Values::bytes;
  static QTENSOR_INLINE void unpack(const uint8_t* block, RowBlocks& to, int row) {
    const ScaleBytes packed = unpack_scales(block + 4);
    const __m128i scale = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)packed.scale));
    _mm256_store_si256((__m256i*)to.scale[row], column_scales(_mm256_cvtepu16_epi32(scale)));
    const __m128i min = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)packed.min));
    _mm_store_si128((__m128i*)to.min_pairs[row], min);
    Values::store(block, to.q[row]);
    half d, dmin;
    __builtin_memcpy(&d, block, 2);
    __builtin_memcpy(&dmin, block + 2, 2);
    to.d[row] = half_to_float(d);
    to.dmin[row] = half_to_float(dmin);
  }
};

template <class Values>
struct RowsWithOffset {
  static constexpr bool has_min = false;
  static constexpr int group = 16, largest = Values::largest;
  static constexpr int64_t bytes = Values::bytes;
  static QTENSOR_INLINE void unpack(const uint8_t* block, RowBlocks& to, int row) {
    const __m256i scale = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(block + offsetof(BlockQ6_K, scales))));
    _mm256_store_si256((__m256i*)to.scale_pairs[row], scale);
    const __m128i low = _mm256_castsi256_si128(scale), high = _mm256_extracti128_si256(scale, 1);
    _mm256_store_si256((__m256i*)to.scale[row], column_scales(_mm256_cvtepi16_epi32(low)));
    _mm256_store_si256((__m256i*)to.scale[row] + 1, column_scales(_mm256_cvtepi16_epi32(high)));
    Values::store(block, to.q[row]);
    half d;
    __builtin_memcpy(&d, block + offsetof(BlockQ6_K, d), 2);
    to.d[row] = half_to_float(d);
  }
};

inline int32_t dword_at(const void* from, int index) {
  int32_t value;
  __builtin_memcpy(&value, (const uint8_t*)from + 4 * index, 4);
  return value;
}

// Columns::block<Rows, TILES>(rows, packed, acc, tile_floats): acc[kTileRows][16] = fma(f, d of the column, acc) for
// one block, those of the second tile tile_floats behind the first; Columns::half_block<Rows> the same for the first
// eight columns of one tile.
//
// A panel of GROUPS groups of rows goes through every block. acc: [column tile][group][row][column].
template <class Columns, class Rows, int GROUPS>
inline void column_panel(const TileTask& t, int64_t row, RowBlocks* rows, float* acc) {
  constexpr int panel_rows = GROUPS * kTileRows, tile_floats = panel_rows * 16;
  const int64_t tiles = (t.columns + 15) / 16;
  __builtin_memset(acc, 0, size_t(tiles * tile_floats) * sizeof(float));
  Ahead<panel_rows> ahead(t.weight + row * t.row_bytes, t.row_bytes, Rows::bytes);
  for (int64_t b = 0; b < t.blocks; b++) {
    ahead.ask();
    for (int g = 0; g < GROUPS; g++)
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; r++)
        Rows::unpack(t.weight + (row + g * kTileRows + r) * t.row_bytes + b * Rows::bytes, rows[g], r);
    const auto* packed = reinterpret_cast<const PackedColumns*>(t.packed) + b * tiles;
    for (int64_t tile = 0; tile < tiles; tile += 2)
      for (int g = 0; g < GROUPS; g++) {
        float* sums = acc + tile * tile_floats + g * kTileRows * 16;
        if (t.columns <= 8)
          Columns::template half_block<Rows>(rows[g], packed[tile], sums);
        else if (tile + 1 < tiles)
          Columns::template block<Rows, 2>(rows[g], packed + tile, sums, tile_floats);
        else
          Columns::template block<Rows, 1>(rows[g], packed + tile, sums, tile_floats);
      }
  }
  for (int64_t c = 0; c < t.columns; c++) {
    alignas(64) float column[panel_rows];
    for (int r = 0; r < panel_rows; r++) column[r] = acc[c / 16 * tile_floats + r * 16 + c % 16];
    __builtin_memcpy(t.y + c * t.y_stride + row, column, sizeof column);
  }
}

// With many columns a panel has as many rows as a cache line of the result, and the columns are read once for all of
// them; with few the unpacking of one group runs beside the products of the group before.
constexpr int kPanelGroups = 4;
template <class Columns, class Rows>
inline void matmul_columns(const TileTask& t) {
  auto* rows = reinterpret_cast<RowBlocks*>(t.scratch);
  auto* acc = reinterpret_cast<float*>(rows + kPanelGroups);
  constexpr int panel_rows = kPanelGroups * kTileRows;
  if (t.columns > 32)
    for (int64_t row = t.row_begin; row < t.row_end; row += panel_rows)
      column_panel<Columns, Rows, kPanelGroups>(t, row, rows, acc);
  else
    for (int64_t row = t.row_begin; row < t.row_end; row += kTileRows)
      column_panel<Columns, Rows, 1>(t, row, rows, acc);
}

int64_t packed_tile_bytes(int64_t blocks) { return blocks * int64_t(sizeof(PackedColumns)); }
int64_t tile_scratch_bytes(int64_t columns) {
  const int64_t tiles = (columns + 15) / 16;
  return kPanelGroups * int64_t(sizeof(RowBlocks) + tiles * kTileRows * 16 * sizeof(float));
}
