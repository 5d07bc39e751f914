// Converts the vector of a head for the cache: it is rotated, then rounded to the levels of the cache's format.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/float_kernels.h"
#include "kernels/portable/level_tables.h"
#include "vec16.h"

namespace qtensor {
namespace {

// out = H x / sqrt(n) for each n values, where n is the largest power of two that divides dim. H is the Hadamard
// matrix: entry (i, j) is -1 if i & j has an odd number of ones, else 1. H x / sqrt(n) spreads the content of a few
// outlier channels over all channels, and is its own inverse. x and out may be the same.
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

inline float largest_magnitude(const float* x, int64_t dim) {  // NaN if a value is NaN or infinite
  V16 largest[1] = {v_zero()};
  for (int64_t i = 0; i < dim; i += 16) largest[0] = v_max_magnitude(largest[0], v_load(x + i));
  const uint32_t bits = v_top_magnitude(largest);
  float top;
  __builtin_memcpy(&top, &bits, 4);
  return bits < 0x7f800000 ? top : __builtin_nanf("");
}

// x * inverse, rounded to even and limited to magnitude 127.
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

inline float dot_product(const float* a, const float* b, int64_t dim) {
  V16 sum = v_zero();
  for (int64_t i = 0; i < dim; i += 16) sum = v_fma(v_load(a + i), v_load(b + i), sum);
  return v_reduce_add(sum);
}

// Computes the number of the nearest level of each x, and the scale that preserves the product of the vector with
// itself, sum x^2 / sum x level, so that rounding neither increases nor reduces scores.
inline void round_head_to_levels(const float* x, int64_t dim, const LevelTable& table, uint8_t* numbers, half* scale) {
  const float squares = dot_product(x, x, dim);
  if (!(squares >= 1e-30f && squares < __builtin_inff())) {
    __builtin_memset(numbers, table.half, size_t(dim));
    *scale = as_half(squares < 1e-30f ? 0.0f : __builtin_nanf(""));
    return;
  }
  const float inverse = 1.0f / (__builtin_sqrtf(squares / float(dim)) * float(double(table.deviations) / 127.0));
  float level[kMostByteDim];
  const V16 one = v_set(1.0f), scaled = v_set(inverse), half_of_table = v_set(float(table.half));
  for (int64_t i = 0; i < dim; i += 16) {  // level numbers are integers, so these sums are exact
    const V16 y = v_mul(v_load(x + i), scaled), minus_y = v_sub(v_zero(), y), outward = v_max(y, minus_y);
    V16 beyond = v_zero(), size = v_set(table.first);
    for (int j = 0; j + 1 < table.half; j++) {
      const V16 above = v_one_above(outward, v_set(table.begins[j]));
      beyond = v_add(beyond, above);
      size = v_fma(above, v_set(table.larger[j]), size);
    }
    const V16 negative = v_one_above(minus_y, v_zero());  // 1: number is half - 1 - beyond, 0: half + beyond
    const V16 upper = v_add(half_of_table, beyond), span = v_fma(beyond, v_set(2.0f), one);
    v_store_bytes(reinterpret_cast<int8_t*>(numbers + i), v_sub(upper, v_mul(negative, span)), one);
    v_store(level + i, v_sub(size, v_mul(v_mul(negative, size), v_set(2.0f))));
  }
  *scale = as_half(squares / dot_product(x, level, dim));
}

void round_head(const float* x, int64_t dim, int bits, uint8_t* levels, half* scale) {
  float turned[kMostByteDim];
  rotate_head(x, dim, turned);
  if (bits == 8)
    round_head_to_bytes(turned, dim, levels, scale);
  else
    round_head_to_levels(turned, dim, bits == 4 ? kLevels4 : kLevels3, levels, scale);
}

}  // namespace
}  // namespace qtensor
