// Kernels for AVX-512 with VNNI and VBMI, and AMX: tiles for many columns, the AVX-512 kernels for few.
#include <immintrin.h>

#include "kernel_table.h"

namespace qtensor {
namespace {

constexpr int kScoreLanes = 4, kValueLanes = 4, kQueryGroup = 4, kColumnGroup = 4;
constexpr bool kTouchFarther = false;
// clang-format off: each of these builds on the ones before it
#include "kernels/avx512/vec16.h"
#include "kernels/portable/fetch_ahead.h"
#include "kernels/portable/float_kernels.h"
#include "kernels/x86/rows.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/avx512/four_rows.h"
#include "kernels/x86/matmul.h"
#include "tiles.h"
#include "kernels/avx512/columns.h"
#include "row_planes.h"
#include "tile_step.h"
#include "few_columns.h"
#include "right_planes.h"
#include "left_columns.h"
#include "many_columns.h"
#include "tile_matmul.h"
#include "kernels/portable/level_tables.h"
#include "kernels/avx512/byte_words.h"
#include "kernels/portable/word_dots.h"
#include "kernels/portable/head_vectors.h"
#include "kernels/portable/byte_attention.h"
#include "tile_attention.h"
#include "kernels/portable/read_lines.h"
#include "byte_peak.h"
// clang-format on

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K512>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K512>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K512>(t); }

}  // namespace

const KernelTable kAmxKernels = {
#ifndef QTENSOR_TABLE_NAME  // the emulation of tests/native has another
#define QTENSOR_TABLE_NAME "amx"
#endif
#include "kernels/portable/table_entries.h"
    .attention_tile_rows = 32,
    .tile_columns = 4,
    .tile_rows = 16 * kPanelTiles,
#include "kernels/portable/tile_entries.h"
};

}  // namespace qtensor
