// Shared by the AVX2 and AVX-512 kernels: scales and reduced sums of four rows at a time, and prefetching.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// The scales of the block headers {half d, dmin} of four rows, as floats.
struct RowScales {
  __m128 d, dmin;
};
inline RowScales split_row_scales(__m128i headers) {
  const __m128i split = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256 both = _mm256_cvtph_ps(_mm_shuffle_epi8(headers, split));
  return {_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)};
}
// Halves of four rows as floats. They are inserted one by one, because a vector load of recent narrower stores would
// have to wait for them.
inline __m128 load_halves(const uint8_t* const* places, int64_t at = 0) {
  half d[4];
  for (int r = 0; r < 4; r++) __builtin_memcpy(&d[r], places[r] + at, 2);
  __m128i words = _mm_cvtsi32_si128(d[0]);
  words = _mm_insert_epi16(words, d[1], 1);
  words = _mm_insert_epi16(words, d[2], 2);
  return _mm_cvtph_ps(_mm_insert_epi16(words, d[3], 3));
}
inline __m128 half_at(const uint8_t* place) {  // in the first lane
  half d;
  __builtin_memcpy(&d, place, 2);
  return _mm_cvtph_ps(_mm_cvtsi32_si128(d));
}

// The packed 6-bit scales and mins of Q4_K and Q5_K as eight bytes each.
struct ScaleBytes {
  uint64_t scale, min;
};
inline ScaleBytes unpack_scales(const uint8_t* packed) {
  uint32_t a, b, c;
  __builtin_memcpy(&a, packed, 4);
  __builtin_memcpy(&b, packed + 4, 4);
  __builtin_memcpy(&c, packed + 8, 4);
  const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x03030303;
  return {(a & six) | uint64_t((c & four) | ((a >> 6 & two) << 4)) << 32,
          (b & six) | uint64_t((c >> 4 & four) | ((b >> 6 & two) << 4)) << 32};
}

// The sums of the lanes of four vectors, one sum per lane.
inline __m128i reduce_four(__m128i a, __m128i b, __m128i c, __m128i d) {
  const __m128i ab = _mm_add_epi32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
  const __m128i cd = _mm_add_epi32(_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
  return _mm_add_epi32(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd));
}
inline __m128i reduce_four(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

inline void store_rows(float* y, __m128 value, int rows) {
  alignas(16) float all[4];
  _mm_store_ps(all, value);
  __builtin_memcpy(y, all, size_t(rows) * sizeof(float));
}

inline void prefetch_block(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)(p + i), _MM_HINT_T0);
}

// Selects which four rows of a work item are read together, block by block, and how later ones are prefetched. Intel's
// hardware prefetcher works separately in each page, up to some twenty lines ahead. For it, each row is from another
// quarter of the item, so that four pages are read at a time, each in order, and lines are prefetched shortly before
// they are used, into L1. On other processors, the four rows are adjacent, and lines are prefetched in the order of
// memory, four rows and 8 KiB ahead, into L2. Measurements: docs/kernels/gemv.md.
inline bool reads_quarters() { return __builtin_cpu_is("intel"); }

struct FourRows {
  int64_t first, stride;
};
inline FourRows four_rows(const MatmulTask& t, int64_t group, bool quarters) {
  return quarters ? FourRows{t.row_begin + group, (t.row_end - t.row_begin) / 4} : FourRows{t.row_begin + 4 * group, 1};
}
inline void store_four_rows(float* y, FourRows rows, __m128 value) {
  if (rows.stride == 1) return _mm_storeu_ps(y + rows.first, value);
  alignas(16) float all[4];
  _mm_store_ps(all, value);
  for (int r = 0; r < 4; r++) y[rows.first + r * rows.stride] = all[r];
}

// Calls product(Together<M>, four rows, first of M batch rows), with M up to MOST, for all batch rows and all groups of
// four rows. Returns a task for the rows that do not fill a group. Three remaining batch rows are multiplied together,
// so that the weights are read once.
template <int M>
struct Together {};
template <int MOST, class Product>
QTENSOR_INLINE MatmulTask by_four_rows(const MatmulTask& t, Product product) {
  static_assert(MOST >= 3);
  const int64_t groups = (t.row_end - t.row_begin) / 4;
  const bool quarters = reads_quarters();
  for (int64_t group = 0; group < groups; group++) {
    const FourRows rows = four_rows(t, group, quarters);
    int64_t j = 0;
    for (; j + MOST <= t.m; j += MOST) product(Together<MOST>(), rows, j);
    if (j + 3 == t.m) {
      product(Together<3>(), rows, j);
      continue;
    }
    for (; j + 2 <= t.m; j += 2) product(Together<2>(), rows, j);
    for (; j < t.m; j++) product(Together<1>(), rows, j);
  }
  MatmulTask left = t;
  left.row_begin += 4 * groups;
  return left;
}

template <int64_t BLOCK_BYTES>
class Ahead {
 public:
  Ahead(const MatmulTask& t, FourRows rows)
      : quarters_(rows.stride > 1),
        next_(t.weight + (rows.first + 4) * t.row_bytes + 8192),
        end_(t.weight + (t.row_begin + rows.stride) * t.row_bytes),
        over_(3 * rows.stride * t.row_bytes) {}
  // Call for each block, with its addresses in the four rows.
  QTENSOR_INLINE void ask(const uint8_t* const* place) {
    if (!quarters_) {
      for (int64_t i = 0; i < 4 * BLOCK_BYTES; i += 64) _mm_prefetch((const char*)(next_ + i), _MM_HINT_T1);
      next_ += 4 * BLOCK_BYTES;
      return;
    }
    // beyond the end of a quarter, prefetch the same quarter of the next item
    const int64_t later = place[0] + kShortly < end_ ? kShortly : kShortly + over_;
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
      for (int64_t i = 0; i < BLOCK_BYTES; i += 64) _mm_prefetch((const char*)(place[r] + later + i), _MM_HINT_T0);
  }

 private:
  static constexpr int64_t kShortly = 3072;
  bool quarters_;
  const uint8_t *next_, *end_;
  int64_t over_;
};

}  // namespace
}  // namespace qtensor
