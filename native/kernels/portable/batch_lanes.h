// Large M without AMX: sixteen batch rows are the lanes of a vector, and a weight's bytes are broadcast to all of them.
// Each batch row's sum grows in its own lane, so there is no horizontal reduction. The instruction set's row_blocks.h
// defines RowBlocks, which is kTileRows rows of a 256-block, unpacked for broadcasting. Each format has
// Rows::unpack(place, to), which unpacks rows to Rows::Unpacked. The instruction set's batch_lanes.h defines Lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "row_blocks.h"

namespace qtensor {
namespace {

// Sixteen batch rows of one 256-block.
struct PackedBatch {
  int8_t q[64][16][4];       // [k / 4][batch row][k % 4]
  int16_t sums16[8][16][2];  // [pair of groups of 16][batch row][group]
  int16_t sums32[4][16][2];  // [pair of sub-blocks][batch row][sub-block]
  float d[16];
};
static_assert(sizeof(PackedBatch) == 4928 && sizeof(PackedBatch) % 64 == 0);

inline int32_t dword_at(const void* from, int index) {
  int32_t value;
  __builtin_memcpy(&value, (const uint8_t*)from + 4 * index, 4);
  return value;
}

// Members of Lanes:
// - Packed: PackedBatch, possibly with additional data. Only Lanes depends on the order of batch rows in it.
// - pack(x, blocks, m, count, out) packs one block of `count` of the m batch rows, which are `blocks` blocks apart, and
//   fills the other lanes with zeros.
// - block<Rows, GROUPS, TILES>(rows, packed, acc) computes acc[GROUPS * kTileRows][16] = fma(f, d of the batch row,
//   acc) for each of up to most_tiles tiles, which are kTileFloats apart.
// - small_m<Rows>(rows, packed, m, acc, ahead) does the same for two groups and up to sixteen batch rows, and
//   prefetches.
// - store_n_tile(acc, y, y_stride, m, count) stores sixteen rows of a tile's `count` batch rows.
constexpr int kNTileGroups = 16 / kTileRows, kTileFloats = 256;

template <class Lanes, class Block>
inline void pack_batch(const PackTask& t, const Block* x, int64_t tile, int64_t block) {
  const int64_t first = 16 * tile, tiles = (t.m + 15) / 16, left = t.m - first, count = left < 16 ? left : 16;
  Lanes::pack(x + first * t.blocks + block, t.blocks, t.m, count,
              reinterpret_cast<typename Lanes::Packed*>(t.packed)[block * tiles + tile]);
}

template <class Lanes>
int64_t packed_bytes(int64_t blocks, int64_t m) {
  return (m + 15) / 16 * blocks * int64_t(sizeof(typename Lanes::Packed));
}
template <class Lanes>
constexpr TilePacking kPacked{packed_bytes<Lanes>, [](const PackTask& t, int64_t tile, int64_t block) {
                                pack_batch<Lanes>(t, t.x, tile, block);
                              }};
template <class Lanes>
constexpr TilePacking kPacked32{packed_bytes<Lanes>, [](const PackTask& t, int64_t tile, int64_t block) {
                                  pack_batch<Lanes>(t, t.x_32, tile, block);
                                }};

// Tiles [first, first + count) of the batch rows.
struct TileRange {
  int64_t first, count;
};

template <class Rows>
QTENSOR_INLINE void unpack_group(const TileTask& t, int64_t row, int64_t block, typename Rows::Unpacked& to) {
  const uint8_t* place[kTileRows];
  for (int r = 0; r < kTileRows; r++) place[r] = t.weight + (row + r) * t.row_bytes + block * Rows::bytes;
  Rows::unpack(place, to);
}

// Multiplies an N tile of sixteen rows, which are a cache line of the result, with several tiles of batch rows, block
// by block. acc: [M tile][group][row][batch row].
template <class Lanes, class Rows>
inline void n_tile_product(const TileTask& t, TileRange range, int64_t row, typename Rows::Unpacked* rows, float* acc) {
  const int64_t every = (t.m + 15) / 16, tiles = range.count;
  __builtin_memset(acc, 0, size_t(tiles * kTileFloats) * sizeof(float));
  AheadInOrder ahead(t.weight + row * t.row_bytes, 16, t.row_bytes);
  for (int64_t b = 0; b < t.blocks; b++) {
    for (int g = 0; g < kNTileGroups; g++) {
      ahead.ask(kTileRows * Rows::bytes);
      unpack_group<Rows>(t, row + g * kTileRows, b, rows[g]);
    }
    const auto* packed = reinterpret_cast<const typename Lanes::Packed*>(t.packed) + b * every + range.first;
    int64_t tile = 0;
    const auto group = [&](int g) { return acc + tile * kTileFloats + g * kTileRows * 16; };
    if constexpr (Lanes::most_tiles >= 3)
      for (; tile + 3 <= tiles && tile + 4 != tiles; tile += 3)  // four tiles are processed as two and two
        for (int g = 0; g < kNTileGroups; g++) Lanes::template block<Rows, 1, 3>(rows + g, packed + tile, group(g));
    for (; tile + 2 <= tiles; tile += 2)
      for (int g = 0; g < kNTileGroups; g++) Lanes::template block<Rows, 1, 2>(rows + g, packed + tile, group(g));
    if (tile == tiles) continue;
    for (int g = 0; g < kNTileGroups; g += 2) Lanes::template block<Rows, 2, 1>(rows + g, packed + tile, group(g));
  }
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t at = 16 * (range.first + tile), count = t.m - at < 16 ? t.m - at : 16;
    Lanes::store_n_tile(acc + tile * kTileFloats, t.y + at * t.y_stride + row, t.y_stride, t.m, count);
  }
}

// The same for up to sixteen batch rows. Two groups at a time are unpacked, which overlaps with the products of the
// groups before them.
template <class Lanes, class Rows, int N_TILES>
inline void n_tiles_small_m(const TileTask& t, int64_t row, typename Rows::Unpacked* rows, float* acc) {
  __builtin_memset(acc, 0, N_TILES * kTileFloats * sizeof(float));
  AheadInOrder ahead(t.weight + row * t.row_bytes, 16 * N_TILES, t.row_bytes);
  const auto* packed = reinterpret_cast<const typename Lanes::Packed*>(t.packed);
  for (int64_t b = 0; b < t.blocks; b++)
    for (int g = 0; g < N_TILES * kNTileGroups; g += 2) {
      auto* const two = rows + g % kNTileGroups;
      unpack_group<Rows>(t, row + g * kTileRows, b, two[0]);
      unpack_group<Rows>(t, row + (g + 1) * kTileRows, b, two[1]);
      Lanes::template small_m<Rows>(two, packed + b, t.m, acc + g * kTileRows * 16, ahead);
    }
  for (int p = 0; p < N_TILES; p++)
    Lanes::store_n_tile(acc + p * kTileFloats, t.y + row + 16 * p, t.y_stride, t.m, t.m);
}

// The part of a large batch that is processed at a time must fit in L2, because each N tile of rows reads all of it.
constexpr int64_t kBatchCache = int64_t(768) << 10;
constexpr int kSmallMNTiles = 2;  // N tiles that share a read of few batch rows
template <class Lanes, class Rows>
inline void matmul_batch_lanes(const TileTask& t) {
  auto* rows = reinterpret_cast<typename Rows::Unpacked*>(t.scratch);
  auto* acc = reinterpret_cast<float*>(rows + kNTileGroups);
  const int64_t tiles = (t.m + 15) / 16;
  if (tiles == 1) {
    int64_t row = t.row_begin;
    for (; row + 16 * kSmallMNTiles <= t.row_end; row += 16 * kSmallMNTiles)
      n_tiles_small_m<Lanes, Rows, kSmallMNTiles>(t, row, rows, acc);
    for (; row < t.row_end; row += 16) n_tiles_small_m<Lanes, Rows, 1>(t, row, rows, acc);
    return;
  }
  const int64_t fit = kBatchCache / (t.blocks * Lanes::template tile_bytes<Rows>) / 6 * 6;
  const int64_t most = fit < 6 ? 6 : fit;
  for (int64_t first = 0; first < tiles; first += most)
    for (int64_t row = t.row_begin; row < t.row_end; row += 16)
      n_tile_product<Lanes, Rows>(t, {first, tiles - first < most ? tiles - first : most}, row, rows, acc);
}

template <class Unpacked>
inline int64_t lanes_scratch_bytes(int64_t m) {
  const int64_t n_tiles = m <= 16 ? kSmallMNTiles : (m + 15) / 16;
  return kNTileGroups * int64_t(sizeof(Unpacked)) + n_tiles * kTileFloats * int64_t(sizeof(float));
}

}  // namespace
}  // namespace qtensor
