// The entries of a KernelTable in their order; every instruction set names its kernels alike.
.name = QTENSOR_TABLE_NAME, .quantize_q8k = quantize_q8k, .matmul_q4_k = matmul_q4_k, .matmul_q5_k = matmul_q5_k,
    .matmul_q6_k = matmul_q6_k, .matmul_q8_0 = matmul_q8_0, .matmul_q4_0 = matmul_q4_0, .matmul_q4_1 = matmul_q4_1,
    .matmul_f32 = matmul_f32, .matmul_f16 = matmul_f16, .matmul_bf16 = matmul_bf16, .rms_norm = rms_norm,
    .silu_mul = silu_mul, .add = add, .softmax = softmax, .rope_adjacent = rope_adjacent, .rope_halves = rope_halves,
    .to_half = to_half, .attention = attention, .round_head = round_head, .attention_bytes = attention_bytes,
    .read_lines = read_lines, .byte_peak = byte_peak, .peak_products = kPeakProducts,
