// Tiles of the formats with mins, compiled in parallel with the rest of the family: see kernel_table.h.
#pragma GCC diagnostic ignored "-Wunused-function"  // functions in shared headers

#include "kernel_table.h"
#include "kernels/amx/activations_as_a.h"
#include "kernels/amx/large_m.h"
#include "kernels/avx512/integer_kernels.h"

namespace qtensor {
namespace {

template <class Planes, class AsB>
void matmul_tiles(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  if (t.m <= kMostMAsA)
    activations_as_a<AsB>(t);
  else
    large_m<Planes>(t);
}

}  // namespace

constinit const TileKernelsWithMins kAmxKernelsWithMins = {.q4_k = matmul_tiles<MinPlanes<Q4_K512>, BMins<BQ4_K>>,
                                                           .q5_k = matmul_tiles<MinPlanes<Q5_K512>, BMins<BQ5_K>>};

}  // namespace qtensor
