// One step of tiles: 16 rows with one or two column tiles over one 256-block, and the floats that are due after it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/amx/row_planes.h"

namespace qtensor {
namespace {

// The tiles of one step, as they were stored: [column tile][row][column].
struct alignas(64) StepSums {
  int32_t high[2][16][16];
  int32_t low[2][16][16];
  float mins[2][16][16];
};

// A step whose tiles are stored but whose floats are still due.
struct Pending {
  const StepSums* sums = nullptr;
  const float (*mins)[16][16] = nullptr;
  const RowHeaders* rows = nullptr;
  const PackedSums* columns = nullptr;
  float* acc = nullptr;     // [column tile][row][column]
  __mmask16 seen = 0xffff;  // nothing is in acc yet: zero. A mask instead of a branch
};

// The float step for rows [from, from + ROWS) of a finished step of COLUMN_TILES tiles. In acc rows and column tiles
// are so many floats apart.
template <class Planes, int COLUMN_TILES, int64_t ROWS_APART = 16, int64_t TILES_APART = 256, int ROWS = 4>
inline __attribute__((always_inline)) void float_step(const Pending& due, int from) {
  __m512 dx[COLUMN_TILES];
  for (int t = 0; t < COLUMN_TILES; t++) dx[t] = _mm512_load_ps(due.columns[t].d);
#pragma GCC unroll 4
  for (int r = from; r < from + ROWS; r++) {
    const __m512 d = _mm512_set1_ps(due.rows->d[r]);
    for (int t = 0; t < COLUMN_TILES; t++) {
      const __m512i high = _mm512_load_si512(due.sums->high[t][r]), low = _mm512_load_si512(due.sums->low[t][r]);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, Planes::shift), low);
      __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), d);
      if (Planes::has_min) f = _mm512_fnmadd_ps(_mm512_load_ps(due.mins[t][r]), _mm512_set1_ps(due.rows->dmin[r]), f);
      float* at = due.acc + t * TILES_APART + r * ROWS_APART;
      _mm512_store_ps(at, _mm512_fmadd_ps(f, dx[t], _mm512_maskz_load_ps(due.seen, at)));
    }
  }
}

#define QTENSOR_HIGH_PRODUCT(acc, a, b) \
  do {                                  \
    if (Planes::is_signed)              \
      _tile_dpbssd(acc, a, b);          \
    else                                \
      _tile_dpbusd(acc, a, b);          \
  } while (0)

template <class Planes, int COLUMN_TILES>
inline
    __attribute__((always_inline)) void store_sums(const RowHeaders& rows, const PackedSums* columns, StepSums& sums) {
  _tile_stored(0, sums.high[0], 64);
  _tile_stored(2, sums.low[0], 64);
  if (COLUMN_TILES == 2) {
    _tile_stored(1, sums.high[1], 64);
    _tile_stored(3, sums.low[1], 64);
  }
  if (Planes::has_min) {
    _tile_zero(0);
    _tile_loadd(4, rows.mins, 64);
    _tile_loadd(6, columns[0].mins, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (COLUMN_TILES == 2) {
      _tile_zero(1);
      _tile_loadd(7, columns[1].mins, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stored(1, sums.mins[1], 64);
    }
    _tile_stored(0, sums.mins[0], 64);
  }
}

}  // namespace
}  // namespace qtensor
