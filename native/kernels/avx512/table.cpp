// Kernels for AVX-512 with VNNI (and BW, DQ, VL).
#include <immintrin.h>

#include "kernel_table.h"

namespace qtensor {
namespace {

constexpr int kScoreLanes = 4, kValueLanes = 4, kQueryGroup = 4, kColumnGroup = 4;
constexpr bool kTouchFarther = true;
// clang-format off: each of these builds on the ones before it
#include "vec16.h"
#include "kernels/portable/fetch_ahead.h"
#include "kernels/portable/float_kernels.h"
#include "kernels/x86/rows.h"
#include "four_headers.h"
#include "integer_kernels.h"
#include "four_rows.h"
#include "kernels/x86/matmul.h"
#include "columns.h"
#include "row_blocks.h"
#include "kernels/portable/column_tiles.h"
#include "column_tiles.h"
#include "kernels/portable/level_tables.h"
#include "byte_words.h"
#include "kernels/portable/word_dots.h"
#include "kernels/portable/head_vectors.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/read_lines.h"
#include "byte_peak.h"
// clang-format on

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K512>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K512>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K512>(t); }
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

}  // namespace

const KernelTable kAvx512Kernels = {
#define QTENSOR_TABLE_NAME "avx512"
#include "kernels/portable/table_entries.h"
    .tile_columns = 5,
    .tile_rows = 64,
#include "kernels/portable/tile_entries.h"
};

}  // namespace qtensor
