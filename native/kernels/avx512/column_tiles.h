// Sixteen columns in the lanes of one zmm register: see x86_column_tiles.h.

template <class Quant, int LARGEST>
struct StoreValues {
  static constexpr int64_t bytes = Quant::bytes;
  static constexpr int largest = LARGEST;
  static void store(const uint8_t* block, uint8_t* to) {
    __m512i q[4];
    Quant::values(block, q);
    for (int c = 0; c < 4; c++) _mm512_store_si512(to + 64 * c, q[c]);
  }
};

inline __m256i column_scales(__m256i scales) { return scales; }

struct Columns512 {
  template <class Rows, int TILES>
  static void block(const RowBlocks& rows, const PackedColumns* x, float* acc, int64_t tile_floats) {
    __m512i total[kTileRows][TILES];
    for (int r = 0; r < kTileRows; r++)
      for (int t = 0; t < TILES; t++) total[r][t] = _mm512_setzero_si512();
    for (int g = 0; g < 256 / Rows::group; g++) {
      __m512i sum[kTileRows][TILES];
      for (int r = 0; r < kTileRows; r++)
        for (int t = 0; t < TILES; t++) sum[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < Rows::group / 4; i++) {
        const int k = g * (Rows::group / 4) + i;
        __m512i xv[TILES];
        for (int t = 0; t < TILES; t++) xv[t] = _mm512_load_si512(x[t].q[k]);
        for (int r = 0; r < kTileRows; r++) {
          const __m512i w = _mm512_set1_epi32(dword_at(rows.q[r], k));
          for (int t = 0; t < TILES; t++) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], w, xv[t]);
        }
      }
      for (int r = 0; r < kTileRows; r++) {
        const __m512i scale = _mm512_set1_epi32(rows.scale[r][g]);
        for (int t = 0; t < TILES; t++)
          total[r][t] = _mm512_add_epi32(total[r][t], _mm512_mullo_epi32(sum[r][t], scale));
      }
    }
    for (int t = 0; t < TILES; t++) {
      const __m512 dx = _mm512_load_ps(x[t].d);
      for (int r = 0; r < kTileRows; r++) {
        __m512i side = _mm512_setzero_si512();
        if (Rows::has_min)
          for (int i = 0; i < 4; i++)
            side = _mm512_dpwssd_epi32(side, _mm512_load_si512(x[t].sums32[i]),
                                       _mm512_set1_epi32(dword_at(rows.min_pairs[r], i)));
        else
          for (int i = 0; i < 8; i++)
            side = _mm512_dpwssd_epi32(side, _mm512_load_si512(x[t].sums16[i]),
                                       _mm512_set1_epi32(dword_at(rows.scale_pairs[r], i)));
        const __m512 d = _mm512_set1_ps(rows.d[r]);
        __m512 f;
        if (Rows::has_min) {
          f = _mm512_mul_ps(_mm512_cvtepi32_ps(total[r][t]), d);
          f = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(side), _mm512_set1_ps(rows.dmin[r]), f);
        } else {
          f = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(total[r][t], _mm512_slli_epi32(side, 5))), d);
        }
        float* at = acc + t * tile_floats + r * 16;
        _mm512_store_ps(at, _mm512_fmadd_ps(f, dx, _mm512_load_ps(at)));
      }
    }
  }

  // The first eight columns of a tile, in ymm registers.
  template <class Rows>
  static void half_block(const RowBlocks& rows, const PackedColumns& x, float* acc) {
    __m256i total[kTileRows];
    for (auto& sum : total) sum = _mm256_setzero_si256();
    for (int g = 0; g < 256 / Rows::group; g++) {
      __m256i sum[kTileRows][2];
      for (auto& s : sum) s[0] = s[1] = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int i = 0; i < Rows::group / 4; i++) {
        const int k = g * (Rows::group / 4) + i;
        const __m256i xv = _mm256_load_si256((const __m256i*)x.q[k]);
        for (int r = 0; r < kTileRows; r++)
          sum[r][i % 2] = _mm256_dpbusd_epi32(sum[r][i % 2], _mm256_set1_epi32(dword_at(rows.q[r], k)), xv);
      }
      for (int r = 0; r < kTileRows; r++) {
        const __m256i scale = _mm256_set1_epi32(rows.scale[r][g]);
        total[r] = _mm256_add_epi32(total[r], _mm256_mullo_epi32(_mm256_add_epi32(sum[r][0], sum[r][1]), scale));
      }
    }
    const __m256 dx = _mm256_load_ps(x.d);
    for (int r = 0; r < kTileRows; r++) {
      __m256i side = _mm256_setzero_si256();
      for (int i = 0; i < (Rows::has_min ? 4 : 8); i++) {
        const auto* sums = (const __m256i*)(Rows::has_min ? x.sums32[i] : x.sums16[i]);
        const int16_t* pairs = Rows::has_min ? rows.min_pairs[r] : rows.scale_pairs[r];
        side = _mm256_dpwssd_epi32(side, _mm256_load_si256(sums), _mm256_set1_epi32(dword_at(pairs, i)));
      }
      const __m256 d = _mm256_set1_ps(rows.d[r]);
      __m256 f;
      if (Rows::has_min) {
        f = _mm256_mul_ps(_mm256_cvtepi32_ps(total[r]), d);
        f = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(side), _mm256_set1_ps(rows.dmin[r]), f);
      } else {
        f = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(total[r], _mm256_slli_epi32(side, 5))), d);
      }
      _mm256_store_ps(acc + 16 * r, _mm256_fmadd_ps(f, dx, _mm256_load_ps(acc + 16 * r)));
    }
  }
};

void matmul_tiles_q4_k(const TileTask& t) { matmul_columns<Columns512, RowsWithMins<StoreValues<Q4_K512, 15>>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_columns<Columns512, RowsWithMins<StoreValues<Q5_K512, 31>>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_columns<Columns512, RowsWithOffset<StoreValues<Q6_K512, 63>>>(t); }
