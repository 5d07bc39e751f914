// What x86_byte_dots.h builds on, for AVX-512 with VNNI. Scores are sums of four byte products at once; weights have 16
// bits, so the bytes of a value are taken as two pairs of words, 0 with 2 and 1 with 3, and the weights lie in that
// order.

using QueryLane = int8_t;
using Words = __m512i;
constexpr int kWordBytes = 64, kDotVectors = 4;
constexpr int64_t kBlockLanes = kDotVectors * kWordBytes / 4;
// One group of a block of so many lanes, for four queries, in the units of fetch_ahead.h.
constexpr uint32_t kScoreGroupTime = 14, kValueGroupTime = 26;

inline Words w_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void w_store(void* p, Words a) { _mm512_storeu_si512(p, a); }
inline Words w_bytes(int x) { return _mm512_set1_epi8(char(x)); }
inline Words w_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Words w_and(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words w_or(Words a, Words b) { return _mm512_or_si512(a, b); }
template <int BITS>
inline Words w_right(Words a) {
  return _mm512_srli_epi16(a, BITS);
}
template <int BITS>
inline Words w_left(Words a) {
  return _mm512_slli_epi16(a, BITS);
}
inline Words w_table(const uint8_t* sixteen) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)sixteen));
}
inline Words w_look_up(Words table, Words numbers) { return _mm512_shuffle_epi8(table, numbers); }

inline int32_t four_bytes_at(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return four;
}
inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) { __builtin_memcpy(out, bytes, size_t(dim)); }
inline void lay_weights(int16_t* out, V16 whole) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole));
  _mm256_storeu_si256((__m256i*)out, _mm256_shuffle_epi8(words, order));
}

template <int QUERIES, int VECTORS>
inline void add_group(const int8_t* const* a, int64_t group, const Words (&bytes)[VECTORS],
                      Words (&acc)[QUERIES][VECTORS]) {
  for (int i = 0; i < QUERIES; i++) {
    const __m512i x = w_ints(four_bytes_at(a[i] + 4 * group));
    for (int v = 0; v < VECTORS; v++) acc[i][v] = _mm512_dpbusd_epi32(acc[i][v], bytes[v], x);
  }
}
template <int QUERIES, int VECTORS>
inline void add_group(const int16_t* const* a, int64_t group, const Words (&bytes)[VECTORS],
                      Words (&acc)[QUERIES][VECTORS]) {
  const __m512i low = _mm512_set1_epi16(255);
  __m512i even[VECTORS], odd[VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    even[v] = _mm512_and_si512(bytes[v], low);
    odd[v] = _mm512_srli_epi16(bytes[v], 8);
  }
  for (int i = 0; i < QUERIES; i++) {
    const __m512i x = w_ints(four_bytes_at(a[i] + 4 * group)), y = w_ints(four_bytes_at(a[i] + 4 * group + 2));
    for (int v = 0; v < VECTORS; v++) {
      acc[i][v] = _mm512_dpwssd_epi32(acc[i][v], even[v], x);
      acc[i][v] = _mm512_dpwssd_epi32(acc[i][v], odd[v], y);
    }
  }
}
