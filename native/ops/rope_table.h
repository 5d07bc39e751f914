// The table of cosines and sines that rotary positions are taken from.
#pragma once

#include <cstdint>

#include "ops/program.h"

namespace qtensor {

// cos and sin of positions[row] * frequency[i], times `factor`; tables of rows x dim_half floats. Angles are reduced in
// double precision with our own polynomials, so every machine has the same table; they must be below 1.6 million.
Step rope_table(const double* frequency, int64_t dim_half, const int32_t* positions, int64_t rows, double factor,
                float* cosine, float* sine);

}  // namespace qtensor
