// Products with AMX for M up to 128 (several sequences at once, or a short text) and the formats with mins. Activations
// are the A operand, so an additional batch row costs only one more row of tiles. See weights_as_b.h for the operands.
//
// The sixteen rows of a tile come from sixteen equal parts of an N tile, and are prefetched as in small_m.h.
//
// A block is multiplied in steps of up to two tiles of batch rows. Between the tile instructions of a step, there are
// sixteen interleave slots, four for each 64 values (a part). They execute the epilogue of the previous step, one batch
// row per slot, and unpack the next block, one unit at a time. A unit overwrites planes that the tiles have read for
// the last time, so there is one set of planes, which leaves more of L1 for the activations. The number of rows is a
// multiple of 16.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/small_m.h"
#include "kernels/amx/tiles.h"
#include "kernels/amx/weights_as_b.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

constexpr int kMostTilesAsA = 8, kMostMAsA = 16 * kMostTilesAsA, kAsAPartRows = 8;

struct AsAScratch {
  BPlanes planes;
  BHeaders headers[3];
  // Each M tile has room for sixteen batch rows, even if it has fewer.
  alignas(64) int32_t high[32][16], low[32][16];         // the stored tiles of a step
  alignas(64) float acc[kAsAPartRows * kMostMAsA * 16];  // [row of a part][batch row][part]
};

template <class Planes, int TILES>
struct ActivationsAsA {
  static constexpr int kSteps = (TILES + 1) / 2, kLastTiles = TILES - 2 * (kSteps - 1);
  static constexpr int kBatchRows = 16 * TILES;

  const TileTask& t;
  AsAScratch& scratch;
  const int each = int(batch_rows_per_tile(t.m));
  const int64_t part_rows = (t.row_end - t.row_begin) / 16;
  const int64_t stride = part_rows * t.row_bytes;
  const uint8_t* const begin = t.weight + t.row_begin * t.row_bytes;
  const uint8_t* const part_end = begin + stride;
  SixteenBlocks place = {{begin, begin + 4 * stride, begin + 8 * stride, begin + 12 * stride}, stride, 3 * stride};
  BHeaders *before = scratch.headers, *now = scratch.headers + 1, *next = scratch.headers + 2;
  int64_t block = 0;
  float* acc = scratch.acc;
  // of the previous step; null at first
  const ASums* epilogue = nullptr;
  float* epilogue_acc = nullptr;
  __mmask16 epilogue_seen = 0;  // whether acc has been written: a mask instead of a branch

  // The epilogue of batch row `r` of each tile of step STEP; operands of both are loaded once. Mins are multiplied by
  // four vector products per batch row, because a product of tiles with its store and loads takes longer.
  template <int STEP>
  QTENSOR_INLINE void floats(int r) {
    constexpr bool kOfBlockBefore = STEP == kSteps - 1;
    constexpr int kTiles = kOfBlockBefore ? kLastTiles : 2;
    const BHeaders& headers = *(kOfBlockBefore ? before : now);
    const __m512 d = _mm512_load_ps(headers.d);
    __m512 f[kTiles], sum[kTiles];
    for (int i = 0; i < kTiles; i++) {
      const int at = r + 16 * i;
      const __m512i high = _mm512_load_si512(scratch.high[at]), low = _mm512_load_si512(scratch.low[at]);
      f[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, Planes::shift), low)), d);
      sum[i] = _mm512_maskz_load_ps(epilogue_seen, epilogue_acc + 16 * at);
    }
    __m512i min[kTiles];
    for (int i = 0; i < kTiles; i++) min[i] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512i two = _mm512_load_si512(headers.mins[j]);
      in_register(two);
      for (int i = 0; i < kTiles; i++) {
        int32_t sums;
        __builtin_memcpy(&sums, epilogue[i].sums32[r] + 2 * j, 4);
        min[i] = _mm512_dpwssd_epi32(min[i], two, _mm512_set1_epi32(sums));
      }
    }
    const __m512 dmin = _mm512_load_ps(headers.dmin);
    for (int i = 0; i < kTiles; i++) f[i] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min[i]), dmin, f[i]);
    for (int i = 0; i < kTiles; i++)
      _mm512_store_ps(epilogue_acc + 16 * (r + 16 * i),
                      _mm512_fmadd_ps(f[i], _mm512_set1_ps(epilogue[i].d[r]), sum[i]));
  }

  template <int STEP, int SLOT>
  QTENSOR_INLINE void slot(const uint8_t*& asked, bool has_next) {
    constexpr int kEpilogueStep = STEP == 0 ? kSteps - 1 : STEP - 1, kPlace = 16 * STEP + SLOT;  // of kSteps * 16
    if (epilogue != nullptr && SLOT < each) floats<kEpilogueStep>(SLOT);
    if (kPlace % kSteps == 0) {
      for (int64_t i = 0; i < Planes::bytes; i += 64) _mm_prefetch((const char*)(asked + i), _MM_HINT_T0);
      asked += stride;
    }
    if constexpr (STEP == 0 && (SLOT == 0 || SLOT == 2))
      Planes::template values<6 + SLOT / 2>(place, 0, *now, scratch.planes);
    else if constexpr (STEP == kSteps - 1 && SLOT > 2 && SLOT % 2 == 0)
      if (has_next) Planes::template values<SLOT / 2 - 2>(place, Planes::bytes, *next, scratch.planes);
    before_tile_loads();
  }

  template <int STEP = 0>
  QTENSOR_INLINE void steps(const uint8_t*& asked, bool has_next) {
    step<STEP>(asked, has_next);
    if constexpr (STEP + 1 < kSteps) steps<STEP + 1>(asked, has_next);
  }

  template <int STEP>
  QTENSOR_INLINE void step(const uint8_t*& asked, bool has_next) {
    constexpr int kTiles = STEP == kSteps - 1 ? kLastTiles : 2;
    const ATiles all = a_tiles(t.packed, t.blocks, t.m, block);
    const AValues* const values = all.values + 2 * STEP;
    before_tile_loads();
    _tile_zero(0);
    _tile_zero(2);
    if (kTiles == 2) {
      _tile_zero(1);
      _tile_zero(3);
    }
    for_four([&](auto number) __attribute__((always_inline)) {
      constexpr int part = decltype(number)::value;
      _tile_loadd(6, scratch.planes.high[part], 64);
      _tile_loadd(4, values[0].q[part], 64);
      slot<STEP, 4 * part>(asked, has_next);
      _tile_loadd(7, scratch.planes.low[part], 64);
      _tile_dpbsud(0, 4, 6);
      slot<STEP, 4 * part + 1>(asked, has_next);
      if (kTiles == 2) {
        _tile_loadd(5, values[1].q[part], 64);
        _tile_dpbsud(1, 5, 6);
      }
      slot<STEP, 4 * part + 2>(asked, has_next);
      _tile_dpbsud(2, 4, 7);
      if (kTiles == 2) _tile_dpbsud(3, 5, 7);
      slot<STEP, 4 * part + 3>(asked, has_next);
    });
    _tile_stored(0, scratch.high, 64);
    if (kTiles == 2) _tile_stored(1, scratch.high + 16, 64);
    _tile_stored(2, scratch.low, 64);
    if (kTiles == 2) _tile_stored(3, scratch.low + 16, 64);
    before_tile_loads();
    epilogue = all.sums + 2 * STEP;
    epilogue_acc = acc + 2 * STEP * 256;
    epilogue_seen = block == 0 ? 0 : 0xffff;
  }

  // MORE: at least two more blocks of the part follow.
  template <bool MORE>
  QTENSOR_INLINE void one_block(bool has_next) {
    const uint8_t* asked = place.group[0] + kBlocksAhead * Planes::bytes;
    if (asked >= part_end) asked += 15 * stride;  // beyond the end of a part: that part of the next N tile
    steps(asked, has_next);
    // headers of the block after the next one replace those whose epilogue has been executed
    if (MORE) Planes::headers(place, 2 * Planes::bytes, *before);
    BHeaders* const after = before;
    before = now;
    now = next;
    next = after;
    for (int g = 0; g < 4; g++) place.group[g] += Planes::bytes;
    if (++block == t.blocks) {
      block = 0;
      acc += 16 * kBatchRows;
    }
  }

  QTENSOR_INLINE void run() {
    int64_t left = part_rows * t.blocks;  // of a part, whose rows are adjacent
    Planes::headers(place, 0, *now);
    for_four([&](auto part) __attribute__((always_inline)) {
      constexpr int unit = 2 * decltype(part)::value;
      if constexpr (unit < 6) {  // the last part is unpacked while the block is multiplied
        Planes::template values<unit>(place, 0, *now, scratch.planes);
        Planes::template values<unit + 1>(place, 0, *now, scratch.planes);
      }
    });
    if (left > 1) Planes::headers(place, Planes::bytes, *next);
    for (; left > 2; left--) one_block<true>(true);
    for (; left > 0; left--) one_block<false>(left > 1);
    for (int r = 0; r < each; r++) floats<kSteps - 1>(r);
    float* y = t.y + t.row_begin;
    for (int r = 0; r < t.m; r++, y += t.y_stride) write_out(scratch.acc + 16 * (r / each * 16 + r % each), y);
  }

  // Writes one batch row of the N tile: the rows of sixteen parts, part after part.
  void write_out(const float* from, float* y) const {
    if (part_rows == kAsAPartRows) return write_whole(from, y);
    for (int64_t row = 0; row < part_rows; row++)
      for (int part = 0; part < 16; part++) y[part * part_rows + row] = from[row * 16 * kBatchRows + part];
  }
  void write_whole(const float* from, float* y) const {
    static_assert(kAsAPartRows == 8);
    const int64_t row_stride = 16 * kBatchRows;
    __m512i four[2][4];  // [rows 0 to 3, 4 to 7][k]: of parts k, 4 + k, 8 + k and 12 + k
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 4; i++) four[half][i] = _mm512_load_si512(from + (4 * half + i) * row_stride);
      transpose_fours(four[half]);
    }
    for (int k = 0; k < 4; k += 2) {  // two adjacent parts are a vector of y
      const __m512i a = _mm512_shuffle_i32x4(four[0][k], four[1][k], 0x44);
      const __m512i b = _mm512_shuffle_i32x4(four[0][k + 1], four[1][k + 1], 0x44);
      const __m512i r = _mm512_shuffle_i32x4(four[0][k], four[1][k], 0xee);
      const __m512i d = _mm512_shuffle_i32x4(four[0][k + 1], four[1][k + 1], 0xee);
      _mm512_storeu_si512(y + 8 * k, _mm512_shuffle_i32x4(a, b, 0x88));
      _mm512_storeu_si512(y + 8 * (4 + k), _mm512_shuffle_i32x4(a, b, 0xdd));
      _mm512_storeu_si512(y + 8 * (8 + k), _mm512_shuffle_i32x4(r, d, 0x88));
      _mm512_storeu_si512(y + 8 * (12 + k), _mm512_shuffle_i32x4(r, d, 0xdd));
    }
  }
};

template <class Planes, int TILES = 1>
void n_tile_as_a(const TileTask& n_tile, AsAScratch& scratch) {
  if constexpr (TILES < kMostTilesAsA)
    if (n_tile.m > 16 * TILES) return n_tile_as_a<Planes, TILES + 1>(n_tile, scratch);
  ActivationsAsA<Planes, TILES>{n_tile, scratch}.run();
}

template <class Planes>
void activations_as_a(const TileTask& t) {
  auto& scratch = *reinterpret_cast<AsAScratch*>(t.scratch);
  configure_tiles(64, int(batch_rows_per_tile(t.m)));
  TileTask n_tile = t;
  for (int64_t row = t.row_begin; row < t.row_end; row = n_tile.row_end) {
    n_tile.row_begin = row;
    n_tile.row_end = t.row_end - row < 16 * kAsAPartRows ? t.row_end : row + 16 * kAsAPartRows;
    n_tile_as_a<Planes>(n_tile, scratch);
  }
  _tile_release();
}

}  // namespace
}  // namespace qtensor
