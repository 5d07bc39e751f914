// The AMX kernels compiled again for emulated tiles, as a separate kernel family for tests only.
#include "emulated_tiles.h"

#define kAmxKernels kAmxEmulatedKernels
#define kAmxKernelsWithMins kAmxEmulatedKernelsWithMins
#define QTENSOR_TABLE_NAME "amx-emulated"
#include "kernels/amx/table.cpp"
#include "kernels/amx/tiles_with_mins.cpp"

TileCounts& tile_counts() {
  static TileCounts counts;
  return counts;
}

// For tests that have only the module: numbers of configures, zeros, loads, stores, byte products and float products.
extern "C" __attribute__((visibility("default"))) void emulated_tile_counts(int64_t* six) {
  const TileCounts& counts = tile_counts();
  six[0] = counts.configures;
  six[1] = counts.zeros;
  six[2] = counts.loads;
  six[3] = counts.stores;
  six[4] = counts.byte_products;
  six[5] = counts.float_products;
}
