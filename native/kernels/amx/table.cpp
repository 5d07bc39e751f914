// Kernels for AMX: tiles for many batch rows and for attention over bytes. The rest of the family is AVX-512's, which
// would have the same instructions here and double the time of compilation. runtime/dispatch.cpp combines the two.
#pragma GCC diagnostic ignored "-Wunused-function"  // functions in shared headers

#include "kernel_table.h"
#include "kernels/amx/activations_as_a.h"
#include "kernels/amx/byte_peak.h"
#include "kernels/amx/large_m.h"
#include "kernels/amx/small_m.h"
#include "kernels/amx/tile_attention.h"
#include "kernels/avx512/batch_lanes_32.h"
#include "kernels/avx512/unscaled_lanes.h"

#ifndef QTENSOR_TABLE_NAME  // the emulation of tests/native has another
#define QTENSOR_TABLE_NAME "amx"
#endif

namespace qtensor {
namespace {

int64_t tile_scratch_bytes(int64_t m) {
  constexpr int64_t as_a = sizeof(AsAScratch), small_m_bytes = sizeof(SmallMScratch);
  const int64_t large_m_bytes = int64_t(sizeof(LargeMScratch)) + (m + 31) / 32 * kNTileTiles * 512 * 4;
  const int64_t with_mins = m <= kMostMAsA ? as_a : large_m_bytes,
                without = m <= kMostSmallM ? small_m_bytes : large_m_bytes;
  const int64_t most = with_mins > without ? with_mins : without, lanes = lanes_scratch_bytes<RowBlocks>(m);
  return most > lanes ? most : lanes;
}
void tiles_q6_k(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  if (t.m <= kMostSmallM)
    small_m<SignedPlanes>(t);
  else
    large_m<SignedPlanes>(t);
}

constexpr TilePacking kPackedAsA{packed_a_bytes, pack_a}, kPackedAsB{packed_b_bytes, pack_b};

Tiles tiles(Format format, int64_t m) {
  if (m < kTilesFromM) return {};
  const TilePacking* const with_mins = m <= kMostMAsA ? &kPackedAsA : &kPackedAsB;
  switch (format) {
    case Format::Q4_K:
      return {kAmxKernelsWithMins.q4_k, with_mins};
    case Format::Q5_K:
      return {kAmxKernelsWithMins.q5_k, with_mins};
    case Format::Q6_K:
      return {tiles_q6_k, &kPackedAsB};
    default:
      return has_blocks_of_32(format) ? tiles_32(format) : tiles_256(format);
  }
}

}  // namespace

// Formats without AMX tiles use AVX-512's, for which batch rows are packed differently. They are compiled here with
// AMX's tuning.h.
constinit const KernelTable kAmxKernels = {.name = QTENSOR_TABLE_NAME,
                                           .attention_bytes = attention_bytes,
                                           .byte_peak = byte_peak,
                                           .peak_products = kPeakProducts,
                                           .attention_tile_rows = 32,
                                           .tiles = tiles,
                                           .tile_rows = 16 * kNTileTiles,
                                           .tile_scratch_bytes = tile_scratch_bytes};

}  // namespace qtensor
