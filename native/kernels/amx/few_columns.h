// Up to 64 columns (several sequences at once) of the formats without mins, with AMX: unpacking takes as long as the
// products, so both go on together. left_columns.h is the better way for the others.
//
// The sixteen rows of a tile come from sixteen equal parts of a panel, a row of each, then the next row of each. So
// memory is read in sixteen places at a time, each in order, and asked for shortly before its turn, into the first
// cache: see reads_quarters in kernels/x86/rows.h.
//
// Between the tile instructions of a pair of column tiles lie sixteen gaps, four for each 64 values (a part). They hold
// a row each of the float step before, the values of the next block by four rows of a part, and now and then the
// headers of the block after that. With one pair a part is unpacked to where the tiles read it one part earlier, the
// last part of the block at hand beside its own first part: so there is one set of planes, and more of L1 is left for
// the activations. With two pairs every part is read twice, and there are two sets. Rows come in sixteens.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/row_planes.h"
#include "kernels/amx/tile_step.h"
#include "kernels/amx/tiles.h"
#include "kernels/avx512/columns.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

constexpr int64_t kBlocksAhead = 3;
constexpr int kFewTiles = 4, kFewColumns = 16 * kFewTiles, kFewPartRows = 8;
constexpr int64_t kFewRowsApart = 16 * kFewPartRows,
                  kFewTilesApart = 16 * kFewRowsApart;  // in acc: [part][row][column]

struct FewScratch {
  RowPlanes planes[2];
  RowHeaders headers[3];
  StepSums sums;
  alignas(64) float acc[kFewTiles * kFewTilesApart];
};

template <class Planes, int TILES>
struct FewColumns {
  static constexpr int kSteps = (TILES + 1) / 2;

  const TileTask& t;
  FewScratch& scratch;
  const int64_t part_rows = (t.row_end - t.row_begin) / 16;
  const int64_t apart = part_rows * t.row_bytes, apart3 = 3 * apart;
  const uint8_t* group[4];  // where the block at hand begins in parts 0, 4, 8 and 12
  const uint8_t* const part_end = t.weight + t.row_begin * t.row_bytes + apart;
  RowHeaders *before = scratch.headers, *now = scratch.headers + 1, *next = scratch.headers + 2;
  int item = 0;
  int64_t block = 0;
  float* acc = scratch.acc;
  Pending due;

  QTENSOR_INLINE FourBlocks blocks(int g, int64_t later) const { return {group[g] + later, apart, apart3}; }

  // Headers of the block after the next one take the place of those of the block before, four rows behind its floats.
  template <int STEP, int PART, int GAP, bool MORE>
  QTENSOR_INLINE void gap(const uint8_t*& asked, bool has_next, RowPlanes& mine, RowPlanes& other) {
    constexpr int kDueTiles = TILES % 2 == 1 && STEP == 0 ? 1 : 2;
    if (due.sums != nullptr) float_step<Planes, kDueTiles, kFewRowsApart, kFewTilesApart, 1>(due, 4 * PART + GAP);
    if (MORE && STEP == 0 && GAP == 3) Planes::headers(blocks(PART, 2 * Planes::bytes), *before, 4 * PART);
    if (GAP % kSteps == 0) {
      for (int64_t i = 0; i < Planes::bytes; i += 64) _mm_prefetch((const char*)(asked + i), _MM_HINT_T0);
      asked += apart;
    }
    if constexpr (kSteps == 1) {
      if (PART == 0)
        Planes::template values<3>(blocks(GAP, 0), *now, mine, 4 * GAP);
      else if (has_next)
        Planes::template values<(PART + 3) % 4>(blocks(GAP, Planes::bytes), *next, mine, 4 * GAP);
    } else if constexpr (GAP % 2 == 1) {
      constexpr int half_part = 4 * STEP + PART, g = 2 * (half_part % 2) + GAP / 2;
      if (has_next) Planes::template values<half_part / 2>(blocks(g, Planes::bytes), *next, other, 4 * g);
    }
    before_tile_loads();
  }

  template <int STEP, bool MORE>
  QTENSOR_INLINE void step(bool has_next) {
    constexpr int kColumnTiles = 2 * STEP + 2 <= TILES ? 2 : 1;
    RowPlanes &mine = scratch.planes[kSteps == 1 ? 0 : item], &other = scratch.planes[kSteps == 1 ? 0 : item ^ 1];
    const PackedTiles columns = packed_tiles(t.packed, t.blocks, TILES, block) + 2 * STEP;
    const uint8_t* asked = group[0] + kBlocksAhead * Planes::bytes;
    if (asked >= part_end) asked += 15 * apart;  // behind a part's end the same part of the next panel follows
    if (STEP == 1) asked += 8 * apart;
    before_tile_loads();
    _tile_zero(0);
    _tile_zero(2);
    if (kColumnTiles == 2) {
      _tile_zero(1);
      _tile_zero(3);
    }
    for_four([&](auto number) __attribute__((always_inline)) {
      constexpr int part = decltype(number)::value;
      _tile_loadd(4, mine.high[part], 64);
      _tile_loadd(6, columns.values[0].q[part], 64);
      gap<STEP, part, 0, MORE>(asked, has_next, mine, other);
      _tile_loadd(5, mine.low[part], 64);
      QTENSOR_HIGH_PRODUCT(0, 4, 6);
      gap<STEP, part, 1, MORE>(asked, has_next, mine, other);
      if (kColumnTiles == 2) _tile_loadd(7, columns.values[1].q[part], 64);
      _tile_dpbusd(2, 5, 6);
      gap<STEP, part, 2, MORE>(asked, has_next, mine, other);
      if (kColumnTiles == 2) {
        QTENSOR_HIGH_PRODUCT(1, 4, 7);
        _tile_dpbusd(3, 5, 7);
      }
      gap<STEP, part, 3, MORE>(asked, has_next, mine, other);
    });
    store_sums<Planes, kColumnTiles>(*now, columns.sums, scratch.sums);
    before_tile_loads();
    const __mmask16 seen = block == 0 ? 0 : 0xffff;
    due = {&scratch.sums, scratch.sums.mins, now, columns.sums, acc + 2 * STEP * kFewTilesApart, seen};
  }

  // MORE: two blocks of the part follow.
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
    for (int g = 0; g < 4; g++) group[g] = t.weight + t.row_begin * t.row_bytes + 4 * g * apart;
    int64_t left = part_rows * t.blocks;  // of a part, whose rows lie one after another
    for (int g = 0; g < 4; g++) {
      Planes::headers(blocks(g, 0), *now, 4 * g);
      for_four([&](auto part) __attribute__((always_inline)) {
        Planes::template values<decltype(part)::value>(blocks(g, 0), *now, scratch.planes[0], 4 * g);
      });
      if (left > 1) Planes::headers(blocks(g, Planes::bytes), *next, 4 * g);
    }
    for (; left > 2; left--) one_block<true>(true);
    for (; left > 0; left--) one_block<false>(left > 1);
    for (int r = 0; r < 16; r++) float_step<Planes, TILES % 2 == 1 ? 1 : 2, kFewRowsApart, kFewTilesApart, 1>(due, r);
    for (int c = 0; c < TILES; c++) write_out(c);
  }

  void write_out(int c) {
    const int64_t columns = t.columns - 16 * c < 16 ? t.columns - 16 * c : 16;
    float* y = t.y + 16 * c * t.y_stride + t.row_begin;
    const float* part = scratch.acc + c * kFewTilesApart;
    int64_t row = 0;
    for (int64_t first = 0; first < part_rows; first++, y += 16) {
      const float* rows[16];
      for (int i = 0; i < 16; i++) {
        rows[i] = part + 16 * row;
        if (++row < part_rows) continue;
        row = 0;
        part += kFewRowsApart;
      }
      store_columns([&](int64_t i) { return rows[i]; }, y, t.y_stride, columns, t.past_cache);
    }
  }
};

template <class Planes>
void few_columns(const TileTask& t) {
  auto& scratch = *reinterpret_cast<FewScratch*>(t.scratch);
  for (RowHeaders& headers : scratch.headers) headers.begin();
  configure_tiles();
  TileTask panel = t;
  for (int64_t row = t.row_begin; row < t.row_end; row = panel.row_end) {
    panel.row_begin = row;
    panel.row_end = t.row_end - row < 16 * kFewPartRows ? t.row_end : row + 16 * kFewPartRows;
    switch ((t.columns + 15) / 16) {
      case 1:
        FewColumns<Planes, 1>{panel, scratch}.run();
        break;
      case 2:
        FewColumns<Planes, 2>{panel, scratch}.run();
        break;
      case 3:
        FewColumns<Planes, 3>{panel, scratch}.run();
        break;
      default:
        FewColumns<Planes, kFewTiles>{panel, scratch}.run();
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace qtensor
