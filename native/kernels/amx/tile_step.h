// One step of tiles: 16 rows with one or two M tiles over one 256-block, and the epilogue after it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/amx/weights_as_a.h"

namespace qtensor {
namespace {

// The stored tiles of one step: [M tile][row][batch row].
struct alignas(64) StepSums {
  int32_t high[2][16][16];
  int32_t low[2][16][16];
  float mins[2][16][16];
};

// Operands of the float step of a step whose tiles are stored. It runs in the interleave slots of the next step.
struct Epilogue {
  const StepSums* sums = nullptr;
  const float (*mins)[16][16] = nullptr;
  const RowHeaders* rows = nullptr;
  const PackedSums* x = nullptr;
  float* acc = nullptr;     // [M tile][row][batch row]
  __mmask16 seen = 0xffff;  // 0: acc has not been written. A mask instead of a branch
};

// The float step for rows [from, from + ROWS) of a finished step of M_TILES tiles. The strides are those of rows and M
// tiles in acc, in floats.
template <class Planes, int M_TILES, int64_t ROW_STRIDE = 16, int64_t TILE_STRIDE = 256, int ROWS = 4>
inline __attribute__((always_inline)) void float_step(const Epilogue& epilogue, int from) {
  __m512 dx[M_TILES];
  for (int t = 0; t < M_TILES; t++) dx[t] = _mm512_load_ps(epilogue.x[t].d);
#pragma GCC unroll 4
  for (int r = from; r < from + ROWS; r++) {
    const __m512 d = _mm512_set1_ps(epilogue.rows->d[r]);
    for (int t = 0; t < M_TILES; t++) {
      const __m512i high = _mm512_load_si512(epilogue.sums->high[t][r]),
                    low = _mm512_load_si512(epilogue.sums->low[t][r]);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, Planes::shift), low);
      __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), d);
      if (Planes::has_min)
        f = _mm512_fnmadd_ps(_mm512_load_ps(epilogue.mins[t][r]), _mm512_set1_ps(epilogue.rows->dmin[r]), f);
      float* at = epilogue.acc + t * TILE_STRIDE + r * ROW_STRIDE;
      _mm512_store_ps(at, _mm512_fmadd_ps(f, dx[t], _mm512_maskz_load_ps(epilogue.seen, at)));
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

template <class Planes, int M_TILES>
inline __attribute__((always_inline)) void store_sums(const RowHeaders& rows, const PackedSums* x, StepSums& sums) {
  _tile_stored(0, sums.high[0], 64);
  _tile_stored(2, sums.low[0], 64);
  if (M_TILES == 2) {
    _tile_stored(1, sums.high[1], 64);
    _tile_stored(3, sums.low[1], 64);
  }
  if (Planes::has_min) {
    _tile_zero(0);
    _tile_loadd(4, rows.mins, 64);
    _tile_loadd(6, x[0].mins, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (M_TILES == 2) {
      _tile_zero(1);
      _tile_loadd(7, x[1].mins, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stored(1, sums.mins[1], 64);
    }
    _tile_stored(0, sums.mins[0], 64);
  }
}

}  // namespace
}  // namespace qtensor
