// The table of cosines and sines for rotary positions.
#pragma once

#include <cstdint>

#include "ops/program.h"

namespace qtensor {

// cos and sin of positions[row] * frequency[i], times `factor`; tables of rows x dim_half floats. The computation uses
// double precision and no math library, so the table is the same on every machine. Angles must be below 1.6 million.
Step rope_table(const double* frequency, int64_t dim_half, const int32_t* positions, int64_t rows, double factor,
                float* cosine, float* sine);

}  // namespace qtensor
