// Products of K-quants with sixteen rows of the weight in the lanes. Batch rows are broadcast, eight bytes at a time,
// so no batch row is padded. lane_formats.h unpacks blocks.
//
// The sums of A and of B are packed to words, and one vpdpwssd multiplies them with both scales. The magnitudes of a
// group's activations show whether its sum fits in a word. If it might not, eight products are summed at a time, which
// always fit (31 * 8 * 127 = 31,496, and 32 * 8 * 127 = 32,512 with the offset). Both ways give the same integers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/lane_formats.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

inline __m512i qword_to_all(const void* from) {
  long long value;
  __builtin_memcpy(&value, from, 8);
  return _mm512_set1_epi64(value);
}

// The number of batch rows that share the registers: two sums and a total each. The first pass also unpacks the
// block; if other passes follow, it has at most kMostBeside batch rows.
constexpr int kMostTogether = 8, kMostBeside = 6;

// Memory is prefetched in sixteen places, a few blocks ahead in each row, and beyond the end of a row in the next row
// of this place. Some lines are prefetched twice, because a branch on the end of a line would be mispredicted.
constexpr int64_t kLaneBlocksAhead = 4;

struct LaneBlock {
  const uint8_t* at;  // in the first of sixteen rows
  int64_t row_bytes;
  const uint8_t* later;  // what to prefetch in the first row, and the distance to the next prefetch; or null
  int64_t later_stride;
  LaneRows& rows;
};
// Where values come from: unpacked for these batch rows only, unpacked and stored for others too, or stored earlier.
enum class Values { unpacked, unpacked_and_kept, kept };

template <int LINES>
QTENSOR_INLINE void ask(const LaneBlock& block, int number) {
#pragma GCC unroll 8
  for (int i = 0; i < LINES; i++) __builtin_prefetch(block.later + number * block.later_stride + 64 * i, 0, 2);
}

// acc[M][16 rows] = fma(f, d of the batch row, acc) for M batch rows.
template <class F, int M, Values VALUES, bool FITS>
__attribute__((noinline)) void lane_block(const LaneBlock& block, const typename F::BatchRow* x, float* acc) {
  constexpr bool unpack = VALUES != Values::kept;
  const __m512i zero = _mm512_setzero_si512();
  LaneRows& rows = block.rows;
  // The value at which sums begin, of a group or of half a group.
  const auto begin = [&](int j, int pair, int half) {
    if constexpr (F::has_min) return zero;
    if constexpr (!F::has_min && FITS) return qword_to_all(x[j].start[pair]);
    const int8_t* const q = x[j].q + 32 * pair + 16 * half;
    const __m512i offset = _mm512_set1_epi8(32);
    __m512i sum = _mm512_dpbusd_epi32(zero, offset, qword_to_all(q));
    sum = _mm512_dpbusd_epi32(sum, offset, qword_to_all(q + 8));
    return _mm512_sub_epi32(zero, sum);
  };
  if constexpr (unpack) F::header(block.at, block.row_bytes, rows);
  __m512i total[M];
#pragma GCC unroll 8
  for (int j = 0; j < M; j++) total[j] = zero;
  for (int pair = 0; pair < F::pairs; pair++) {
    __m512i sum[M][2];
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) sum[j][0] = sum[j][1] = begin(j, pair, 0);
    const auto scaled = [&](int next) __attribute__((always_inline)) {
      const __m512i scale = _mm512_load_si512(rows.scale[pair]);
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) {
        total[j] = _mm512_dpwssd_epi32(total[j], _mm512_packs_epi32(sum[j][0], sum[j][1]), scale);
        if (!FITS) sum[j][0] = sum[j][1] = begin(j, pair, next);
      }
    };
#pragma GCC unroll 2
    for (int part = 0; part < kLaneChunks / F::pairs; part++) {
      const int chunk = pair * (kLaneChunks / F::pairs) + part;
      const auto products = [&]<int I>(const auto& values_of) __attribute__((always_inline)) {
        __m512i w[2];
        values_of.template operator()<I>(w);
#pragma GCC unroll 8
        for (int j = 0; j < M; j++) {
          const __m512i xv = qword_to_all(x[j].q + 8 * (4 * chunk + I));
          sum[j][0] = _mm512_dpbusd_epi32(sum[j][0], w[0], xv);
          sum[j][1] = _mm512_dpbusd_epi32(sum[j][1], w[1], xv);
        }
      };
      const auto four = [&](const auto& values_of) __attribute__((always_inline)) {
        products.template operator()<0>(values_of);
        products.template operator()<1>(values_of);
        if (!FITS) scaled(1);
        products.template operator()<2>(values_of);
        products.template operator()<3>(values_of);
        if (!FITS || part == kLaneChunks / F::pairs - 1) scaled(0);
      };
      uint8_t (*const q)[64] = rows.q + 8 * chunk;
      if constexpr (unpack) {
        if (VALUES == Values::unpacked) {
          ask<F::lines>(block, 2 * chunk);
          ask<F::lines>(block, 2 * chunk + 1);
        } else {
          ask<F::lines>(block, chunk);
        }
        const typename F::Chunk raw(block.at, block.row_bytes, chunk);
        four([&]<int I>(__m512i(&w)[2]) __attribute__((always_inline)) {
          raw.template values<I>(w);
          if (VALUES == Values::unpacked) return;
          _mm512_store_si512(q[2 * I], w[0]);
          _mm512_store_si512(q[2 * I + 1], w[1]);
        });
      } else {
        if (block.later != nullptr) ask<sizeof(typename F::BatchRow) / 64>(block, chunk);
        four([&]<int I>(__m512i(&w)[2]) __attribute__((always_inline)) {
          w[0] = _mm512_load_si512(q[2 * I]);
          w[1] = _mm512_load_si512(q[2 * I + 1]);
        });
      }
    }
  }
  const __m512 d = _mm512_load_ps(rows.d);
#pragma GCC unroll 8
  for (int j = 0; j < M; j++) {
    __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(total[j]), d);
    if constexpr (F::has_min) {
      __m512i mins = zero;
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++)
        mins = _mm512_dpwssd_epi32(mins, _mm512_load_si512(rows.min[p]), _mm512_set1_epi32(dword_at(x[j].sums32, p)));
      f = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), _mm512_load_ps(rows.dmin), f);
    }
    _mm512_store_ps(acc + 16 * j, _mm512_fmadd_ps(f, _mm512_set1_ps(x[j].d), _mm512_load_ps(acc + 16 * j)));
  }
}

// Calls lane_block with M = m, which is between LEAST and MOST. F may be a kind of formats, because stored values have
// the same form in all of them; `most` is the largest value of the actual format.
template <class F, Values VALUES, int MOST, int LEAST>
QTENSOR_INLINE void lane_block_of(int64_t m, int most, const LaneBlock& block, const typename F::BatchRow* x,
                                  float* acc) {
  if constexpr (MOST > LEAST)
    if (m < MOST) return lane_block_of<F, VALUES, MOST - 1, LEAST>(m, most, block, x, acc);
  const int32_t first = x[0].largest, last = x[MOST - 1].largest;
  if (F::fits(first > last ? first : last, most))
    lane_block<F, MOST, VALUES, true>(block, x, acc);
  else
    lane_block<F, MOST, VALUES, false>(block, x, acc);
}

// Batch rows are packed as [block][batch row].
template <class F>
int64_t lane_batch_bytes(int64_t blocks, int64_t m) {
  return blocks * m * int64_t(sizeof(typename F::BatchRow));
}
template <class F>
void pack_lane_batch(const PackTask& t, int64_t tile, int64_t block) {
  auto* const to = reinterpret_cast<typename F::BatchRow*>(t.packed) + block * t.m;
  const int64_t first = 16 * tile, end = t.m - first < 16 ? t.m : first + 16;
  __m512i most = _mm512_setzero_si512();
  for (int64_t j = first; j < end; j++) most = _mm512_max_epi32(most, F::pack(t.x[j * t.blocks + block], to[j]));
  const int32_t largest = _mm512_reduce_max_epi32(most);
  for (int64_t j = first; j < end; j++) to[j].largest = largest;
}

// How batch rows are distributed over a block: `beside` of them with the unpacking, then `passes` passes over the
// others, whose sizes differ by at most one.
struct LanePlan {
  int64_t beside, passes = 0;
  explicit LanePlan(int64_t m) : beside(m) {
    if (m <= kMostTogether) return;
    passes = (m - kMostBeside + kMostTogether - 1) / kMostTogether;
    beside = m / (passes + 1) < kMostBeside ? m / (passes + 1) : kMostBeside;
  }
};
// The passes prefetch as well: the first one eight rows of the weight, the following ones batch rows of the next block,
// if `next` is true.
template <class F>
inline void every_batch_row(const LanePlan& plan, int64_t m, LaneBlock block, const typename F::BatchRow* x, bool next,
                            float* acc) {
  if (plan.passes == 0) return lane_block_of<F, Values::unpacked, kMostTogether, 1>(m, F::largest, block, x, acc);
  lane_block_of<F, Values::unpacked_and_kept, kMostBeside, 4>(plan.beside, F::largest, block, x, acc);
  block.later += kLaneChunks * block.later_stride;
  int64_t j = plan.beside;
  for (int64_t left = plan.passes; left > 0; left--) {
    const int64_t count = (m - j + left - 1) / left;
    lane_block_of<typename F::Kind, Values::kept, kMostTogether, 5>(count, F::largest, block, x + j, acc + 16 * j);
    j += count;
    block.later = next ? reinterpret_cast<const uint8_t*>(x + m + j) : nullptr;
    block.later_stride = sizeof(typename F::BatchRow);
  }
}

// `groups` groups of sixteen rows read a block of the batch rows one after the other, while it is in L2.
template <class F>
inline void lane_groups(const TileTask& t, const LanePlan& plan, int64_t row, int64_t groups, LaneRows& rows,
                        float* acc) {
  __builtin_memset(acc, 0, size_t(16 * t.m * groups) * sizeof(float));
  for (int64_t b = 0; b < t.blocks; b++) {
    const uint8_t* at = t.weight + row * t.row_bytes + b * F::bytes;
    const int64_t over = b + kLaneBlocksAhead < t.blocks ? 0 : (16 * groups - 1) * t.row_bytes;
    const auto* const x = reinterpret_cast<const typename F::BatchRow*>(t.packed) + b * t.m;
    for (int64_t g = 0; g < groups; g++, at += 16 * t.row_bytes) {
      const LaneBlock block{at, t.row_bytes, at + over + kLaneBlocksAhead * F::bytes, t.row_bytes, rows};
      every_batch_row<F>(plan, t.m, block, x, groups > 1 && g == groups - 1, acc + 16 * t.m * g);
    }
  }
  for (int64_t g = 0; g < groups; g++)
    for (int64_t j = 0; j < t.m; j++, acc += 16)
      _mm512_storeu_ps(t.y + j * t.y_stride + row + 16 * g, _mm512_load_ps(acc));
}

constexpr int64_t kLaneGroups = 4, kLaneGroupsFromM = 33;
template <class F>
inline void matmul_row_lanes(const TileTask& t) {
  auto& rows = *reinterpret_cast<LaneRows*>(t.scratch);
  auto* const acc = reinterpret_cast<float*>(&rows + 1);
  const int64_t most = t.m < kLaneGroupsFromM ? 1 : kLaneGroups;
  const LanePlan plan(t.m);
  for (int64_t row = t.row_begin, groups; row < t.row_end; row += 16 * groups) {
    groups = (t.row_end - row) / 16 < most ? (t.row_end - row) / 16 : most;
    lane_groups<F>(t, plan, row, groups, rows, acc);
  }
}
inline int64_t row_lanes_scratch(int64_t m) { return int64_t(sizeof(LaneRows)) + kLaneGroups * 64 * m; }

}  // namespace
}  // namespace qtensor
