// Eight columns in the lanes of one ymm register: see x86_column_tiles.h. Products of two neighbours are summed in 16
// bits for as many steps as surely fit, then meet their scale in vpmaddwd.

template <class Quant, int LARGEST>
struct StoreValues {
  static constexpr int64_t bytes = Quant::bytes;
  static constexpr int largest = LARGEST;
  static void store(const uint8_t* block, uint8_t* to) {
    const typename Quant::Unpacked w = Quant::unpack(block);
    for (int j = 0; j < 8; j++) _mm256_store_si256((__m256i*)(to + 32 * j), w.q[j]);
  }
};

struct Columns256 {
  template <class Rows, int TILES>
  static void block(const RowBlocks& rows, const PackedColumns* x, float* acc) {
    for (int t = 0; t < TILES; t++)
      for (int r = 0; r < kTileRows; r += 2) two_rows<Rows>(rows, r, x[t], acc + (t * kTileRows + r) * 16);
  }

  // Two rows and the sixteen columns of a tile.
  template <class Rows>
  static void two_rows(const RowBlocks& rows, int row, const PackedColumns& x, float* acc) {
    constexpr int fit = 32767 / (2 * Rows::largest * 127);  // vpmaddubsw results that 16 bits hold
    constexpr int steps = fit >= 8 ? 8 : fit >= 4 ? 4 : 2;
    static_assert(fit >= 2 && Rows::group / 4 % steps == 0);
    __m256i total[2][2];
    for (auto& pair : total) pair[0] = pair[1] = _mm256_setzero_si256();
    for (int k = 0; k < 64; k += steps) {
      __m256i sum[2][2];
#pragma GCC unroll 8
      for (int i = 0; i < steps; i++) {
        const __m256i x0 = _mm256_load_si256((const __m256i*)x.q[k + i]);
        const __m256i x1 = _mm256_load_si256((const __m256i*)x.q[k + i] + 1);
        for (int r = 0; r < 2; r++) {
          int32_t four;
          __builtin_memcpy(&four, rows.q[row + r] + 4 * (k + i), 4);
          const __m256i w = _mm256_set1_epi32(four);
          const __m256i p0 = _mm256_maddubs_epi16(w, x0), p1 = _mm256_maddubs_epi16(w, x1);
          sum[r][0] = i == 0 ? p0 : _mm256_add_epi16(sum[r][0], p0);
          sum[r][1] = i == 0 ? p1 : _mm256_add_epi16(sum[r][1], p1);
        }
      }
      for (int r = 0; r < 2; r++) {
        const __m256i scale = _mm256_set1_epi16(short(rows.scale[row + r][4 * k / Rows::group]));
        total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(sum[r][0], scale));
        total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(sum[r][1], scale));
      }
    }
    for (int r = 0; r < 2; r++)
      for (int h = 0; h < 2; h++) finish<Rows>(rows, row + r, x, h, total[r][h], acc + r * 16 + 8 * h);
  }

  template <class Rows>
  static void finish(const RowBlocks& rows, int row, const PackedColumns& x, int h, __m256i total, float* acc) {
    __m256i side = _mm256_setzero_si256();
    for (int i = 0; i < (Rows::has_min ? 4 : 8); i++) {
      const int16_t* pairs = Rows::has_min ? rows.min_pairs[row] : rows.scale_pairs[row];
      const auto* sums = Rows::has_min ? (const __m256i*)x.sums32[i] : (const __m256i*)x.sums16[i];
      side =
          _mm256_add_epi32(side, _mm256_madd_epi16(_mm256_load_si256(sums + h), _mm256_set1_epi32(pair_at(pairs, i))));
    }
    const __m256 d = _mm256_set1_ps(rows.d[row]);
    __m256 f;
    if (Rows::has_min) {
      f = _mm256_mul_ps(_mm256_cvtepi32_ps(total), d);
      f = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(side), _mm256_set1_ps(rows.dmin[row]), f);
    } else {
      f = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(total, _mm256_slli_epi32(side, 5))), d);
    }
    _mm256_store_ps(acc, _mm256_fmadd_ps(f, _mm256_load_ps(x.d + 8 * h), _mm256_load_ps(acc)));
  }
};

void matmul_tiles_q4_k(const TileTask& t) { matmul_columns<Columns256, RowsWithMins<StoreValues<Q4_K256, 15>>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_columns<Columns256, RowsWithMins<StoreValues<Q5_K256, 31>>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_columns<Columns256, RowsWithOffset<StoreValues<Q6_K256, 63>>>(t); }
