// Products with AMX for M up to 64 (several sequences at once) and the formats without mins. Unpacking takes as long as
// the products, so the two overlap. For formats with mins, activations_as_a.h is faster.
//
// The sixteen rows of a tile come from sixteen equal parts of an N tile: the first row of each, then the next row of
// each. So memory is read in sixteen places at a time, each in order, and is prefetched into L1 shortly before it is
// used: see reads_quarters in kernels/x86/rows.h.
//
// Between the tile instructions of a pair of M tiles, there are sixteen interleave slots, four for each 64 values (a
// part). Each slot executes one row of the previous float step and unpacks values of the next block, four rows of a
// part; some also unpack headers of the block after that. With one pair of M tiles, a part is unpacked to where the
// tiles read it one part earlier, and the last part of the current block during its first part. So there is one set of
// planes, which leaves more of L1 for the activations. With two pairs, each part is read twice, and there are two sets.
// The number of rows is a multiple of 16.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/tile_step.h"
#include "kernels/amx/tiles.h"
#include "kernels/amx/weights_as_a.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

constexpr int64_t kBlocksAhead = 3;
constexpr int kSmallMTiles = 4, kMostSmallM = 16 * kSmallMTiles, kSmallMPartRows = 8;
constexpr int64_t kSmallMRowStride = 16 * kSmallMPartRows,
                  kSmallMTileStride = 16 * kSmallMRowStride;  // in acc: [part][row][batch row]

struct SmallMScratch {
  RowPlanes planes[2];
  RowHeaders headers[3];
  StepSums sums;
  alignas(64) float acc[kSmallMTiles * kSmallMTileStride];
};

template <class Planes, int TILES>
struct SmallM {
  static constexpr int kSteps = (TILES + 1) / 2;

  const TileTask& t;
  SmallMScratch& scratch;
  const int64_t part_rows = (t.row_end - t.row_begin) / 16;
  const int64_t stride = part_rows * t.row_bytes, stride3 = 3 * stride;
  const uint8_t* group[4];  // the current block in parts 0, 4, 8 and 12
  const uint8_t* const part_end = t.weight + t.row_begin * t.row_bytes + stride;
  RowHeaders *before = scratch.headers, *now = scratch.headers + 1, *next = scratch.headers + 2;
  int item = 0;
  int64_t block = 0;
  float* acc = scratch.acc;
  Epilogue epilogue;

  QTENSOR_INLINE FourBlocks blocks(int g, int64_t later) const { return {group[g] + later, stride, stride3}; }

  // Headers of the block after the next one replace those of the previous block, four rows after its float step.
  template <int STEP, int PART, int SLOT, bool MORE>
  QTENSOR_INLINE void slot(const uint8_t*& asked, bool has_next, RowPlanes& mine, RowPlanes& other) {
    constexpr int kEpilogueTiles = TILES % 2 == 1 && STEP == 0 ? 1 : 2;
    if (epilogue.sums != nullptr)
      float_step<Planes, kEpilogueTiles, kSmallMRowStride, kSmallMTileStride, 1>(epilogue, 4 * PART + SLOT);
    if (MORE && STEP == 0 && SLOT == 3) Planes::headers(blocks(PART, 2 * Planes::bytes), *before, 4 * PART);
    if (SLOT % kSteps == 0) {
      for (int64_t i = 0; i < Planes::bytes; i += 64) _mm_prefetch((const char*)(asked + i), _MM_HINT_T0);
      asked += stride;
    }
    if constexpr (kSteps == 1) {
      if (PART == 0)
        Planes::template values<3>(blocks(SLOT, 0), *now, mine, 4 * SLOT);
      else if (has_next)
        Planes::template values<(PART + 3) % 4>(blocks(SLOT, Planes::bytes), *next, mine, 4 * SLOT);
    } else if constexpr (SLOT % 2 == 1) {
      constexpr int half_part = 4 * STEP + PART, g = 2 * (half_part % 2) + SLOT / 2;
      if (has_next) Planes::template values<half_part / 2>(blocks(g, Planes::bytes), *next, other, 4 * g);
    }
    before_tile_loads();
  }

  template <int STEP, bool MORE>
  QTENSOR_INLINE void step(bool has_next) {
    constexpr int kMTiles = 2 * STEP + 2 <= TILES ? 2 : 1;
    RowPlanes &mine = scratch.planes[kSteps == 1 ? 0 : item], &other = scratch.planes[kSteps == 1 ? 0 : item ^ 1];
    const PackedTiles x = packed_tiles(t.packed, t.blocks, TILES, block) + 2 * STEP;
    const uint8_t* asked = group[0] + kBlocksAhead * Planes::bytes;
    if (asked >= part_end) asked += 15 * stride;  // beyond the end of a part: that part of the next N tile
    if (STEP == 1) asked += 8 * stride;
    before_tile_loads();
    _tile_zero(0);
    _tile_zero(2);
    if (kMTiles == 2) {
      _tile_zero(1);
      _tile_zero(3);
    }
    for_four([&](auto number) __attribute__((always_inline)) {
      constexpr int part = decltype(number)::value;
      _tile_loadd(4, mine.high[part], 64);
      _tile_loadd(6, x.values[0].q[part], 64);
      slot<STEP, part, 0, MORE>(asked, has_next, mine, other);
      _tile_loadd(5, mine.low[part], 64);
      QTENSOR_HIGH_PRODUCT(0, 4, 6);
      slot<STEP, part, 1, MORE>(asked, has_next, mine, other);
      if (kMTiles == 2) _tile_loadd(7, x.values[1].q[part], 64);
      _tile_dpbusd(2, 5, 6);
      slot<STEP, part, 2, MORE>(asked, has_next, mine, other);
      if (kMTiles == 2) {
        QTENSOR_HIGH_PRODUCT(1, 4, 7);
        _tile_dpbusd(3, 5, 7);
      }
      slot<STEP, part, 3, MORE>(asked, has_next, mine, other);
    });
    store_sums<Planes, kMTiles>(*now, x.sums, scratch.sums);
    before_tile_loads();
    const __mmask16 seen = block == 0 ? 0 : 0xffff;
    epilogue = {&scratch.sums, scratch.sums.mins, now, x.sums, acc + 2 * STEP * kSmallMTileStride, seen};
  }

  // MORE: at least two more blocks of the part follow.
  template <bool MORE>
  QTENSOR_INLINE void one_block(bool has_next) {
    step<0, MORE>(has_next);
    if constexpr (kSteps == 2) step<1, MORE>(has_next);
    RowHeaders* const after = before;
    before = now;
    now = next;
    next = after;
    item ^= 1;
    for (int g = 0; g < 4; g++) group[g] += Planes::bytes;
    if (++block == t.blocks) {
      block = 0;
      acc += 16;
    }
  }

  QTENSOR_INLINE void run() {
    for (int g = 0; g < 4; g++) group[g] = t.weight + t.row_begin * t.row_bytes + 4 * g * stride;
    int64_t left = part_rows * t.blocks;  // of a part, whose rows are adjacent
    for (int g = 0; g < 4; g++) {
      Planes::headers(blocks(g, 0), *now, 4 * g);
      for_four([&](auto part) __attribute__((always_inline)) {
        Planes::template values<decltype(part)::value>(blocks(g, 0), *now, scratch.planes[0], 4 * g);
      });
      if (left > 1) Planes::headers(blocks(g, Planes::bytes), *next, 4 * g);
    }
    for (; left > 2; left--) one_block<true>(true);
    for (; left > 0; left--) one_block<false>(left > 1);
    for (int r = 0; r < 16; r++)
      float_step<Planes, TILES % 2 == 1 ? 1 : 2, kSmallMRowStride, kSmallMTileStride, 1>(epilogue, r);
    for (int j = 0; j < TILES; j++) write_out(j);
  }

  void write_out(int j) {
    const int64_t count = t.m - 16 * j < 16 ? t.m - 16 * j : 16;
    float* y = t.y + 16 * j * t.y_stride + t.row_begin;
    const float* part = scratch.acc + j * kSmallMTileStride;
    int64_t row = 0;
    for (int64_t first = 0; first < part_rows; first++, y += 16) {
      const float* rows[16];
      for (int i = 0; i < 16; i++) {
        rows[i] = part + 16 * row;
        if (++row < part_rows) continue;
        row = 0;
        part += kSmallMRowStride;
      }
      store_transposed([&](int64_t i) { return rows[i]; }, y, t.y_stride, count, t.past_cache);
    }
  }
};

template <class Planes>
void small_m(const TileTask& t) {
  auto& scratch = *reinterpret_cast<SmallMScratch*>(t.scratch);
  for (RowHeaders& headers : scratch.headers) headers.begin();
  configure_tiles();
  TileTask n_tile = t;
  for (int64_t row = t.row_begin; row < t.row_end; row = n_tile.row_end) {
    n_tile.row_begin = row;
    n_tile.row_end = t.row_end - row < 16 * kSmallMPartRows ? t.row_end : row + 16 * kSmallMPartRows;
    switch ((t.m + 15) / 16) {
      case 1:
        SmallM<Planes, 1>{n_tile, scratch}.run();
        break;
      case 2:
        SmallM<Planes, 2>{n_tile, scratch}.run();
        break;
      case 3:
        SmallM<Planes, 3>{n_tile, scratch}.run();
        break;
      default:
        SmallM<Planes, kSmallMTiles>{n_tile, scratch}.run();
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace qtensor
