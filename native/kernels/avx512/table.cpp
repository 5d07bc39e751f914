// Kernels for AVX-512 with VNNI (and BW, DQ, VL).
#include "batch_lanes_32.h"
#include "four_block_rows.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/tile_entries.h"
#include "kernels/x86/matmul.h"
#include "kernels/x86/unpacked_matmul.h"
#include "tile_matmul.h"

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K512>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K512>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K512>(t); }
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

}  // namespace

constinit const KernelTable kAvx512Kernels = tile_entries("avx512", 5, 64);

}  // namespace qtensor
