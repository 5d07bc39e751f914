// Many columns without AMX: sixteen activation columns lie in the lanes of a vector, a weight's bytes are broadcast to
// all of them. Each column's sum grows in its own lane, so nothing is ever folded. row_blocks.h
// of the instruction set has RowBlocks, kTileRows rows of a 256-block unpacked for broadcasting, and for each format
// Rows::unpack(place, to), which makes them; its column_tiles.h gives Columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "row_blocks.h"

namespace qtensor {
namespace {

// Sixteen columns of one 256-block.
struct PackedColumns {
  int8_t q[64][16][4];       // [k / 4][column][k % 4]
  int16_t sums16[8][16][2];  // [pair of groups of 16][column][group]
  int16_t sums32[4][16][2];  // [pair of sub-blocks][column][sub-block]
  float d[16];
};
static_assert(sizeof(PackedColumns) == 4928 && sizeof(PackedColumns) % 64 == 0);

inline int32_t dword_at(const void* from, int index) {
  int32_t value;
  __builtin_memcpy(&value, (const uint8_t*)from + 4 * index, 4);
  return value;
}

// What Columns gives. Packed: PackedColumns and whatever else it wants to find beside the columns; how up to sixteen
// columns lie in it is for Columns alone to know.
// pack(x, blocks, columns, count, out): one block of `count` columns of all, which are `blocks` apart; zeros beside
// them. block<Rows, GROUPS, TILES>(rows, packed, acc) makes acc[GROUPS * kTileRows][16] = fma(f, d of the column, acc)
// for each of up to most_tiles tiles, kTileFloats apart. few_columns<Rows>(rows, packed, columns, acc, ahead): the same
// for two groups and up to sixteen columns, while it asks for what comes later. store_panel(acc, y, y_stride, columns,
// count): sixteen rows of a tile's `count` columns.
constexpr int kPanelGroups = 16 / kTileRows, kTileFloats = 256;

template <class Columns>
inline void pack_columns(const PackTask& t, int64_t tile, int64_t block) {
  const int64_t first = 16 * tile, tiles = (t.columns + 15) / 16, left = t.columns - first,
                count = left < 16 ? left : 16;
  Columns::pack(t.x + first * t.blocks + block, t.blocks, t.columns, count,
                reinterpret_cast<typename Columns::Packed*>(t.packed)[block * tiles + tile]);
}

// Tiles [first, first + count) of the columns.
struct TileRange {
  int64_t first, count;
};

template <class Rows>
QTENSOR_INLINE void unpack_group(const TileTask& t, int64_t row, int64_t block, RowBlocks& to) {
  const uint8_t* place[kTileRows];
  for (int r = 0; r < kTileRows; r++) place[r] = t.weight + (row + r) * t.row_bytes + block * Rows::bytes;
  Rows::unpack(place, to);
}

// A panel of sixteen rows, as many as a cache line of the result has, goes through every block of several tiles of
// columns. acc: [column tile][group][row][column].
template <class Columns, class Rows>
inline void column_panel(const TileTask& t, TileRange range, int64_t row, RowBlocks* rows, float* acc) {
  const int64_t every = (t.columns + 15) / 16, tiles = range.count;
  __builtin_memset(acc, 0, size_t(tiles * kTileFloats) * sizeof(float));
  AheadInOrder ahead(t.weight + row * t.row_bytes, 16, t.row_bytes);
  for (int64_t b = 0; b < t.blocks; b++) {
    for (int g = 0; g < kPanelGroups; g++) {
      ahead.ask(kTileRows * Rows::bytes);
      unpack_group<Rows>(t, row + g * kTileRows, b, rows[g]);
    }
    const auto* packed = reinterpret_cast<const typename Columns::Packed*>(t.packed) + b * every + range.first;
    int64_t tile = 0;
    const auto group = [&](int g) { return acc + tile * kTileFloats + g * kTileRows * 16; };
    if constexpr (Columns::most_tiles >= 3)
      for (; tile + 3 <= tiles && tile + 4 != tiles; tile += 3)  // 4 are 2 and 2
        for (int g = 0; g < kPanelGroups; g++) Columns::template block<Rows, 1, 3>(rows + g, packed + tile, group(g));
    for (; tile + 2 <= tiles; tile += 2)
      for (int g = 0; g < kPanelGroups; g++) Columns::template block<Rows, 1, 2>(rows + g, packed + tile, group(g));
    if (tile == tiles) continue;
    for (int g = 0; g < kPanelGroups; g += 2) Columns::template block<Rows, 2, 1>(rows + g, packed + tile, group(g));
  }
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t at = 16 * (range.first + tile), count = t.columns - at < 16 ? t.columns - at : 16;
    Columns::store_panel(acc + tile * kTileFloats, t.y + at * t.y_stride + row, t.y_stride, t.columns, count);
  }
}

// The same for no more than sixteen columns. The unpacking of two groups runs beside the products of those before.
template <class Columns, class Rows, int PANELS>
inline void few_columns_panel(const TileTask& t, int64_t row, RowBlocks* rows, float* acc) {
  __builtin_memset(acc, 0, PANELS * kTileFloats * sizeof(float));
  AheadInOrder ahead(t.weight + row * t.row_bytes, 16 * PANELS, t.row_bytes);
  const auto* packed = reinterpret_cast<const typename Columns::Packed*>(t.packed);
  for (int64_t b = 0; b < t.blocks; b++)
    for (int g = 0; g < PANELS * kPanelGroups; g += 2) {
      RowBlocks* const two = rows + g % kPanelGroups;
      unpack_group<Rows>(t, row + g * kTileRows, b, two[0]);
      unpack_group<Rows>(t, row + (g + 1) * kTileRows, b, two[1]);
      Columns::template few_columns<Rows>(two, packed + b, t.columns, acc + g * kTileRows * 16, ahead);
    }
  for (int p = 0; p < PANELS; p++)
    Columns::store_panel(acc + p * kTileFloats, t.y + row + 16 * p, t.y_stride, t.columns, t.columns);
}

// Of many columns only so many are taken at once as the second cache holds: every panel of rows reads them all.
constexpr int64_t kColumnCache = int64_t(768) << 10;
constexpr int kFewPanels = 2;  // whose rows share a reading of few columns
template <class Columns, class Rows>
inline void matmul_columns(const TileTask& t) {
  auto* rows = reinterpret_cast<RowBlocks*>(t.scratch);
  auto* acc = reinterpret_cast<float*>(rows + kPanelGroups);
  const int64_t tiles = (t.columns + 15) / 16;
  if (tiles == 1) {
    int64_t row = t.row_begin;
    for (; row + 16 * kFewPanels <= t.row_end; row += 16 * kFewPanels)
      few_columns_panel<Columns, Rows, kFewPanels>(t, row, rows, acc);
    for (; row < t.row_end; row += 16) few_columns_panel<Columns, Rows, 1>(t, row, rows, acc);
    return;
  }
  const int64_t fit = kColumnCache / (t.blocks * Columns::template tile_bytes<Rows>) / 6 * 6;
  const int64_t most = fit < 6 ? 6 : fit;
  for (int64_t first = 0; first < tiles; first += most)
    for (int64_t row = t.row_begin; row < t.row_end; row += 16)
      column_panel<Columns, Rows>(t, {first, tiles - first < most ? tiles - first : most}, row, rows, acc);
}

int64_t tile_scratch_bytes(int64_t columns) {
  const int64_t panels = columns <= 16 ? kFewPanels : (columns + 15) / 16;
  return kPanelGroups * int64_t(sizeof(RowBlocks)) + panels * kTileFloats * int64_t(sizeof(float));
}

}  // namespace
}  // namespace qtensor
