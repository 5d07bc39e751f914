// Sixteen batch rows in the lanes of one zmm register, or eight in a ymm register: see kernels/portable/batch_lanes.h.
//
// Sums are multiplied by their scale in one vpdpwssd, which takes words. The sum of a whole sub-block or group fits a
// word unless its activations are all large: their magnitudes tell, and are taken together when batch rows are packed.
// Where it might not fit, weights are counted from the middle of their range: the sum of `narrow` products begins with
// -middle * (the sum of its activations), which is the same for every row and lies ready beside the batch rows. Then it
// always fits: middle * narrow * 127 = 32,512. (So Q6_K is counted in any case: its offset is the middle.) Both
// give the same integers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/avx512/row_blocks.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

struct Vector512 {
  using Int = __m512i;
  using Float = __m512;
  static Int zero() { return _mm512_setzero_si512(); }
  static Int all(int32_t x) { return _mm512_set1_epi32(x); }
  static Float all_floats(float x) { return _mm512_set1_ps(x); }
  static Int load(const void* p) { return _mm512_load_si512(p); }
  static Float load_floats(const float* p) { return _mm512_load_ps(p); }
  static void store_floats(float* p, Float a) { _mm512_store_ps(p, a); }
  static Int bytes(Int sum, Int weights, Int x) { return _mm512_dpbusd_epi32(sum, weights, x); }
  static Int words(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static Int left(Int a, int bits) { return _mm512_slli_epi32(a, unsigned(bits)); }
  static Float floats(Int a) { return _mm512_cvtepi32_ps(a); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float j) { return _mm512_fmadd_ps(a, b, j); }
  static Float fnma(Float a, Float b, Float j) { return _mm512_fnmadd_ps(a, b, j); }
  static void keep(Int& a) { __asm__("" : "+v"(a)); }  // in a register
};
struct BatchLanes512 {
  // How many products' sum always fits a word, by the largest weight: 15, 31, 63.
  template <class Rows>
  static constexpr int narrow = Rows::largest == 15   ? 32
                                : Rows::largest == 31 ? 16
                                                      : 8;

  // What sums begin with, -middle * (activations): sums of 32 (middle 8), of 16 (middle 16), of 8 and of 16 (middle
  // 32).
  struct Packed : PackedBatch {
    int32_t start[72][16];
    int32_t largest32, largest16;  // the largest sum of magnitudes, of 32 with that of their sum, and of 16
    int32_t padding[14];
  };
  static_assert(sizeof(Packed) % 64 == 0);
  template <class Rows, bool FITS>
  static constexpr int first_start = FITS                 ? 56
                                     : narrow<Rows> == 32 ? 0
                                     : narrow<Rows> == 16 ? 8
                                                          : 24;

  template <class Rows>  // what a product usually reads of a tile and block
  static constexpr int64_t tile_bytes = 4096 + 320 + 64 + (Rows::has_min ? 0 : 1024);

  // Up to sixteen batch rows lie in pairs of fours (see `pair`), up to eight all in the first half.
  static int batch_row_at(int lane, int64_t m) { return m > 8 ? lane : lane % 4 < 2 ? lane / 4 * 2 + lane % 4 : 16; }

  static void pack(const BlockQ8K* x, int64_t blocks, int64_t m, int64_t count, Packed& out) {
    static_assert(offsetof(BlockQ8K, sums32) == 288 && offsetof(BlockQ8K, d) == 304);
    for (int line = 0; line < 5; line++) {  // the last has sums16, sums32 and d: as dwords, the order of PackedBatch
      __m512i r[16];
      for (int lane = 0; lane < 16; lane++) {
        const int j = batch_row_at(lane, m);
        r[lane] = j < count ? _mm512_load_si512((const uint8_t*)(x + j * blocks) + 64 * line) : _mm512_setzero_si512();
      }
      transpose16(r);
      for (int i = 0; i < (line < 4 ? 16 : 13); i++) _mm512_store_si512((uint8_t*)&out + 1024 * line + 64 * i, r[i]);
    }
    if (m <= 16)
      pair(out);
    else
      complete(out);
  }

  // [k / 8][half of the batch rows][8 of them][8 bytes]: 0, 1, 4, 5, 8, 9, 12, 13 and the others.
  static void pair(Packed& x) {
    const __m512i ones = _mm512_set1_epi8(1), none = _mm512_setzero_si512();
    __m512i sum[2];
    for (int i = 0; i < 32; i++) {
      const __m512i a = _mm512_load_si512(x.q[2 * i]), b = _mm512_load_si512(x.q[2 * i + 1]);
      const __m512i half[2] = {_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)};
      for (int h = 0; h < 2; h++) {
        _mm512_store_si512(x.q[2 * i + h], half[h]);
        sum[h] = _mm512_dpbusd_epi32(i % 2 == 0 ? none : sum[h], ones, half[h]);
        if (i % 2 == 1) _mm512_store_si512(x.start[i - 1 + h], _mm512_sub_epi32(none, _mm512_slli_epi32(sum[h], 5)));
      }
    }
  }

  // The first HALVES * 8 batch rows of two groups of rows.
  template <class Rows, int HALVES>
  static __attribute__((noinline)) void some_lanes(const RowBlocks* rows, const Packed* x, float* acc,
                                                   AheadInOrder& ahead) {
    // A lane sums half of so many products: 15 * 16 * 127 fits a word, 31 * 8 * 127 too.
    constexpr int count = 2 * kTileRows, span = Rows::largest == 15 ? 32 : 16, steps = span / 8;
    const auto block = [&](int r) -> const RowBlocks& { return rows[r / kTileRows]; };
    __m512i total[count];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++) total[r] = _mm512_setzero_si512();
    for (int part = 0; part < 256 / span; part++) {
      ahead.ask(count * Rows::bytes * span / 256);
      const int number = Rows::at(part * span / Rows::group);
      const int k = number * Rows::group / 8 + part % (Rows::group / span) * steps;
      __m512i sum[count][HALVES], start[HALVES];
      for (int h = 0; h < HALVES; h++) {
        start[h] = Rows::has_min ? _mm512_setzero_si512() : _mm512_load_si512(x->start[2 * number + h]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) sum[r][h] = start[h];
      }
#pragma GCC unroll 8
      for (int i = 0; i < steps; i++) {
        __m512i xv[HALVES];
        for (int h = 0; h < HALVES; h++) xv[h] = _mm512_load_si512(x->q[2 * (k + i) + h]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
          long long eight;
          __builtin_memcpy(&eight, block(r).q[r % kTileRows] + 8 * (part * steps + i), 8);
          const __m512i w = _mm512_set1_epi64(eight);
          for (int h = 0; h < HALVES; h++) sum[r][h] = _mm512_dpbusd_epi32(sum[r][h], w, xv[h]);
        }
      }
      const int at = number / 4 * kTileRows * 4 + number % 4;
#pragma GCC unroll 16
      for (int r = 0; r < count; r++)
        total[r] = _mm512_dpwssd_epi32(total[r], _mm512_packs_epi32(sum[r][0], sum[r][HALVES - 1]),
                                       _mm512_set1_epi32(dword_at(block(r).scale_twice[0][r % kTileRows], at)));
    }
    using V = Vector512;
    const __m512 dx = V::load_floats(x->d);
    __m512i sums[4];
    for (int i = 0; i < 4; i++) {
      if (!Rows::has_min) continue;
      sums[i] = V::load(x->sums32[i]);
      V::keep(sums[i]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < count; r++) {
      const RowBlocks& own = block(r);
      __m512 f = V::mul(V::floats(total[r]), V::all_floats(own.d[r % kTileRows]));
      if (Rows::has_min) {
        __m512i mins = V::zero();
        for (int i = 0; i < 4; i++) mins = V::words(mins, sums[i], V::all(dword_at(own.min_pairs[r % kTileRows], i)));
        f = V::fnma(V::floats(mins), V::all_floats(own.dmin[r % kTileRows]), f);
      }
      V::store_floats(acc + r * 16, V::fma(f, dx, V::load_floats(acc + r * 16)));
    }
  }

  static void complete(Packed& x) {
    __m512i sixteens[16], sizes[16];
    const __m512i ones = _mm512_set1_epi8(1), none = _mm512_setzero_si512();
    __m512i largest32 = none, largest16 = none;
    const auto store = [&](int at, __m512i sum, int bits) {
      _mm512_store_si512(x.start[at], _mm512_sub_epi32(none, _mm512_slli_epi32(sum, unsigned(bits))));
    };
    for (int i = 0; i < 16; i++) {
      __m512i half[2];
      sizes[i] = none;
      for (int h = 0; h < 2; h++) {
        const __m512i a = _mm512_load_si512(x.q[4 * i + 2 * h]), b = _mm512_load_si512(x.q[4 * i + 2 * h + 1]);
        half[h] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, ones, a), ones, b);
        sizes[i] = _mm512_dpbusd_epi32(sizes[i], _mm512_abs_epi8(a), ones);
        sizes[i] = _mm512_dpbusd_epi32(sizes[i], _mm512_abs_epi8(b), ones);
        store(24 + 2 * i + h, half[h], 5);
      }
      sixteens[i] = _mm512_add_epi32(half[0], half[1]);
      store(8 + i, sixteens[i], 4);
      store(56 + i, sixteens[i], 5);
      largest16 = _mm512_max_epi32(largest16, sizes[i]);
    }
    for (int i = 0; i < 8; i++) {
      const __m512i sum = _mm512_add_epi32(sixteens[2 * i], sixteens[2 * i + 1]);
      store(i, sum, 3);
      const __m512i size = _mm512_add_epi32(sizes[2 * i], sizes[2 * i + 1]);
      largest32 = _mm512_max_epi32(largest32, _mm512_add_epi32(size, _mm512_abs_epi32(sum)));
    }
    x.largest32 = _mm512_reduce_max_epi32(largest32);
    x.largest16 = _mm512_reduce_max_epi32(largest16);
  }

  // Whether the sum of a sub-block, or of a group of 16, fits a word. Positive products and negative ones each sum up
  // to half of (magnitudes + size of the sum) at the most; what is counted from the middle to all magnitudes.
  template <class Rows>
  static bool fits(const Packed& x) {
    return Rows::has_min ? x.largest32 * Rows::largest <= 2 * 32767 : x.largest16 * 32 <= 32767;
  }

  static constexpr int most_tiles = 3;
  // GROUPS x TILES as many as vpdpbusd needs to have under way, and as there are registers for.
  template <class Rows, int GROUPS, int TILES>
  static QTENSOR_INLINE void block(const RowBlocks* rows, const Packed* x, float* acc) {
    bool fit = true;
    for (int t = 0; t < TILES; t++) fit &= fits<Rows>(x[t]);
    if (fit)
      some<Rows, GROUPS, TILES, true>(rows, x, acc);
    else
      some<Rows, GROUPS, TILES, false>(rows, x, acc);
  }
  template <class Rows>
  static QTENSOR_INLINE void small_m(const RowBlocks* rows, const Packed* x, int64_t m, float* acc,
                                     AheadInOrder& ahead) {
    if (m <= 8)
      some_lanes<Rows, 1>(rows, x, acc, ahead);
    else
      some_lanes<Rows, 2>(rows, x, acc, ahead);
  }

  template <class Rows, int GROUPS, int TILES, bool FITS>
  static __attribute__((noinline)) void some(const RowBlocks* rows, const Packed* x, float* acc) {
    using V = Vector512;
    constexpr int count = GROUPS * kTileRows, span = FITS ? Rows::group : narrow<Rows>, steps = span / 4;
    constexpr bool add_back = Rows::has_min && !FITS;  // what counting from the middle took away
    const auto block = [&](int r) -> const RowBlocks& { return rows[r / kTileRows]; };
    typename V::Int total[count][TILES];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 3
      for (int t = 0; t < TILES; t++) {
        total[r][t] = V::zero();
        if (!add_back) continue;
        for (int i = 0; i < 4; i++)
          total[r][t] =
              V::words(total[r][t], V::load(x[t].sums32[i]), V::all(dword_at(block(r).scale_pairs[r % kTileRows], i)));
        total[r][t] = V::left(total[r][t], Rows::largest == 15 ? 3 : 4);
      }
    for (int place = 0; place < 256 / span; place++) {
      const int part = span < Rows::group ? place % (Rows::group / span) : 0;
      const int number = Rows::at(place * span / Rows::group), k = number * Rows::group / 4 + part * steps;
      typename V::Int sum[count][TILES];
#pragma GCC unroll 3
      for (int t = 0; t < TILES; t++) {
        const typename V::Int start =
            Rows::has_min && FITS ? V::zero() : V::load(x[t].start[first_start<Rows, FITS> + k / steps]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) sum[r][t] = start;
      }
#pragma GCC unroll 8
      for (int i = 0; i < steps; i++) {
        typename V::Int xv[TILES];
#pragma GCC unroll 3
        for (int t = 0; t < TILES; t++) xv[t] = V::load(x[t].q[k + i]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
          const typename V::Int w = V::all(dword_at(block(r).q[r % kTileRows], place * steps + i));
#pragma GCC unroll 3
          for (int t = 0; t < TILES; t++) sum[r][t] = V::bytes(sum[r][t], w, xv[t]);
        }
      }
      const int at = number / 4 * kTileRows * 4 + number % 4;
#pragma GCC unroll 16
      for (int r = 0; r < count; r++) {
        const typename V::Int scale = V::all(dword_at(block(r).scale[0][r % kTileRows], at));
#pragma GCC unroll 3
        for (int t = 0; t < TILES; t++) total[r][t] = V::words(total[r][t], sum[r][t], scale);
      }
    }
#pragma GCC unroll 3
    for (int t = 0; t < TILES; t++) {
      const typename V::Float dx = V::load_floats(x[t].d);
      typename V::Int sums[4];
      for (int i = 0; i < 4; i++) {
        if (!Rows::has_min) continue;
        sums[i] = V::load(x[t].sums32[i]);
        V::keep(sums[i]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < count; r++) {
        const RowBlocks& own = block(r);
        typename V::Float f = V::mul(V::floats(total[r][t]), V::all_floats(own.d[r % kTileRows]));
        if (Rows::has_min) {
          typename V::Int mins = V::zero();
          for (int i = 0; i < 4; i++) mins = V::words(mins, sums[i], V::all(dword_at(own.min_pairs[r % kTileRows], i)));
          f = V::fnma(V::floats(mins), V::all_floats(own.dmin[r % kTileRows]), f);
        }
        float* at = acc + t * kTileFloats + r * 16;
        V::store_floats(at, V::fma(f, dx, V::load_floats(at)));
      }
    }
  }

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t m, int64_t count) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(acc + 16 * i);
    transpose16(r);
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; lane++) {
      const int j = batch_row_at(lane, m);
      if (j < count) _mm512_storeu_si512(y + j * y_stride, r[lane]);
    }
  }
};

int64_t packed_bytes_lanes(int64_t blocks, int64_t m) {
  return (m + 15) / 16 * blocks * int64_t(sizeof(BatchLanes512::Packed));
}
void pack_block_lanes(const PackTask& t, int64_t tile, int64_t block) {
  pack_batch<BatchLanes512>(t, t.x, tile, block);
}

}  // namespace
}  // namespace qtensor
