// Selects the kernels that process four rows of a format in blocks of 256 at a time.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "kernel_table.h"
#include "kernels/avx512/folded_rows.h"
#include "kernels/avx512/grid_rows.h"
#include "kernels/avx512/level_rows.h"
#include "kernels/avx512/ternary_blocks.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

template <class Block>
constexpr bool kHasLevels = false;
template <>
constexpr bool kHasLevels<BlockIQ4_XS> = true;
template <class Block>
constexpr bool kIsFolded = requires { Folded<Block>::offset; };
template <class Block>
constexpr bool kHasGrid = requires { Grid<Block>::offset; };
template <class Block>
constexpr bool kInFours = kHasLevels<Block> || kIsFolded<Block> || kHasGrid<Block>;

template <class F, int M>
inline void unpacked_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  using Block = typename F::Block;
  if constexpr (kHasLevels<Block>)
    level_four_rows<M>(t, rows, batch_row);
  else if constexpr (kHasGrid<Block>)
    grid_four_rows<Block, M>(t, rows, batch_row, F::kStep);
  else
    folded_four_rows<Block, M>(t, rows, batch_row);
}

}  // namespace
}  // namespace qtensor
