// Run one matrix product, for an emulator that counts instructions: one_product FAMILY FORMAT K ROWS M [packed].
// Weights are in rows, or packed. Those in rows use the packed kernels or tiles if the family supports them for this
// number of batch rows. Packing batch rows is included. The cost of a block is the difference between two values of K.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "ops/dequantize.h"
#include "packed_weights.h"
#include "runtime/dispatch.h"

using namespace qtensor;

namespace {

// Zeros, because values do not affect the count of instructions; no initialization is needed, whatever K is.
constexpr int64_t kMostBlocks = 4096, kMostBytes = 1 << 24;
alignas(4096) uint8_t weight[kMostBytes + 65536], packed[kMostBytes], scratch[kMostBytes];
BlockQ8K x[kMostBlocks];
BlockQ8x32 x_32[kMostBlocks];
float y[kMostBytes];

}  // namespace

int main(int count, char** arguments) {
  if (count != 6 && count != 7) {
    std::fprintf(stderr, "usage: one_product FAMILY FORMAT K ROWS M [packed]\n");
    return 2;
  }
  use_kernels(arguments[1]);
  const KernelTable& t = kernels();
  const auto f = Format(std::atoi(arguments[2]));
  const int64_t k = std::atoll(arguments[3]), rows = std::atoll(arguments[4]), m = std::atoll(arguments[5]);
  const int64_t blocks = k / 256, row_bytes = bytes_per_row(f, k);
  if (m * blocks > kMostBlocks || rows * row_bytes > kMostBytes || m * rows > kMostBytes) return 2;
  const PackTask packing{x, x_32, blocks, m, packed};
  const bool in_rows = count == 6;
  const auto select = in_rows ? t.slabs_of_rows : t.slabs;
  const Slabs slabs = select == nullptr ? Slabs() : select(f, m);
  if (slabs.kernel != nullptr && m * kSlabRows * 4 <= kMostBytes - kPackedScratchBytes) {
    for (int64_t j = 0; j < m; j++) slabs.packing->row(packing, j);
    slabs.kernel({weight, kSlabRows * row_bytes, rows, blocks, packed, m, y, rows,
                  reinterpret_cast<float*>(scratch + kPackedScratchBytes), in_rows ? row_bytes : 0, scratch});
    return 0;
  }
  if (!in_rows) return 2;
  const Tiles tiles = t.tiles == nullptr ? Tiles() : t.tiles(f, m);
  if (tiles.kernel == nullptr) {
    t.matmul(f)({weight, row_bytes, k, x, x_32, blocks, nullptr, m, y, rows, 0, rows});
    return 0;
  }
  for (int64_t tile = 0; tile < (m + 15) / 16; tile++)
    for (int64_t b = 0; b < blocks; b++) tiles.packing->block(packing, tile, b);
  tiles.kernel({weight, row_bytes, blocks, packed, m, y, rows, 0, rows, false, scratch});
  return 0;
}
