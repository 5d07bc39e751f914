// A family's table: every family names its kernels alike.
#pragma once

#include <cstdint>

#include "byte_peak.h"
#include "kernel_table.h"
#include "kernels/portable/float_kernels.h"
#include "kernels/portable/head_vectors.h"
#include "kernels/portable/read_lines.h"

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t);
void matmul_q5_k(const MatmulTask& t);
void matmul_q6_k(const MatmulTask& t);
MatmulKernel kernel_32(Format format);
MatmulKernel unpacked_kernel(Format format);
void attention_bytes(const ByteAttentionTask& t);

constexpr KernelTable table_entries(const char* name) {
  return {.name = name,
          .quantize_q8k = quantize_q8k,
          .quantize_q8x32 = quantize_q8x32,
          .matmul_q4_k = matmul_q4_k,
          .matmul_q5_k = matmul_q5_k,
          .matmul_q6_k = matmul_q6_k,
          .kernel_32 = kernel_32,
          .unpacked_kernel = unpacked_kernel,
          .matmul_f32 = matmul_f32,
          .matmul_f16 = matmul_f16,
          .matmul_bf16 = matmul_bf16,
          .rms_norm = rms_norm,
          .silu_mul = silu_mul,
          .add = add,
          .softmax = softmax,
          .rope_adjacent = rope_adjacent,
          .rope_halves = rope_halves,
          .to_half = to_half,
          .attention = attention,
          .round_head = round_head,
          .attention_bytes = attention_bytes,
          .read_lines = read_lines,
          .byte_peak = byte_peak,
          .peak_products = kPeakProducts};
}

}  // namespace
}  // namespace qtensor
