// K-quant dot products with AVX2: vpmaddubsw gives sums of two products, which fit 16 bits for every format here, and
// vpmaddwd multiplies them by their sub-block scale. All exact.

inline __m256i dot_u8_s8(__m256i u, __m256i s) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
}

struct KQuant256 {
  using Sum = __m256i;
  struct Unpacked {
    __m256i q[8];   // sub-block j as unsigned bytes
    __m128i scale;  // eight 16-bit scales
    __m128i min;    // eight 16-bit mins
  };
};

struct WithMins256 : KQuant256 {
  static constexpr bool has_min = true;
  static void unpack_header(const uint8_t* packed, Unpacked& w) {
    const ScaleBytes bytes = unpack_scales(packed);
    w.scale = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes.scale));
    w.min = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes.min));
  }
  static RowScales row_scales(const uint8_t* const* place, int rows) { return load_row_scales(place, rows); }
  template <int J>
  static __m256i scaled(const Unpacked& w, const BlockQ8K& x) {
    // the 16-bit scale J in every lane
    const __m128i one = _mm_shuffle_epi8(w.scale, _mm_set1_epi16(short(2 * J | (2 * J + 1) << 8)));
    const __m256i pairs = _mm256_maddubs_epi16(w.q[J], _mm256_load_si256((const __m256i*)(x.q + 32 * J)));
    return _mm256_madd_epi16(pairs, _mm256_broadcastsi128_si256(one));
  }
  static __m256i dot(const Unpacked& w, const BlockQ8K& x) {
    const __m256i a = _mm256_add_epi32(scaled<0>(w, x), scaled<1>(w, x));
    const __m256i b = _mm256_add_epi32(scaled<2>(w, x), scaled<3>(w, x));
    const __m256i c = _mm256_add_epi32(scaled<4>(w, x), scaled<5>(w, x));
    const __m256i d = _mm256_add_epi32(scaled<6>(w, x), scaled<7>(w, x));
    return _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
  }
};

struct Q4_K256 : WithMins256 {
  static constexpr int64_t bytes = sizeof(BlockQ4_K);
  static QTENSOR_INLINE void values(const uint8_t* block, __m256i (&q)[8]) {
    const __m256i four = _mm256_set1_epi8(15);
    for (int c = 0; c < 4; c++) {
      const __m256i raw = _mm256_loadu_si256((const __m256i*)(block + 16 + 32 * c));
      q[2 * c] = _mm256_and_si256(raw, four);
      q[2 * c + 1] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), four);
    }
  }
  static Unpacked unpack(const uint8_t* block) {
    Unpacked w;
    unpack_header(block + 4, w);
    values(block, w.q);
    return w;
  }
};

struct Q5_K256 : WithMins256 {
  static constexpr int64_t bytes = sizeof(BlockQ5_K);
  static QTENSOR_INLINE void values(const uint8_t* block, __m256i (&q)[8]) {
    const __m256i four = _mm256_set1_epi8(15), bit4 = _mm256_set1_epi8(16);
    const __m256i high = _mm256_loadu_si256((const __m256i*)(block + 16));
    // bit j of `high` moves to bit 4
    const __m256i moved[8] = {_mm256_slli_epi16(high, 4),
                              _mm256_slli_epi16(high, 3),
                              _mm256_slli_epi16(high, 2),
                              _mm256_slli_epi16(high, 1),
                              high,
                              _mm256_srli_epi16(high, 1),
                              _mm256_srli_epi16(high, 2),
                              _mm256_srli_epi16(high, 3)};
    for (int c = 0; c < 4; c++) {
      const __m256i raw = _mm256_loadu_si256((const __m256i*)(block + 48 + 32 * c));
      q[2 * c] = _mm256_or_si256(_mm256_and_si256(raw, four), _mm256_and_si256(moved[2 * c], bit4));
      q[2 * c + 1] =
          _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 4), four), _mm256_and_si256(moved[2 * c + 1], bit4));
    }
  }
  static Unpacked unpack(const uint8_t* block) {
    Unpacked w;
    unpack_header(block + 4, w);
    values(block, w.q);
    return w;
  }
};

struct Q6_K256 : KQuant256 {
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static constexpr bool has_min = false;
  struct Unpacked {
    __m256i q[8];
    __m256i scale;  // sixteen 16-bit scales
    __m128i min;    // unused
  };
  static QTENSOR_INLINE void values(const uint8_t* block, __m256i (&q)[8]) {
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(48);
    for (int n = 0; n < 2; n++) {
      const __m256i low0 = _mm256_loadu_si256((const __m256i*)(block + 64 * n));
      const __m256i low1 = _mm256_loadu_si256((const __m256i*)(block + 64 * n + 32));
      const __m256i high = _mm256_loadu_si256((const __m256i*)(block + 128 + 32 * n));
      q[4 * n] = _mm256_or_si256(_mm256_and_si256(low0, four), _mm256_and_si256(_mm256_slli_epi16(high, 4), two));
      q[4 * n + 1] = _mm256_or_si256(_mm256_and_si256(low1, four), _mm256_and_si256(_mm256_slli_epi16(high, 2), two));
      q[4 * n + 2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low0, 4), four), _mm256_and_si256(high, two));
      q[4 * n + 3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low1, 4), four),
                                     _mm256_and_si256(_mm256_srli_epi16(high, 2), two));
    }
  }
  static Unpacked unpack(const uint8_t* block) {
    Unpacked w;
    values(block, w.q);
    w.scale = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(block + 192)));
    w.min = _mm_setzero_si128();
    return w;
  }
  static __m256i dot(const Unpacked& w, const BlockQ8K& x) {
    const __m256i sums = _mm256_load_si256((const __m256i*)x.sums16);
    __m256i total = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(_mm256_madd_epi16(w.scale, sums), 5));
    const __m256i low = _mm256_permute4x64_epi64(w.scale, 0x44), high = _mm256_permute4x64_epi64(w.scale, 0xee);
    // scale 2j in the lower 128 bits, 2j+1 in the upper
    __m256i pick = _mm256_set_m128i(_mm_set1_epi16(0x0302), _mm_set1_epi16(0x0100));
    for (int j = 0; j < 4; j++) {
      const __m256i a = _mm256_maddubs_epi16(w.q[j], _mm256_load_si256((const __m256i*)(x.q + 32 * j)));
      const __m256i b = _mm256_maddubs_epi16(w.q[j + 4], _mm256_load_si256((const __m256i*)(x.q + 32 * j + 128)));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(a, _mm256_shuffle_epi8(low, pick)));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(b, _mm256_shuffle_epi8(high, pick)));
      pick = _mm256_add_epi8(pick, _mm256_set1_epi8(4));
    }
    return total;
  }
  static RowScales row_scales(const uint8_t* const* place, int rows) {
    const uint8_t* d[4];
    for (int r = 0; r < rows; r++) d[r] = place[r] + offsetof(BlockQ6_K, d);
    return {load_halves(d, rows), _mm_setzero_ps()};
  }
};
