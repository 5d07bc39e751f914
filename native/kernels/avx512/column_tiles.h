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

struct Columns512 {
  template <class Rows, int TILES>
  static void block(const RowBlocks& rows, const PackedColumns* x, float* acc) {
    __m512i total[kTileRows][TILES];
    for (int r = 0; r < kTileRows; r++)
      for (int t = 0; t < TILES; t++) total[r][t] = _mm512_setzero_si512();
    for (int g = 0; g < 256 / Rows::group; g++) {
      __m512i sum[kTileRows][TILES];
      for (int r = 0; r < kTileRows; r++)
        for (int t = 0; t < TILES; t++) sum[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int k = g * Rows::group / 4; k < (g + 1) * Rows::group / 4; k++) {
        __m512i xv[TILES];
        for (int t = 0; t < TILES; t++) xv[t] = _mm512_load_si512(x[t].q[k]);
        for (int r = 0; r < kTileRows; r++) {
          int32_t four;
          __builtin_memcpy(&four, rows.q[r] + 4 * k, 4);
          const __m512i w = _mm512_set1_epi32(four);
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
                                       _mm512_set1_epi32(pair_at(rows.min_pairs[r], i)));
        else
          for (int i = 0; i < 8; i++)
            side = _mm512_dpwssd_epi32(side, _mm512_load_si512(x[t].sums16[i]),
                                       _mm512_set1_epi32(pair_at(rows.scale_pairs[r], i)));
        const __m512 d = _mm512_set1_ps(rows.d[r]);
        __m512 f;
        if (Rows::has_min) {
          f = _mm512_mul_ps(_mm512_cvtepi32_ps(total[r][t]), d);
          f = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(side), _mm512_set1_ps(rows.dmin[r]), f);
        } else {
          f = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(total[r][t], _mm512_slli_epi32(side, 5))), d);
        }
        float* at = acc + (t * kTileRows + r) * 16;
        _mm512_store_ps(at, _mm512_fmadd_ps(f, dx, _mm512_load_ps(at)));
      }
    }
  }
};

void matmul_tiles_q4_k(const TileTask& t) { matmul_columns<Columns512, RowsWithMins<StoreValues<Q4_K512, 15>>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_columns<Columns512, RowsWithMins<StoreValues<Q5_K512, 31>>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_columns<Columns512, RowsWithOffset<StoreValues<Q6_K512, 63>>>(t); }
