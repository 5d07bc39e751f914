// Large M with AMX: N tiles, which consist of weight tiles, are multiplied block by block. See weights_as_a.h for the
// operands.
//
// One step is 16 rows x 32 batch rows x one 256-block: 16 integer and 2 bfloat16 tile products. The float step of an
// earlier step runs between them, from a scratch copy of its tiles.
//
// The eight weight tiles of an N tile are multiplied with a block before the next block begins, so that the activations
// of a block are read from L3 once for all of them. Two of the eight are unpacked at a time, because two fit in L1.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/tile_step.h"
#include "kernels/amx/tiles.h"
#include "kernels/amx/weights_as_a.h"
#include "kernels/avx512/transpose.h"

namespace qtensor {
namespace {

constexpr int kNTileTiles = 8, kGroupTiles = 2;

struct WeightTile : RowPlanes, RowHeaders {};
struct LargeMScratch {
  WeightTile group[kGroupTiles];
  StepSums sums[2];
  // followed by the sums so far: n_tile_product's acc
};

// The step of a last M tile that has no second one.
template <class Planes>
inline void single_step(const WeightTile& rows, PackedTiles x, StepSums& sums) {
  before_tile_loads();
  _tile_zero(0);
  _tile_zero(2);
  for (int part = 0; part < 4; part++) {
    _tile_loadd(4, rows.high[part], 64);
    _tile_loadd(6, x.values->q[part], 64);
    _tile_loadd(5, rows.low[part], 64);
    QTENSOR_HIGH_PRODUCT(0, 4, 6);
    _tile_dpbusd(2, 5, 6);
  }
  store_sums<Planes, 1>(rows, x.sums, sums);
  before_tile_loads();
}

// One of many steps. The integer tiles of the previous step are stored while this step's first products run, so that
// the stores do not wait for its last products. Its float step follows in shade(1) to shade(3) and in the next step's
// shade(0). The mins of the two M tiles use tile 7 one after the other. Speed depends on few accesses to L1.
template <class Planes, class Shade>
inline __attribute__((always_inline)) void weight_tile_step(const WeightTile& rows, PackedTiles x, StepSums* before,
                                                            float (*mins)[16][16], Shade shade) {
  const auto begin_mins = [&](const PackedSums& tile_sums) __attribute__((always_inline)) {
    _tile_zero(7);
    _tile_loadd(4, rows.mins, 64);
    _tile_loadd(5, tile_sums.mins, 64);
    _tile_dpbf16ps(7, 4, 5);
  };
  before_tile_loads();
  if (Planes::has_min) begin_mins(x.sums[0]);
  shade(0);
  before_tile_loads();
  if (before != nullptr) {
    _tile_stored(0, before->high[0], 64);
    _tile_stored(1, before->high[1], 64);
  }
  _tile_zero(0);
  _tile_zero(1);
#pragma GCC unroll 4
  for (int part = 0; part < 4; part++) {
    _tile_loadd(4, rows.high[part], 64);
    _tile_loadd(5, x.values[0].q[part], 64);
    _tile_loadd(6, x.values[1].q[part], 64);
    QTENSOR_HIGH_PRODUCT(0, 4, 5);
    QTENSOR_HIGH_PRODUCT(1, 4, 6);
    if (part == 0) {
      if (before != nullptr) {
        _tile_stored(2, before->low[0], 64);
        _tile_stored(3, before->low[1], 64);
      }
      before_tile_loads();  // gcc also does not know that tile stores write memory
      _tile_zero(2);
      _tile_zero(3);
    }
    _tile_loadd(4, rows.low[part], 64);
    _tile_dpbusd(2, 4, 5);
    _tile_dpbusd(3, 4, 6);
    if (Planes::has_min && part == 1) {
      _tile_stored(7, mins[0], 64);
      begin_mins(x.sums[1]);
    }
    if (part > 0) shade(part);
  }
  if (Planes::has_min) _tile_stored(7, mins[1], 64);
}

// Unpacks one block of sixteen rows; the first row is at `weight`.
template <class Planes>
inline void unpack_rows(const uint8_t* weight, int64_t row_bytes, WeightTile& to) {
  for (int row = 0; row < 16; row += 4) {
    const FourBlocks blocks = {weight + row * row_bytes, row_bytes, 3 * row_bytes};
    Planes::headers(blocks, to, row);
    for_four([&](auto part) __attribute__((always_inline)) {
      Planes::template values<decltype(part)::value>(blocks, to, to, row);
    });
  }
}

// Multiplies each pair of M tiles with one weight tile after the other, then executes the last epilogue.
// at: [pair][weight tile][M tile][16 rows][16 batch rows]. `between` is called once per step.
template <class Planes, class Between>
inline __attribute__((always_inline)) void group_product(const WeightTile* group, int count, PackedTiles x,
                                                         int64_t pairs, __mmask16 seen, StepSums* sums, float* at,
                                                         Between between) {
  Epilogue epilogue, last;
  int turn = 0;  // mins need two buffers; integer sums are read before the next ones are stored
  for (int64_t j = 0; j < pairs; j++)
    for (int tile = 0; tile < count; tile++, turn ^= 1, at += 512) {
      between();
      weight_tile_step<Planes>(group[tile], x + 2 * j, last.sums == nullptr ? nullptr : sums, sums[turn].mins,
                               [&](int part) __attribute__((always_inline)) {
                                 if (epilogue.sums != nullptr) float_step<Planes, 2>(epilogue, (4 * part + 12) % 16);
                                 if (part == 0) epilogue = last;
                               });
      last = {sums, sums[turn].mins, group + tile, (x + 2 * j).sums, at, seen};
    }
  if (epilogue.sums != nullptr) float_step<Planes, 2>(epilogue, 12);
  _tile_stored(0, sums->high[0], 64);
  _tile_stored(1, sums->high[1], 64);
  _tile_stored(2, sums->low[0], 64);
  _tile_stored(3, sums->low[1], 64);
  before_tile_loads();
  for (int from = 0; from < 16; from += 4) float_step<Planes, 2>(last, from);
}

// Multiplies the weight tiles of one N tile, block by block and group by group.
// acc: [group][pair][weight tile][M tile][16][16].
template <class Planes>
inline void n_tile_product(const TileTask& t, int64_t row, int weight_tiles, WeightTile* group, StepSums* sums,
                           float* acc) {
  const int64_t tiles = (t.m + 15) / 16, pairs = tiles / 2, rounded = (tiles + 1) / 2;
  for (int64_t b = 0; b < t.blocks; b++) {
    const PackedTiles x = packed_tiles(t.packed, t.blocks, tiles, b);
    const __mmask16 seen = b == 0 ? 0 : 0xffff;
    // prefetch the weights of the block after the next one, or of the next N tile, a few rows per step
    const int64_t later = b + 2 < t.blocks ? 0 : 16 * weight_tiles, block = b + 2 - (later > 0 ? t.blocks : 0);
    const uint8_t* asked = t.weight + (row + later) * t.row_bytes + block * Planes::bytes;
    int64_t share = 0;
    const auto ask = [&]() __attribute__((always_inline)) {
      for (share += 16; share >= pairs; share -= pairs, asked += t.row_bytes)
        for (int64_t i = 0; i < Planes::bytes + 63; i += 64) _mm_prefetch((const char*)(asked + i), _MM_HINT_T1);
    };
    for (int first = 0; first < weight_tiles; first += kGroupTiles) {
      const int count = weight_tiles - first < kGroupTiles ? weight_tiles - first : kGroupTiles;
      for (int tile = 0; tile < count; tile++)
        unpack_rows<Planes>(t.weight + (row + 16 * (first + tile)) * t.row_bytes + b * Planes::bytes, t.row_bytes,
                            group[tile]);
      float* const mine = acc + first * rounded * 512;
      group_product<Planes>(group, count, x, pairs, seen, sums, mine, ask);
      if (pairs < rounded)
        for (int tile = 0; tile < count; tile++) {
          single_step<Planes>(group[tile], x + (tiles - 1), *sums);
          const Epilogue epilogue = {
              sums, sums->mins, group + tile, (x + (tiles - 1)).sums, mine + (pairs * count + tile) * 512, seen};
          for (int from = 0; from < 16; from += 4) float_step<Planes, 1>(epilogue, from);
        }
      if (b + 1 < t.blocks) continue;
      for (int64_t j = 0; j < tiles; j++)
        for (int tile = 0; tile < count; tile++) {
          const int64_t left = t.m - 16 * j;
          const float* const from = mine + (j / 2 * count + tile) * 512 + j % 2 * 256;
          store_transposed([&](int64_t i) { return from + 16 * i; },
                           t.y + 16 * j * t.y_stride + row + 16 * (first + tile), t.y_stride, left < 16 ? left : 16,
                           t.past_cache);
        }
    }
  }
}

template <class Planes>
void large_m(const TileTask& t) {
  auto& scratch = *reinterpret_cast<LargeMScratch*>(t.scratch);
  for (WeightTile& rows : scratch.group) rows.begin();
  configure_tiles();
  for (int64_t row = t.row_begin; row < t.row_end; row += 16 * kNTileTiles) {
    const int64_t rows = t.row_end - row < 16 * kNTileTiles ? t.row_end - row : 16 * kNTileTiles;
    n_tile_product<Planes>(t, row, int(rows / 16), scratch.group, scratch.sums, reinterpret_cast<float*>(&scratch + 1));
  }
  if (t.past_cache) _mm_sfence();
  _tile_release();
}

}  // namespace
}  // namespace qtensor
