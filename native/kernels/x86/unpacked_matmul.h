// Products of the formats of kernels/portable/unpacked_blocks.h in blocks of 256, for AVX2 and AVX-512: four rows at a
// time if the family has kernels for that. Otherwise a block of one row is unpacked once for up to kTogether batch
// rows.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/unpacked_blocks.h"
#include "kernels/x86/rows.h"
#include "kernels/x86/sub_blocks.h"
#include "tuning.h"
#include "unpacked_rows.h"

namespace qtensor {
namespace {

constexpr int kTogether = 16;

template <class Block>
QTENSOR_INLINE void unpack_block(const Block& block, Unpacked256& out) {
  unpack(block, out);
}
// Compilers do not turn a table lookup into a shuffle.
QTENSOR_INLINE void unpack_block(const BlockIQ4_XS& w, Unpacked256& out) {
  for (int j = 0; j < 8; j++)
    _mm256_store_si256((__m256i*)(out.q + 32 * j), levels_of(kLevelsIQ4, nibbles_of_16(w.qs + 16 * j)));
  unpack_scales(w, out);
  out.d = w.d;
}

QTENSOR_INLINE int32_t sum_of_lanes(__m256i v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

template <class F>
inline void unpacked_rows(const MatmulTask& t, int64_t row, int64_t first, int count) {
  using Block = typename F::Block;
  const __m256i halves_of_pair = _mm256_set_m128i(_mm_set1_epi16(0x0302), _mm_set1_epi16(0x0100));
  float acc[kTogether] = {};
  const uint8_t* place = t.weight + row * t.row_bytes;
  for (int64_t b = 0; b < t.blocks_per_row; b++, place += sizeof(Block)) {
    Block block;
    __builtin_memcpy(&block, place, sizeof block);
    Unpacked256 w;
    unpack_block(block, w);
    __m256i q[8], magnitude[8], scale[8];
    for (int i = 0; i < 8; i++) {
      q[i] = _mm256_load_si256((const __m256i*)(w.q + 32 * i));
      magnitude[i] = _mm256_abs_epi8(q[i]);
      int pair;
      __builtin_memcpy(&pair, w.scales + 2 * i, 4);
      scale[i] = _mm256_shuffle_epi8(_mm256_set1_epi32(pair), halves_of_pair);
    }
    const float d = _cvtsh_ss(w.d) * F::kStep, dmin = F::kHasMins ? _cvtsh_ss(w.dmin) : 0.0f;
    const BlockQ8K* x = t.blocks + first * t.blocks_per_row + b;
    for (int j = 0; j < count; j++, x += t.blocks_per_row) {
      __m256i sum = _mm256_setzero_si256();
      for (int i = 0; i < 8; i++) {
        const __m256i bytes = _mm256_load_si256((const __m256i*)(x->q + 32 * i));
        // two products fit in 16 bits, because no value is -128
        const __m256i pairs = _mm256_maddubs_epi16(magnitude[i], _mm256_sign_epi8(bytes, q[i]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scale[i]));
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

// If the family processes four rows of the format at a time (unpacked_rows.h), only the last few rows are processed one
// by one.
template <class F>
void matmul_unpacked(const MatmulTask& t) {
  using Block = typename F::Block;
  MatmulTask left = t;
  if constexpr (kInFours<Block>)
    left = by_four_rows<kBatchGroup>(
        t, [&]<int M>(Together<M>, FourRows rows, int64_t j) { unpacked_four_rows<F, M>(t, rows, j); });
  for (int64_t row = left.row_begin; row < left.row_end; row++)
    for (int64_t j = 0; j < t.m; j += kTogether)
      unpacked_rows<F>(t, row, j, int(t.m - j < kTogether ? t.m - j : kTogether));
}

MatmulKernel unpacked_kernel(Format format) {
  return with_format_256(
      format, []<class F>(F) -> MatmulKernel { return matmul_unpacked<F>; }, [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
