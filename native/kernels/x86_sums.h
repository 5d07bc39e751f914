// Sums of the bytes of a quantised block. Included inside an anonymous namespace by the vec16.h of AVX2 and AVX-512.

// Sums of 16 consecutive bytes, 128 bytes at a time: each 16 are four dwords of one lane, and two horizontal additions
// bring eight such lanes together.
inline __m128i sums_of_128(const int8_t* q) {
  const __m256i ones = _mm256_set1_epi16(1), unsigned_ones = _mm256_set1_epi8(1);
  __m256i sum[4];
  for (int i = 0; i < 4; i++) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(q + 32 * i));
    sum[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_ones, bytes), ones);
  }
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
  const __m128i even = _mm256_castsi256_si128(all), odd = _mm256_extracti128_si256(all, 1);
  return _mm_packs_epi32(_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd));
}
inline void v_store_sums(BlockQ8K& block) {
  const __m128i low = sums_of_128(block.q), high = sums_of_128(block.q + 128), ones = _mm_set1_epi16(1);
  _mm_store_si128((__m128i*)block.sums16, low);
  _mm_store_si128((__m128i*)block.sums16 + 1, high);
  _mm_store_si128((__m128i*)block.sums32, _mm_packs_epi32(_mm_madd_epi16(low, ones), _mm_madd_epi16(high, ones)));
}
