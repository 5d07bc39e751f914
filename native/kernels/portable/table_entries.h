// Builds the table of a family. The kernels have the same names in all families.
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

MatmulKernel matmul_kernel(Format format) {
  switch (format) {
    case Format::F32:
      return matmul_f32;
    case Format::F16:
      return matmul_f16;
    case Format::BF16:
      return matmul_bf16;
    case Format::Q4_K:
      return matmul_q4_k;
    case Format::Q5_K:
      return matmul_q5_k;
    case Format::Q6_K:
      return matmul_q6_k;
    default:
      return has_blocks_of_32(format) ? kernel_32(format) : unpacked_kernel(format);
  }
}

constexpr KernelTable table_entries(const char* name, Tiles (*tiles)(Format, int64_t) = nullptr,
                                    int64_t (*tile_scratch_bytes)(int64_t) = nullptr) {
  return {.name = name,
          .quantize_q8k = quantize_q8k,
          .quantize_q8x32 = quantize_q8x32,
          .matmul = matmul_kernel,
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
          .peak_products = kPeakProducts,
          .tiles = tiles,
          .tile_rows = 64,
          .tile_scratch_bytes = tile_scratch_bytes};
}

}  // namespace
}  // namespace qtensor
