// The tile instructions of the AMX kernels, implemented with AVX-512, for tests on machines without tiles. Where the
// hardware raises an exception, and in some further cases, the program aborts with a message on stderr.
//
// Included before native/kernels/amx/table.cpp (see amx_emulated.cpp), whose instructions it replaces. Shapes are those
// of the configuration, rows and columns beyond them are zeroed as in the manual, and every instruction is counted.
// This file does not depend on how the kernels use the instructions.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tile_counts.h"

namespace emulated_tiles {

inline constexpr int kTiles = 8, kMostRows = 16, kMostRowBytes = 64;

[[noreturn]] inline void refuse(const char* instruction, const char* why) {
  std::fprintf(stderr, "emulated tiles: %s: %s\n", instruction, why);
  std::abort();
}

// Operand of ldtilecfg.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
  alignas(64) uint8_t bytes[kMostRows][kMostRowBytes];
  int rows, row_bytes;  // both are 0 if not configured
};

struct Unit {
  Tile tile[kTiles];
  bool configured;

  Tile& used(int index, const char* instruction) {
    if (index < 0 || index >= kTiles) refuse(instruction, "there are eight tiles");
    if (!configured) refuse(instruction, "the tiles are not configured");
    if (tile[index].rows == 0) refuse(instruction, "this tile is not configured");
    return tile[index];
  }
};
inline thread_local Unit unit{};

// Deliberate faults that tests must detect, in EMULATED_TILE_FAULT. "short" omits a row of every sum and A operand,
// which the hardware would accept silently; "uneven" omits it of the sums only, which the hardware would reject.
inline int missing_rows(int tile) {
  static const char* const fault = std::getenv("EMULATED_TILE_FAULT");
  if (fault == nullptr) return 0;
  if (std::strcmp(fault, "short") == 0) return tile < 6;
  if (std::strcmp(fault, "uneven") == 0) return tile < 4;
  refuse("EMULATED_TILE_FAULT", "takes short or uneven");
}

inline void configure(const volatile void* from) {
  const char* const name = "ldtilecfg";
  if (reinterpret_cast<uintptr_t>(from) % 64 != 0) refuse(name, "the configuration is not at a cache line");
  Config config;
  for (size_t i = 0; i < sizeof config; i++)
    reinterpret_cast<uint8_t*>(&config)[i] = static_cast<const volatile uint8_t*>(from)[i];
  if (config.palette != 1) refuse(name, "palette 1 is the one there is");
  if (config.start_row != 0) refuse(name, "it would go on in the middle of a load");
  for (const uint8_t byte : config.reserved)
    if (byte != 0) refuse(name, "reserved bytes are not zero");
  for (int i = 0; i < 16; i++) {
    const int rows = config.rows[i], row_bytes = config.row_bytes[i];
    if (i >= kTiles && (rows != 0 || row_bytes != 0)) refuse(name, "there are eight tiles");
    if (rows > kMostRows || row_bytes > kMostRowBytes) refuse(name, "a tile has 16 rows of 64 bytes at the most");
    if ((rows == 0) != (row_bytes == 0)) refuse(name, "a tile has rows without bytes or bytes without rows");
  }
  if (!unit.configured) tile_counts().in_use++;
  unit.configured = true;
  for (int i = 0; i < kTiles; i++) {
    std::memset(unit.tile[i].bytes, 0, sizeof unit.tile[i].bytes);
    unit.tile[i].rows = config.rows[i] - missing_rows(i);
    unit.tile[i].row_bytes = config.row_bytes[i];
  }
  tile_counts().configures++;
}

inline void release() {
  if (unit.configured) tile_counts().in_use--;
  unit.configured = false;
  for (Tile& tile : unit.tile) tile.rows = tile.row_bytes = 0;
}

inline void zero(int to) {
  Tile& tile = unit.used(to, "tilezero");
  std::memset(tile.bytes, 0, sizeof tile.bytes);
  tile_counts().zeros++;
}

inline void load(int to, const void* from, int64_t stride) {
  Tile& tile = unit.used(to, "tileloadd");
  std::memset(tile.bytes, 0, sizeof tile.bytes);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(tile.bytes[row], static_cast<const uint8_t*>(from) + row * stride, size_t(tile.row_bytes));
  tile_counts().loads++;
}

inline void store(int from, void* to, int64_t stride) {
  const Tile& tile = unit.used(from, "tilestored");
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile.bytes[row], size_t(tile.row_bytes));
  tile_counts().stores++;
}

struct Operands {
  Tile& sum;
  const Tile &a, &b;
};
inline Operands operands(int sum, int a, int b, const char* name) {
  if (sum == a || sum == b || a == b) refuse(name, "a product takes three different tiles");
  const Operands o{unit.used(sum, name), unit.used(a, name), unit.used(b, name)};
  if (o.sum.rows != o.a.rows) refuse(name, "sums and A operand differ in rows");
  if (o.sum.row_bytes != o.b.row_bytes) refuse(name, "sums and B operand differ in columns");
  if (o.a.row_bytes != 4 * o.b.rows) refuse(name, "the operands differ in depth");
  if (o.a.row_bytes % 4 != 0 || o.sum.row_bytes % 4 != 0) refuse(name, "a row is no whole number of dwords");
  return o;
}

// Return bytes 0 and 2, or 1 and 3, of each 32-bit word as two words.
template <bool SIGNED, int ODD>
inline __m512i words_of(__m512i bytes) {
  if (SIGNED) return _mm512_srai_epi16(ODD ? bytes : _mm512_slli_epi16(bytes, 8), 8);
  return ODD ? _mm512_srli_epi16(bytes, 8) : _mm512_and_si512(bytes, _mm512_set1_epi16(255));
}

// sum[m][n] += a[m][4k + i] * b[k][4n + i], with 32 bits that wrap around. Columns beyond the shape stay zero.
template <bool A_SIGNED, bool B_SIGNED>
inline void byte_product(int sum, int a, int b, const char* name) {
  const Operands o = operands(sum, a, b, name);
  for (int m = 0; m < o.sum.rows; m++) {
    __m512i row = _mm512_load_si512(o.sum.bytes[m]);
    for (int k = 0; k < o.b.rows; k++) {
      int32_t four;
      std::memcpy(&four, o.a.bytes[m] + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32(four), y = _mm512_load_si512(o.b.bytes[k]);
      row = _mm512_dpwssd_epi32(row, words_of<A_SIGNED, 0>(x), words_of<B_SIGNED, 0>(y));
      row = _mm512_dpwssd_epi32(row, words_of<A_SIGNED, 1>(x), words_of<B_SIGNED, 1>(y));
    }
    _mm512_store_si512(o.sum.bytes[m], row);
  }
  tile_counts().byte_products++;
}

inline float flushed(float x) {  // denormals count as zero
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float bfloat16_at(const uint8_t* place) {
  uint16_t upper;
  std::memcpy(&upper, place, 2);
  const uint32_t bits = uint32_t(upper) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}

// Even and odd products form two chains of fused multiply-adds, which are added to each other and then to the sum.
// Denormals are flushed to zero in every step, and results are rounded to nearest even.
inline void bfloat16_product(int sum, int a, int b) {
  const Operands o = operands(sum, a, b, "tdpbf16ps");
  for (int m = 0; m < o.sum.rows; m++)
    for (int n = 0; n < o.sum.row_bytes / 4; n++) {
      float chain[2] = {0.0f, 0.0f}, total;
      for (int k = 0; k < o.b.rows; k++)
        for (int i = 0; i < 2; i++) {
          const float x = bfloat16_at(o.a.bytes[m] + 4 * k + 2 * i);
          const float y = bfloat16_at(o.b.bytes[k] + 4 * n + 2 * i);
          chain[i] = flushed(__builtin_fmaf(x, y, chain[i]));
        }
      std::memcpy(&total, o.sum.bytes[m] + 4 * n, 4);
      total = flushed(flushed(total) + flushed(chain[0] + chain[1]));
      std::memcpy(o.sum.bytes[m] + 4 * n, &total, 4);
    }
  tile_counts().float_products++;
}

}  // namespace emulated_tiles

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_release
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define QTENSOR_LOAD_TILE_CONFIG(config) emulated_tiles::configure(&config)
#define _tile_zero(to) emulated_tiles::zero(to)
#define _tile_loadd(to, from, stride) emulated_tiles::load(to, from, stride)
#define _tile_stream_loadd(to, from, stride) emulated_tiles::load(to, from, stride)
#define _tile_stored(from, to, stride) emulated_tiles::store(from, to, stride)
#define _tile_release() emulated_tiles::release()
#define _tile_dpbssd(sum, a, b) emulated_tiles::byte_product<true, true>(sum, a, b, "tdpbssd")
#define _tile_dpbsud(sum, a, b) emulated_tiles::byte_product<true, false>(sum, a, b, "tdpbsud")
#define _tile_dpbusd(sum, a, b) emulated_tiles::byte_product<false, true>(sum, a, b, "tdpbusd")
#define _tile_dpbuud(sum, a, b) emulated_tiles::byte_product<false, false>(sum, a, b, "tdpbuud")
#define _tile_dpbf16ps(sum, a, b) emulated_tiles::bfloat16_product(sum, a, b)
