// Exact sums of products for attention over bytes (generic/byte_dots.h says which), for AVX2. Bytes of a group of four
// are taken as two pairs of words, 0 with 2 and 1 with 3, which is a mask and a shift; whatever is multiplied with them
// lies in that order. Byte products proper (maddubs) would saturate.

using QueryLane = int16_t;

inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) {
  for (int64_t i = 0; i < dim; i += 4) {
    out[i] = bytes[i];
    out[i + 1] = bytes[i + 2];
    out[i + 2] = bytes[i + 1];
    out[i + 3] = bytes[i + 3];
  }
}
inline void lay_weights(int16_t* out, V16 whole) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high));
  _mm256_storeu_si256((__m256i*)out, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(words, 0xd8), order));
}

inline __m256i pair_of(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}

template <int QUERIES, int VECTORS>
inline void byte_dots_block(const int16_t* const* a, const uint8_t* b, int64_t groups, int64_t row_bytes,
                            const int32_t* start, int32_t* out, int64_t out_stride, const uint8_t* ahead) {
  const __m256i low = _mm256_set1_epi16(255);
  __m256i acc[QUERIES][VECTORS];
  for (int i = 0; i < QUERIES; i++)
    for (int v = 0; v < VECTORS; v++) acc[i][v] = _mm256_set1_epi32(start[i]);
  for (int64_t group = 0; group < groups; group++) {
    const uint8_t* const row = b + group * row_bytes;
    if (ahead != nullptr) _mm_prefetch((const char*)(ahead + group * row_bytes), _MM_HINT_T1);
    __m256i even[VECTORS], odd[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      const __m256i bytes = _mm256_loadu_si256((const __m256i*)(row + 32 * v));
      even[v] = _mm256_and_si256(bytes, low);
      odd[v] = _mm256_srli_epi16(bytes, 8);
    }
    for (int i = 0; i < QUERIES; i++) {
      const __m256i x = pair_of(a[i] + 4 * group), y = pair_of(a[i] + 4 * group + 2);
      for (int v = 0; v < VECTORS; v++) {
        acc[i][v] = _mm256_add_epi32(acc[i][v], _mm256_madd_epi16(even[v], x));
        acc[i][v] = _mm256_add_epi32(acc[i][v], _mm256_madd_epi16(odd[v], y));
      }
    }
  }
  for (int i = 0; i < QUERIES; i++)
    for (int v = 0; v < VECTORS; v++) _mm256_storeu_si256((__m256i*)(out + i * out_stride + 8 * v), acc[i][v]);
}

template <int QUERIES>
inline void byte_dots(const int16_t* const* a, const uint8_t* b, int64_t groups, int64_t width, int64_t lanes,
                      const int32_t* start, int32_t* out, int64_t out_stride, const uint8_t* ahead) {
  for (int64_t lane = 0; lane < lanes; lane += 16)
    byte_dots_block<QUERIES, 2>(a, b + 4 * lane, groups, 4 * width, start, out + lane, out_stride,
                                ahead == nullptr ? nullptr : ahead + 4 * lane);
}

inline void unpack_4_bits(const uint8_t* packed, int64_t groups, int64_t row_bytes, const uint8_t* table, uint8_t* out,
                          const uint8_t* ahead) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)),
                low = _mm256_set1_epi8(15);
  for (int64_t row = 0; row < groups / 2; row++) {
    for (int64_t i = 0; i < row_bytes; i += 32) {
      if (ahead != nullptr) _mm_prefetch((const char*)(ahead + row * row_bytes + i), _MM_HINT_T1);
      const __m256i both = _mm256_loadu_si256((const __m256i*)(packed + row * row_bytes + i));
      uint8_t* const to = out + 2 * row * row_bytes + i;
      _mm256_storeu_si256((__m256i*)(to), _mm256_shuffle_epi8(levels, _mm256_and_si256(both, low)));
      _mm256_storeu_si256((__m256i*)(to + row_bytes),
                          _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_srli_epi16(both, 4), low)));
    }
  }
}
inline void unpack_3_bits(const uint8_t* packed, int64_t groups, int64_t row_bytes, const uint8_t* table, uint8_t* out,
                          const uint8_t* ahead) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), two = _mm256_set1_epi8(3),
                four = _mm256_set1_epi8(4);
  const int64_t upper = groups / 4 * row_bytes;
  for (int64_t row = 0; row < groups / 8; row++) {
    for (int64_t i = 0; i < row_bytes; i += 32) {
      const int64_t lower = 2 * row * row_bytes + i, higher = upper + row * row_bytes + i;
      if (ahead != nullptr) {
        _mm_prefetch((const char*)(ahead + lower), _MM_HINT_T1);
        _mm_prefetch((const char*)(ahead + lower + row_bytes), _MM_HINT_T1);
        _mm_prefetch((const char*)(ahead + higher), _MM_HINT_T1);
      }
      uint8_t* to = out + 8 * row * row_bytes + i;
      __m256i high = _mm256_loadu_si256((const __m256i*)(packed + higher));
      for (int half_row = 0; half_row < 2; half_row++) {
        __m256i low = _mm256_loadu_si256((const __m256i*)(packed + lower + half_row * row_bytes));
        __m256i top = half_row == 0 ? _mm256_slli_epi16(high, 2) : _mm256_srli_epi16(high, 2);
        for (int j = 0; j < 4; j++) {
          _mm256_storeu_si256(
              (__m256i*)(to),
              _mm256_shuffle_epi8(levels, _mm256_or_si256(_mm256_and_si256(low, two), _mm256_and_si256(top, four))));
          low = _mm256_srli_epi16(low, 2);
          top = _mm256_srli_epi16(top, 1);
          to += row_bytes;
        }
      }
    }
  }
}
