// Products of quantized weights and rows of floats, fused with the operations before and after them.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/dequantize.h"
#include "ops/program.h"

namespace qtensor {

struct Product {
  Weight weight;
  float* y;  // m x weight.rows
};

// Products with the same activations, which are quantized once. With a norm, the activations are rms_norm(x) of each
// row. Combine::add adds the product to y. Combine::silu_mul takes two products of one shape and writes
// silu(first) * second to the first product's y. The float operations have the same order as if they were executed one
// by one.
enum class Combine { none, add, silu_mul };
struct Matmul {
  const float* x;
  int64_t m, k;
  std::vector<Product> products;
  const float* norm = nullptr;
  float eps = 0.0f;
  Combine combine = Combine::none;
};
Step matmul(Matmul op);

}  // namespace qtensor
