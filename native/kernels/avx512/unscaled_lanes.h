// Tiles of the formats in unpacked_rows.h. Batch rows are packed as in batch_lanes.h. Bytes that include their scale
// are summed over the whole block. In other formats, the sum of a sub-block or a group of sixteen is multiplied by its
// scale in 32 bits when it is complete.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/batch_lanes.h"
#include "kernels/avx512/folded_blocks.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/level_rows.h"
#include "kernels/avx512/unpacked_rows.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"
#include "kernels/portable/unpacked_blocks.h"

namespace qtensor {
namespace {

// A format: place(k), the position of value k (eight values are adjacent); `scaled`, whether bytes include their scale;
// and `scales`, the number of scales of a sub-block. Products are compiled once for each Layout, which formats
// may share.
template <class Block>
struct Rows256 : Folded<Block> {
  using Unpacked = RowBlocks;
  using Layout = Rows256;
  static constexpr bool scaled = true;
  static constexpr int scales = 1;
  static QTENSOR_INLINE int place(int k) { return k; }
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
    const auto h = Folded<Block>::headers(place);
    _mm_store_ps(to.d, h.d);
    if constexpr (Folded<Block>::has_min) {
      _mm_store_ps(to.dmin, h.dmin);
      for (int n = 0; n < 2; n++) _mm512_store_si512(to.pairs[n], h.mins[n]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++) {
      __m512i q[4];
      Folded<Block>::values(place[r], h, r, q);
      for (int c = 0; c < 4; c++) _mm512_store_si512(to.q[r] + 64 * c, q[c]);
    }
  }
};

template <>
struct Rows256<BlockIQ4_XS> {
  using Unpacked = RowBlocks;
  using Layout = Rows256;
  static constexpr int64_t bytes = sizeof(BlockIQ4_XS);
  static constexpr int scales = 1;
  static constexpr bool has_min = false, scaled = false;
  static constexpr int offset = kLevelsOffset;
  static QTENSOR_INLINE int place(int k) { return k / 128 * 128 + k % 32 / 16 * 64 + k % 128 / 32 * 16 + k % 16; }
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
    const LevelHeaders h = level_headers(place);
    _mm_store_ps(to.d, h.d);
    for (int n = 0; n < 2; n++) _mm512_store_si512(to.scale[4 * n], h.scales[n]);
    // the low words of [sub-block][row], of two times four sub-blocks, as [row][sub-block]
    const __m512i turned =
        _mm512_setr_epi64(0x0018001000080000, 0x0038003000280020, 0x001a0012000a0002, 0x003a0032002a0022,
                          0x001c0014000c0004, 0x003c0034002c0024, 0x001e0016000e0006, 0x003e0036002e0026);
    _mm512_store_si512(to.pairs[0], _mm512_permutex2var_epi16(h.scales[0], turned, h.scales[1]));
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++)
      for (int n = 0; n < 2; n++) {
        __m512i q[2];
        level_values(place[r], n, q);
        for (int i = 0; i < 2; i++) _mm512_store_si512(to.q[r] + 128 * n + 64 * i, q[i]);
      }
  }
};

template <int SCALES>
struct GridLayout {
  static constexpr bool has_min = false, scaled = false;
  static constexpr int scales = SCALES, offset = kLevelsOffset;
  static QTENSOR_INLINE int place(int k) { return k; }
};
// A format with a grid; its values are integers.
template <class F>
struct GridRows256 {
  using Block = typename F::Block;
  using Unpacked = RowBlocks;
  using Layout = GridLayout<Grid<Block>::scales>;
  static constexpr int64_t bytes = sizeof(Block);
  static constexpr bool has_min = false;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
    _mm_store_ps(to.d, _mm_mul_ps(grid_d<Block>(place), _mm_set1_ps(F::kStep)));
    for (int r = 0; r < kTileRows; r++) {
      GridRow w;
      take_row<Block>(place[r], w);
      for (int c = 0; c < 4; c++) {
        __m512i q = _mm512_sub_epi8(w.q[c], _mm512_set1_epi8(Grid<Block>::offset));
        if constexpr (Grid<Block>::offset == 0) q = _mm512_mask_sub_epi8(q, w.negative[c], _mm512_setzero_si512(), q);
        _mm512_store_si512(to.q[r] + 64 * c, _mm512_xor_si512(q, _mm512_set1_epi8(char(kLevelsOffset))));
      }
      alignas(32) int16_t scale[16];
      _mm256_store_si256((__m256i*)scale, w.scales);
      if constexpr (Layout::scales == 2)
        for (int n = 0; n < 2; n++) __builtin_memcpy(to.pairs[n][r], scale + 8 * n, 16);
      else
        _mm_store_si128((__m128i*)to.pairs[0][r], _mm256_cvtepi32_epi16(w.scales));
      for (int j = 0; j < 8 * Layout::scales; j++) to.scale[j][r] = scale[2 / Layout::scales * j];
    }
  }
};

struct UnscaledLanes512 : BatchLanes512 {
  template <class Rows>
  static constexpr int64_t tile_bytes = 4096 + 320 + 64;

  template <class Rows, int GROUPS, int TILES>
  static QTENSOR_INLINE void block(const RowBlocks* rows, const Packed* x, float* acc) {
    block_of<typename Rows::Layout, GROUPS, TILES>(rows, x, acc);
  }
  template <class Rows, int GROUPS, int TILES>
  static __attribute__((noinline)) void block_of(const RowBlocks* rows, const Packed* x, float* acc) {
    constexpr int count = GROUPS * kTileRows;
    const auto own = [&](int r) -> const RowBlocks& { return rows[r / kTileRows]; };
    __m512i total[count][TILES];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
      for (int t = 0; t < TILES; t++) total[r][t] = _mm512_setzero_si512();
    constexpr int fours = 8 / Rows::scales;
    for (int j = 0; j < 8 * Rows::scales; j++) {
      __m512i sum[count][TILES];
#pragma GCC unroll 16
      for (int r = 0; r < count; r++)
        for (int t = 0; t < TILES; t++) sum[r][t] = Rows::scaled ? total[r][t] : _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < fours; i++) {
        __m512i xv[TILES];
#pragma GCC unroll 3
        for (int t = 0; t < TILES; t++) xv[t] = _mm512_load_si512(x[t].q[fours * j + i]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
          const int at = Rows::place(4 * fours * j) + Rows::place(4 * i);
          const __m512i w = _mm512_set1_epi32(dword_at(own(r).q[r % kTileRows] + at, 0));
#pragma GCC unroll 3
          for (int t = 0; t < TILES; t++) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], w, xv[t]);
        }
      }
      add_scaled<Rows, count, TILES>(rows, j, sum, total);
    }
#pragma GCC unroll 3
    for (int t = 0; t < TILES; t++) {
      __m512i of_rows[count];
      for (int r = 0; r < count; r++) of_rows[r] = total[r][t];
      finish<Rows, count>(rows, x[t], of_rows, acc + t * kTileFloats);
    }
  }

  // Sets total to sum if bytes include their scale; else adds the scaled sums of sub-block j.
  template <class Rows, int COUNT, int TILES>
  static QTENSOR_INLINE void add_scaled(const RowBlocks* rows, int j, const __m512i (&sum)[COUNT][TILES],
                                        __m512i (&total)[COUNT][TILES]) {
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) {
      const __m512i scale = _mm512_set1_epi32(rows[r / kTileRows].scale[j][r % kTileRows]);
#pragma GCC unroll 3
      for (int t = 0; t < TILES; t++)
        total[r][t] = Rows::scaled ? sum[r][t] : _mm512_add_epi32(total[r][t], _mm512_mullo_epi32(sum[r][t], scale));
    }
  }

  // Computes mins, or subtracts the offset, and executes the float step.
  template <class Rows, int COUNT>
  static QTENSOR_INLINE void finish(const RowBlocks* rows, const Packed& x, __m512i (&total)[COUNT], float* acc) {
    using V = Vector512;
    const __m512 dx = V::load_floats(x.d);
    constexpr bool of_groups = Rows::has_min || Rows::scales == 2;
    constexpr int pairs = of_groups ? 8 : 4;
    __m512i sums[pairs], start = V::zero();
#pragma GCC unroll 8
    for (int i = 0; i < pairs; i++) {
      sums[i] = V::load(of_groups ? x.sums16[i] : x.sums32[i]);
      if (Rows::scaled && !Rows::has_min) start = V::words(start, sums[i], _mm512_set1_epi16(-Rows::offset));
    }
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) {
      const RowBlocks& own = rows[r / kTileRows];
      __m512i side = V::zero();
#pragma GCC unroll 8
      for (int i = 0; i < pairs; i++)
        if (Rows::has_min || !Rows::scaled)
          side = V::words(side, sums[i], V::all(dword_at(own.pairs[i / 4][r % kTileRows], i % 4)));
      __m512i products = _mm512_add_epi32(total[r], start);
      if (!Rows::scaled) products = _mm512_sub_epi32(products, V::left(side, 7));
      __m512 f = V::mul(V::floats(products), V::all_floats(own.d[r % kTileRows]));
      if (Rows::has_min) f = V::fnma(V::floats(side), V::all_floats(own.dmin[r % kTileRows]), f);
      V::store_floats(acc + r * 16, V::fma(f, dx, V::load_floats(acc + r * 16)));
    }
  }

  template <class Rows>
  static QTENSOR_INLINE void small_m(const RowBlocks* rows, const Packed* x, int64_t m, float* acc,
                                     AheadInOrder& ahead) {
    using Layout = typename Rows::Layout;
    if (m <= 8)
      halves<Layout, 1>(rows, *x, acc, ahead, Rows::bytes);
    else
      halves<Layout, 2>(rows, *x, acc, ahead, Rows::bytes);
  }
  // Multiplies the first HALVES * 8 batch rows, in pairs of fours (see BatchLanes512::pair), with two groups of rows.
  template <class Rows, int HALVES>
  static __attribute__((noinline)) void halves(const RowBlocks* rows, const Packed& x, float* acc, AheadInOrder& ahead,
                                               int64_t bytes) {
    constexpr int count = 2 * kTileRows;
    __m512i total[count][HALVES];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
      for (int h = 0; h < HALVES; h++) total[r][h] = _mm512_setzero_si512();
    constexpr int eights = 4 / Rows::scales;
    for (int j = 0; j < 8 * Rows::scales; j++) {
      if (j % Rows::scales == 0) ahead.ask(count * bytes / 8);
      __m512i sum[count][HALVES];
#pragma GCC unroll 16
      for (int r = 0; r < count; r++)
        for (int h = 0; h < HALVES; h++) sum[r][h] = Rows::scaled ? total[r][h] : _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < eights; i++) {
        __m512i xv[HALVES];
        for (int h = 0; h < HALVES; h++) xv[h] = _mm512_load_si512(x.q[2 * eights * j + 2 * i + h]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
          long long eight;
          __builtin_memcpy(&eight,
                           rows[r / kTileRows].q[r % kTileRows] + Rows::place(8 * eights * j) + Rows::place(8 * i), 8);
          const __m512i w = _mm512_set1_epi64(eight);
          for (int h = 0; h < HALVES; h++) sum[r][h] = _mm512_dpbusd_epi32(sum[r][h], w, xv[h]);
        }
      }
      add_scaled<Rows, count, HALVES>(rows, j, sum, total);
    }
    __m512i whole[count];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++) {
      const __m512 a = _mm512_castsi512_ps(total[r][0]), b = _mm512_castsi512_ps(total[r][HALVES - 1]);
      whole[r] = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                  _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
    }
    finish<Rows, count>(rows, x, whole, acc);
  }
};

Tiles tiles_256(Format format) {
  return with_format_256(
      format,
      []<class F>(F) -> Tiles {
        if constexpr (kHasGrid<typename F::Block>)
          return {matmul_batch_lanes<UnscaledLanes512, GridRows256<F>>, &kPacked<BatchLanes512>};
        else if constexpr (kInFours<typename F::Block>)
          return {matmul_batch_lanes<UnscaledLanes512, Rows256<typename F::Block>>, &kPacked<BatchLanes512>};
        else
          return {};
      },
      [] { return Tiles(); });
}

}  // namespace
}  // namespace qtensor
