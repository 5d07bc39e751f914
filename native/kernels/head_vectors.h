// One head's vector on its way into the cache: rotated, then rounded to the levels of the cache's format.

// out = H x / sqrt(n) within each stretch of n = the largest power of two that divides dim: H is Hadamard's matrix,
// whose entry (i, j) is -1 where i & j has an odd number of ones. It spreads what a few channels hold over all of them,
// and is its own inverse. x may be out.
inline V16 hadamard_lanes(V16 x) {
  alignas(64) static constexpr float sign[4][16] = {{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                                                    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                                                    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                                                    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};
  x = v_fma(x, v_load(sign[0]), v_swap<1>(x));
  x = v_fma(x, v_load(sign[1]), v_swap<2>(x));
  x = v_fma(x, v_load(sign[2]), v_swap<4>(x));
  return v_fma(x, v_load(sign[3]), v_swap<8>(x));
}
inline void rotate_head(const float* x, int64_t dim, float* out) {
  const int64_t n = dim & -dim;
  const V16 norm = v_set(1.0f / __builtin_sqrtf(float(n)));
  for (int64_t i = 0; i < dim; i += 16) v_store(out + i, v_mul(hadamard_lanes(v_load(x + i)), norm));
  for (int64_t width = 16; width < n; width *= 2) {
    for (int64_t i = 0; i < dim; i += 16) {
      if (i & width) continue;
      const V16 a = v_load(out + i), b = v_load(out + i + width);
      v_store(out + i, v_add(a, b));
      v_store(out + i + width, v_sub(a, b));
    }
  }
}

inline float largest_magnitude(const float* x, int64_t dim) {  // NaN where there is one, or an infinity
  uint32_t bits = 0;
  for (int64_t i = 0; i < dim; i += 16) bits = v_magnitude_bits(v_load(x + i), bits);
  float top;
  __builtin_memcpy(&top, &bits, 4);
  return bits < 0x7f800000 ? top : __builtin_nanf("");
}

// x * inverse, rounded to even and kept within 127.
inline void round_to_bytes(const float* x, int64_t dim, float inverse, int8_t* out) {
  const V16 one = v_set(1.0f), most = v_set(127.0f), least = v_set(-127.0f), scale = v_set(inverse);
  for (int64_t i = 0; i < dim; i += 16)
    v_store_bytes(out + i, v_max(v_min(v_mul(v_load(x + i), scale), most), least), one);
}

inline half as_half(float x) {
  half rounded[16];
  v_store_half(rounded, v_set(x));
  return rounded[0];
}

inline void round_head_to_bytes(const float* x, int64_t dim, uint8_t* levels, half* scale) {
  *scale = as_half(largest_magnitude(x, dim) / 127.0f);
  const float step = half_to_float(*scale);
  if (step > 0.0f && step < 1e30f) {
    round_to_bytes(x, dim, 1.0f / step, reinterpret_cast<int8_t*>(levels));
    for (int64_t i = 0; i < dim; i++) levels[i] = uint8_t(levels[i] + 128);
  } else {
    __builtin_memset(levels, 128, size_t(dim));
  }
}

// Levels of 4 and 3 bits: a table that fits a Gaussian, symmetric about nought, its outermost level at 127. Of the
// upper half: where a level begins, by how much it is larger than the one before, and where 127 lies in deviations.
struct LevelTable {
  int half;  // levels on each side
  float begins[7], larger[7];
  float first, deviations;
  uint8_t bytes[16];  // 128 + level
};
constexpr LevelTable kLevels4 = {8,
                                 {12.0f, 24.5f, 37.5f, 51.0f, 66.5f, 85.5f, 111.5f},
                                 {12.0f, 13.0f, 13.0f, 14.0f, 17.0f, 21.0f, 31.0f},
                                 6.0f,
                                 2.7326f,
                                 {1, 32, 53, 70, 84, 97, 110, 122, 134, 146, 159, 172, 186, 203, 224, 255}};
constexpr LevelTable kLevels3 = {4,
                                 {29.5f, 62.0f, 103.0f, 1e30f, 1e30f, 1e30f, 1e30f},
                                 {31.0f, 34.0f, 48.0f, 0.0f, 0.0f, 0.0f, 0.0f},
                                 14.0f,
                                 2.1520f,
                                 {1, 49, 83, 114, 142, 173, 207, 255, 1, 49, 83, 114, 142, 173, 207, 255}};

inline float fold_products(const float* a, const float* b, int64_t dim) {
  V16 sum = v_zero();
  for (int64_t i = 0; i < dim; i += 16) sum = v_fma(v_load(a + i), v_load(b + i), sum);
  return v_fold_add(sum);
}

// The nearest level of each x, as a number; then the scale that keeps the product of the vector with itself,
// sum x^2 / sum x level, so that rounding neither widens nor narrows scores.
inline void round_head_to_levels(const float* x, int64_t dim, const LevelTable& table, uint8_t* numbers, half* scale) {
  const float squares = fold_products(x, x, dim);
  if (!(squares >= 1e-30f && squares < __builtin_inff())) {
    __builtin_memset(numbers, table.half, size_t(dim));
    *scale = as_half(squares < 1e-30f ? 0.0f : __builtin_nanf(""));
    return;
  }
  const float inverse = 1.0f / (__builtin_sqrtf(squares / float(dim)) * float(double(table.deviations) / 127.0));
  float level[kMostByteDim];
  for (int64_t i = 0; i < dim; i++) {
    const float y = x[i] * inverse, outward = __builtin_fabsf(y);
    float size = table.first;
    int number = 0;
    for (int j = 0; j < 7; j++) {
      const bool beyond = outward > table.begins[j];
      size += beyond ? table.larger[j] : 0.0f;
      number += beyond;
    }
    level[i] = y < 0.0f ? -size : size;
    numbers[i] = uint8_t(y < 0.0f ? table.half - 1 - number : table.half + number);
  }
  *scale = as_half(squares / fold_products(x, level, dim));
}

void round_head(const float* x, int64_t dim, int bits, uint8_t* levels, half* scale) {
  float turned[kMostByteDim];
  rotate_head(x, dim, turned);
  if (bits == 8)
    round_head_to_bytes(turned, dim, levels, scale);
  else
    round_head_to_levels(turned, dim, bits == 4 ? kLevels4 : kLevels3, levels, scale);
}
