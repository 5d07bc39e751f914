// Exact sums of products for attention over bytes (generic/byte_dots.h says which), for AVX-512 with VNNI. Scores are
// sums of four byte products at once; weights have 16 bits, so the bytes of a value are taken as two pairs of words, 0
// with 2 and 1 with 3, and the weights lie in that order.

using QueryLane = int8_t;

inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) { __builtin_memcpy(out, bytes, size_t(dim)); }
inline void lay_weights(int16_t* out, V16 whole) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole));
  _mm256_storeu_si256((__m256i*)out, _mm256_shuffle_epi8(words, order));
}

inline __m512i four_bytes_of(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// What happens to VECTORS x 16 lanes of one group.
template <int QUERIES, int VECTORS>
inline void add_group(const int8_t* const* a, int64_t group, const uint8_t* row, __m512i (&acc)[QUERIES][VECTORS]) {
  __m512i bytes[VECTORS];
  for (int v = 0; v < VECTORS; v++) bytes[v] = _mm512_loadu_si512(row + 64 * v);
  for (int i = 0; i < QUERIES; i++) {
    const __m512i x = four_bytes_of(a[i] + 4 * group);
    for (int v = 0; v < VECTORS; v++) acc[i][v] = _mm512_dpbusd_epi32(acc[i][v], bytes[v], x);
  }
}
template <int QUERIES, int VECTORS>
inline void add_group(const int16_t* const* a, int64_t group, const uint8_t* row, __m512i (&acc)[QUERIES][VECTORS]) {
  const __m512i low = _mm512_set1_epi16(255);
  __m512i even[VECTORS], odd[VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    const __m512i bytes = _mm512_loadu_si512(row + 64 * v);
    even[v] = _mm512_and_si512(bytes, low);
    odd[v] = _mm512_srli_epi16(bytes, 8);
  }
  for (int i = 0; i < QUERIES; i++) {
    const __m512i x = four_bytes_of(a[i] + 4 * group), y = four_bytes_of(a[i] + 4 * group + 2);
    for (int v = 0; v < VECTORS; v++) {
      acc[i][v] = _mm512_dpwssd_epi32(acc[i][v], even[v], x);
      acc[i][v] = _mm512_dpwssd_epi32(acc[i][v], odd[v], y);
    }
  }
}

template <int QUERIES, int VECTORS, class Lane>
inline void byte_dots_block(const Lane* const* a, const uint8_t* b, int64_t groups, int64_t row_bytes,
                            const int32_t* start, int32_t* out, int64_t out_stride, const uint8_t* ahead) {
  __m512i acc[QUERIES][VECTORS];
  for (int i = 0; i < QUERIES; i++)
    for (int v = 0; v < VECTORS; v++) acc[i][v] = _mm512_set1_epi32(start[i]);
  for (int64_t group = 0; group < groups; group++) {
    if (ahead != nullptr)
      for (int v = 0; v < VECTORS; v++) _mm_prefetch((const char*)(ahead + group * row_bytes + 64 * v), _MM_HINT_T1);
    add_group<QUERIES, VECTORS>(a, group, b + group * row_bytes, acc);
  }
  for (int i = 0; i < QUERIES; i++)
    for (int v = 0; v < VECTORS; v++) _mm512_storeu_si512(out + i * out_stride + 16 * v, acc[i][v]);
}

template <int QUERIES, class Lane>
inline void byte_dots(const Lane* const* a, const uint8_t* b, int64_t groups, int64_t width, int64_t lanes,
                      const int32_t* start, int32_t* out, int64_t out_stride, const uint8_t* ahead) {
  int64_t lane = 0;
  for (; lane + 64 <= lanes; lane += 64)
    byte_dots_block<QUERIES, 4>(a, b + 4 * lane, groups, 4 * width, start, out + lane, out_stride,
                                ahead == nullptr ? nullptr : ahead + 4 * lane);
  for (; lane < lanes; lane += 16)
    byte_dots_block<QUERIES, 1>(a, b + 4 * lane, groups, 4 * width, start, out + lane, out_stride,
                                ahead == nullptr ? nullptr : ahead + 4 * lane);
}

inline void unpack_4_bits(const uint8_t* packed, int64_t groups, int64_t row_bytes, const uint8_t* table, uint8_t* out,
                          const uint8_t* ahead) {
  const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), low = _mm512_set1_epi8(15);
  for (int64_t row = 0; row < groups / 2; row++) {
    for (int64_t i = 0; i < row_bytes; i += 64) {
      if (ahead != nullptr) _mm_prefetch((const char*)(ahead + row * row_bytes + i), _MM_HINT_T1);
      const __m512i both = _mm512_loadu_si512(packed + row * row_bytes + i);
      uint8_t* const to = out + 2 * row * row_bytes + i;
      _mm512_storeu_si512(to, _mm512_shuffle_epi8(levels, _mm512_and_si512(both, low)));
      _mm512_storeu_si512(to + row_bytes,
                          _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(both, 4), low)));
    }
  }
}
inline void unpack_3_bits(const uint8_t* packed, int64_t groups, int64_t row_bytes, const uint8_t* table, uint8_t* out,
                          const uint8_t* ahead) {
  const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), two = _mm512_set1_epi8(3),
                four = _mm512_set1_epi8(4);
  const int64_t upper = groups / 4 * row_bytes;
  for (int64_t row = 0; row < groups / 8; row++) {
    for (int64_t i = 0; i < row_bytes; i += 64) {
      const int64_t lower = 2 * row * row_bytes + i, higher = upper + row * row_bytes + i;
      if (ahead != nullptr) {
        _mm_prefetch((const char*)(ahead + lower), _MM_HINT_T1);
        _mm_prefetch((const char*)(ahead + lower + row_bytes), _MM_HINT_T1);
        _mm_prefetch((const char*)(ahead + higher), _MM_HINT_T1);
      }
      uint8_t* to = out + 8 * row * row_bytes + i;
      __m512i high = _mm512_loadu_si512(packed + higher);
      for (int half_row = 0; half_row < 2; half_row++) {
        __m512i low = _mm512_loadu_si512(packed + lower + half_row * row_bytes);
        __m512i top = half_row == 0 ? _mm512_slli_epi16(high, 2) : _mm512_srli_epi16(high, 2);
        for (int j = 0; j < 4; j++) {
          _mm512_storeu_si512(to, _mm512_shuffle_epi8(levels, _mm512_or_si512(_mm512_and_si512(low, two),
                                                                              _mm512_and_si512(top, four))));
          low = _mm512_srli_epi16(low, 2);
          top = _mm512_srli_epi16(top, 1);
          to += row_bytes;
        }
      }
    }
  }
}
