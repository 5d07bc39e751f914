// See bfloat16_matmul.h. Compiled three times: with real tiles, with emulated ones, and without tile instructions.
#include "bfloat16_matmul.h"

#if defined(QTENSOR_TILES_EMULATED)
#include "emulated_tiles.h"
#elif defined(QTENSOR_TILES_SKIPPED)
#include "skipped_tiles.h"
#else
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "kernels/amx/tiles.h"
#include "kernels/avx512/transpose.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

constexpr int64_t kTile = 16 * 32;  // values: 16 rows of 32, or 16 pairs of 16 batch rows

// Round sixteen floats to nearest even. Inputs contain no NaN.
inline __m256i rounded(__m512 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}

void pack(const float* x, int64_t k, int64_t m, uint16_t* packed) {
  for (int64_t c = 0; c < m; c++)
    for (int64_t i = 0; i < k; i += 16) {
      alignas(32) uint16_t sixteen[16];
      _mm256_store_si256((__m256i*)sixteen, rounded(_mm512_loadu_ps(x + c * k + i)));
      uint16_t* const to = packed + ((i / 32) * (m / 16) + c / 16) * kTile + (i % 32) * 16 + c % 16 * 2;
      for (int pair = 0; pair < 8; pair++) std::memcpy(to + 32 * pair, sixteen + 2 * pair, 4);
    }
}

// Convert a row's block of 256 values to eight rows of 32 values with the stride of a tile. A sub-block has only
// sixteen possible values, so a table of them is rounded once.
inline void dequantize(const uint8_t* block, uint16_t* to) {
  const ScaleBytes packed = unpack_scales(block + 4);
  alignas(32) float scales[8], mins[8];
  const auto eight = [](uint64_t bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
  };
  _mm256_store_ps(scales, _mm256_mul_ps(_mm256_broadcastss_ps(half_at(block)), eight(packed.scale)));
  _mm256_store_ps(mins, _mm256_mul_ps(_mm256_broadcastss_ps(half_at(block + 2)), eight(packed.min)));
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i four = _mm512_set1_epi16(15);
  for (int pair = 0; pair < 4; pair++) {
    const __m512i raw = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(block + 16 + 32 * pair)));
    for (int upper = 0; upper < 2; upper++) {
      const int j = 2 * pair + upper;
      const __m512 values = _mm512_fmsub_ps(numbers, _mm512_set1_ps(scales[j]), _mm512_set1_ps(mins[j]));
      const __m512i table = _mm512_castsi256_si512(rounded(values));
      const __m512i number = _mm512_and_si512(upper ? _mm512_srli_epi16(raw, 4) : raw, four);
      _mm512_store_si512(to + j * kTile, _mm512_permutexvar_epi16(number, table));
    }
  }
}

// Multiply two weight tiles by two M tiles over `steps` times 32 values; sums: [weight tile][M tile][16][16].
inline void two_by_two(const uint16_t* left, int64_t a_stride, const uint16_t* right, int64_t b_stride, int64_t steps,
                       bool first, float* sums) {
  before_tile_loads();
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
  for (int64_t i = 0; i < steps; i++) {
    _tile_loadd(4, left + i * kTile, 64);
    _tile_loadd(6, right + i * b_stride, 64);
    _tile_loadd(5, left + a_stride + i * kTile, 64);
    _tile_loadd(7, right + i * b_stride + kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Process a depth of 512 values at a time: two M tiles of it stay in L1, and an N tile of 128 rows in L2.
void product(const uint8_t* weight, int64_t rows, int64_t k, const uint16_t* packed, int64_t m, float* y,
             int64_t y_stride, uint8_t* scratch) {
  const int64_t row_bytes = k / 256 * int64_t(sizeof(BlockQ4_K)), b_stride = m / 16 * kTile;
  auto* const n_tile = reinterpret_cast<uint16_t*>(scratch);  // [weight tile][step][16][32]
  auto* const sums = reinterpret_cast<float*>(n_tile + kBfloatTileRows * kBfloatDepth);
  configure_tiles();
  for (int64_t row = 0; row < rows; row += kBfloatTileRows) {
    const int64_t count = std::min(kBfloatTileRows, rows - row);
    for (int64_t at = 0; at < k; at += kBfloatDepth) {
      const int64_t depth = std::min(kBfloatDepth, k - at), steps = depth / 32;
      for (int64_t r = 0; r < count; r++)
        for (int64_t b = 0; b < depth / 256; b++) {
          const uint8_t* const block = weight + (row + r) * row_bytes + (at / 256 + b) * int64_t(sizeof(BlockQ4_K));
          prefetch_block(block + depth / 256 * int64_t(sizeof(BlockQ4_K)), sizeof(BlockQ4_K));
          dequantize(block, n_tile + (r / 16 * steps + 8 * b) * kTile + r % 16 * 32);
        }
      for (int64_t c = 0; c < m; c += 32)
        for (int64_t r = 0; r < count; r += 32)
          two_by_two(n_tile + r / 16 * steps * kTile, steps * kTile, packed + at / 32 * b_stride + c / 16 * kTile,
                     b_stride, steps, at == 0, sums + (c / 32 * kBfloatTileRows / 32 + r / 32) * 1024);
    }
    for (int64_t c = 0; c < m; c += 16)
      for (int64_t r = 0; r < count; r += 16) {
        const float* const from =
            sums + (c / 32 * kBfloatTileRows / 32 + r / 32) * 1024 + r % 32 / 16 * 512 + c % 32 / 16 * 256;
        store_transposed([&](int64_t i) { return from + 16 * i; }, y + c * y_stride + row + r, y_stride, 16, m >= 128);
      }
  }
  _mm_sfence();
  _tile_release();
}

}  // namespace

#if defined(QTENSOR_TILES_EMULATED)
const Bfloat16Matmul kBfloat16MatmulEmulated = {pack, product};
#elif defined(QTENSOR_TILES_SKIPPED)
const Bfloat16Matmul kBfloat16MatmulSkipped = {pack, product};
#else
const Bfloat16Matmul kBfloat16Matmul = {pack, product};
#endif

}  // namespace qtensor
