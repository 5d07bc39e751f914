// Which formats in blocks of 256 AVX-512 takes four rows at a time, and by what.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "kernel_table.h"
#include "kernels/avx512/folded_rows.h"
#include "kernels/avx512/level_rows.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

template <class Block>
constexpr bool kHasLevels = false;
template <>
constexpr bool kHasLevels<BlockIQ4_XS> = true;
template <class Block>
constexpr bool kInFours = kHasLevels<Block>;
template <>
constexpr bool kInFours<BlockQ2_K> = true;
template <>
constexpr bool kInFours<BlockQ3_K> = true;

template <class Block, int M>
inline void unpacked_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  if constexpr (kHasLevels<Block>)
    level_four_rows<M>(t, rows, batch_row);
  else
    folded_four_rows<Block, M>(t, rows, batch_row);
}

}  // namespace
}  // namespace qtensor
