// One to four columns and four rows of K-quants with VNNI: the headers of four rows are taken apart together, one row in
// each 128-bit lane, and so are their mins and offsets. See x86_matmul.h for the loops.

// What the blocks of four rows say besides their values.
struct FourHeaders {
  __m512i scales[2];  // 16-bit, eight in each row's lane: of eight sub-blocks, or of groups 0..7 and 8..15
  __m512i mins;       // likewise
  __m128 d, dmin;
};

inline __m512i rows_16(const uint8_t* const* place, int64_t at) {  // sixteen bytes of each row
  const auto load = [&](int r) { return _mm_loadu_si128((const __m128i*)(place[r] + at)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(2)), load(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
inline __m512i every_lane(int a, int b, int c, int d) { return _mm512_broadcast_i32x4(_mm_setr_epi32(a, b, c, d)); }

// The sum of each lane's dwords, as the dword of that row.
inline __m128i fold_lanes(__m512i a) {
  a = _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_BADC));
  a = _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_CDAB));
  return _mm512_castsi512_si128(
      _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), a));
}
inline __m512i sums_of(const int16_t* eight) {
  return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)eight));
}

// Words 0..7 of lane `row`, each four times, in the order that pack gives products of 64 weights: `pattern` names the
// word of each four.
inline __m512i spread_scales(__m512i words, int row, __m512i pattern) {
  return _mm512_permutexvar_epi16(_mm512_add_epi16(pattern, _mm512_set1_epi16(short(8 * row))), words);
}

inline FourHeaders headers_with_mins(const uint8_t* const* place) {
  const __m512i raw = rows_16(place, 0);  // d, dmin and twelve bytes of six-bit scales and mins
  const __m512i ab = _mm512_shuffle_epi32(raw, _MM_PERM_CCBB), c = _mm512_shuffle_epi32(raw, _MM_PERM_DDDD);
  const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(ab, every_lane(0, 2, 0, 2)),
                                       every_lane(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030));
  const __m512i high = _mm512_and_si512(_mm512_srlv_epi32(c, every_lane(0, 0, 0, 4)),
                                        every_lane(0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
  const __m512i bytes = _mm512_or_si512(low, high), zero = _mm512_setzero_si512();
  FourHeaders h;
  h.scales[0] = h.scales[1] = _mm512_unpacklo_epi8(bytes, zero);
  h.mins = _mm512_unpackhi_epi8(bytes, zero);
  const __m512i order = _mm512_zextsi128_si512(_mm_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25));
  const __m256 both = _mm256_cvtph_ps(_mm512_castsi512_si128(_mm512_permutexvar_epi16(order, raw)));
  h.d = _mm256_castps256_ps128(both);
  h.dmin = _mm256_extractf128_ps(both, 1);
  return h;
}

inline FourHeaders headers_with_offset(const uint8_t* const* place) {
  const __m512i bytes = rows_16(place, offsetof(BlockQ6_K, scales));
  FourHeaders h;
  h.scales[0] = _mm512_srai_epi16(_mm512_unpacklo_epi8(bytes, bytes), 8);
  h.scales[1] = _mm512_srai_epi16(_mm512_unpackhi_epi8(bytes, bytes), 8);
  half d[4];
  for (int r = 0; r < 4; r++) __builtin_memcpy(&d[r], place[r] + offsetof(BlockQ6_K, d), 2);
  __m128i halves = _mm_cvtsi32_si128(d[0]);
  halves = _mm_insert_epi16(halves, d[1], 1);
  halves = _mm_insert_epi16(halves, d[2], 2);
  h.d = _mm_cvtph_ps(_mm_insert_epi16(halves, d[3], 3));
  return h;
}

// Columns share the unpacking of a row. With one or two of them activations are taken apart as the nibbles of 64 bytes
// are, which saves unpacking and costs nothing while they stay in registers.
template <class Quant, int COLUMNS>
inline void k_quant_four_rows(const MatmulTask& t, int64_t row, int64_t column) {
  constexpr bool split = COLUMNS <= 2 && Quant::can_split;
  const int64_t blocks = t.blocks_per_column, ahead = prefetch_blocks(blocks) * Quant::bytes;
  const __m512i zero = _mm512_setzero_si512(), pattern = Quant::template scale_order<split>();
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (row + r) * t.row_bytes;
  __m128 acc[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) acc[c] = _mm_setzero_ps();
  const BlockQ8K* x = t.blocks + column * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    const FourHeaders h = Quant::headers(place);
    const __m512i second = Quant::has_min ? _mm512_add_epi16(pattern, _mm512_set1_epi16(4)) : pattern;
    __m512i xv[COLUMNS][4], sum[COLUMNS][4];
    for (int c = 0; c < COLUMNS; c++) Quant::template activations<split>(x[c * blocks], xv[c]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      prefetch_block(place[r] + ahead, Quant::bytes);
      __m512i q[4];
      Quant::template four_values<split>(place[r], q);
      place[r] += Quant::bytes;
      const __m512i scale0 = spread_scales(h.scales[0], r, pattern), scale1 = spread_scales(h.scales[1], r, second);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) {
        __m512i dot[4];
        for (int i = 0; i < 4; i++) dot[i] = _mm512_dpbusd_epi32(zero, q[i], xv[c][i]);
        sum[c][r] = _mm512_dpwssd_epi32(zero, _mm512_packs_epi32(dot[0], dot[1]), scale0);
        sum[c][r] = _mm512_dpwssd_epi32(sum[c][r], _mm512_packs_epi32(dot[2], dot[3]), scale1);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) {
      const BlockQ8K& xb = x[c * blocks];
      __m128i products = fold_four(sum[c][0], sum[c][1], sum[c][2], sum[c][3]);
      __m128 f;
      if (Quant::has_min) {
        const __m128i mins = fold_lanes(_mm512_madd_epi16(h.mins, sums_of(xb.sums32)));
        f = _mm_fnmadd_ps(_mm_cvtepi32_ps(mins), h.dmin, _mm_mul_ps(_mm_cvtepi32_ps(products), h.d));
      } else {
        __m512i offset = _mm512_madd_epi16(h.scales[0], sums_of(xb.sums16));
        offset = _mm512_add_epi32(offset, _mm512_madd_epi16(h.scales[1], sums_of(xb.sums16 + 8)));
        products = _mm_sub_epi32(products, _mm_slli_epi32(fold_lanes(offset), 5));
        f = _mm_mul_ps(_mm_cvtepi32_ps(products), h.d);
      }
      acc[c] = _mm_fmadd_ps(f, _mm_set1_ps(xb.d), acc[c]);
    }
  }
  for (int c = 0; c < COLUMNS; c++) _mm_storeu_ps(t.y + (column + c) * t.y_stride + row, acc[c]);
}
