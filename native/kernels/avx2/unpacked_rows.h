// Which formats in blocks of 256 AVX2 takes four rows at a time.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

template <class Block>
constexpr bool kInFours = false;
template <class Block, int M>
void unpacked_four_rows(const MatmulTask&, FourRows, int64_t);

}  // namespace
}  // namespace qtensor
