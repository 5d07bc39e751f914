// Operations on rows of floats: gathering, norms, rotation, softmax and elementwise operations.
#pragma once

#include <cstdint>

#include "ops/dequantize.h"
#include "ops/program.h"

namespace qtensor {

Step embed_rows(Weight table, const int32_t* ids, int64_t rows, float* out);
Step gather_rows(const float* x, int64_t x_rows, int64_t width, const int32_t* ids, int64_t rows, float* out);
Step rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* out);
Step rope(float* x, int64_t rows, int64_t heads, int64_t dim, const int32_t* positions, const float* cosine,
          const float* sine, int64_t table_rows, bool adjacent);
Step silu_mul(const float* gate, const float* up, int64_t n, float* out);
Step add(const float* a, const float* b, int64_t n, float* out);
Step softmax(float* x, int64_t rows, int64_t width);
Step argmax(const float* x, int64_t rows, int64_t width, int32_t* out);

}  // namespace qtensor
