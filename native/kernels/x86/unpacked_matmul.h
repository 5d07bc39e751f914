// Products of the formats that are taken apart first (kernels/portable/unpacked_blocks.h), for AVX2 and AVX-512: a
// block of one weight row is taken apart once and meets up to kTogether batch rows.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/unpacked_blocks.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

constexpr int kTogether = 16;

// vpdpbusd and vpmaddubsw take one side without signs: it has the other side's.
QTENSOR_INLINE __m256i signed_dot(__m256i magnitude, __m256i q, __m256i x) {
  return dot_u8_s8(magnitude, _mm256_sign_epi8(x, q));
}
inline float half_value(half h) { return _cvtsh_ss(h); }

QTENSOR_INLINE int32_t sum_of_lanes(__m256i v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

template <class F>
inline void unpacked_rows_256(const MatmulTask& t, int64_t row, int64_t first, int count) {
  using Block = typename F::Block;
  float acc[kTogether] = {};
  const uint8_t* place = t.weight + row * t.row_bytes;
  for (int64_t b = 0; b < t.blocks_per_row; b++, place += sizeof(Block)) {
    Block block;
    __builtin_memcpy(&block, place, sizeof block);
    Unpacked256 w;
    unpack(block, w);
    __m256i q[8], magnitude[8], scale[8];
    for (int i = 0; i < 8; i++) {
      q[i] = _mm256_load_si256((const __m256i*)(w.q + 32 * i));
      magnitude[i] = _mm256_abs_epi8(q[i]);
      scale[i] = _mm256_set_m128i(_mm_set1_epi32(w.scales[2 * i + 1]), _mm_set1_epi32(w.scales[2 * i]));
    }
    const float d = half_value(w.d) * F::kStep, dmin = F::kHasMins ? half_value(w.dmin) : 0.0f;
    const BlockQ8K* x = t.blocks + first * t.blocks_per_row + b;
    for (int j = 0; j < count; j++, x += t.blocks_per_row) {
      __m256i sum = _mm256_setzero_si256();
      for (int i = 0; i < 8; i++) {
        const __m256i bytes = _mm256_load_si256((const __m256i*)(x->q + 32 * i));
        sum = _mm256_add_epi32(sum, _mm256_mullo_epi32(signed_dot(magnitude[i], q[i], bytes), scale[i]));
      }
      float f = float(sum_of_lanes(sum)) * d;
      if (F::kHasMins) {
        const __m256i mins =
            _mm256_madd_epi16(_mm256_load_si256((const __m256i*)w.mins), _mm256_load_si256((const __m256i*)x->sums16));
        f = __builtin_fmaf(-float(sum_of_lanes(mins)), dmin, f);
      }
      acc[j] = __builtin_fmaf(f, x->d, acc[j]);
    }
  }
  for (int j = 0; j < count; j++) t.y[(first + j) * t.y_stride + row] = acc[j];
}

template <class F>
inline void unpacked_rows_32(const MatmulTask& t, int64_t row, int64_t first, int count) {
  using Block = typename F::Block;
  float acc[kTogether] = {};
  const uint8_t* place = t.weight + row * t.row_bytes;
  const int64_t total = t.k / kSubBlock;
  for (int64_t b = 0; b < t.blocks_per_row; b++) {
    const int64_t parts = total - 8 * b < 8 ? total - 8 * b : 8;
    const BlockQ8K* const x = t.blocks + first * t.blocks_per_row + b;
    float f[kTogether] = {};
    for (int64_t i = 0; i < parts; i++, place += sizeof(Block)) {
      Block block;
      __builtin_memcpy(&block, place, sizeof block);
      Unpacked32 w;
      unpack(block, w, half_value);
      const __m256i q = _mm256_load_si256((const __m256i*)w.q), magnitude = _mm256_abs_epi8(q);
      for (int j = 0; j < count; j++) {
        const BlockQ8K& each = x[j * t.blocks_per_row];
        const __m256i bytes = _mm256_load_si256((const __m256i*)(each.q + 32 * i));
        f[j] = __builtin_fmaf(float(sum_of_lanes(signed_dot(magnitude, q, bytes))), w.d, f[j]);
        if (F::kHasMins) f[j] = __builtin_fmaf(float(each.sums32[i]), w.m, f[j]);
      }
    }
    for (int j = 0; j < count; j++) acc[j] = __builtin_fmaf(f[j], x[j * t.blocks_per_row].d, acc[j]);
  }
  for (int j = 0; j < count; j++) t.y[(first + j) * t.y_stride + row] = acc[j];
}

template <class F>
void matmul_unpacked(const MatmulTask& t) {
  for (int64_t row = t.row_begin; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j += kTogether) {
      const int count = int(t.m - j < kTogether ? t.m - j : kTogether);
      if constexpr (F::kIs256)
        unpacked_rows_256<F>(t, row, j, count);
      else
        unpacked_rows_32<F>(t, row, j, count);
    }
}

MatmulKernel unpacked_kernel(Format format) {
  return with_unpacked_format(
      format, []<class F>(F) -> MatmulKernel { return matmul_unpacked<F>; }, [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
