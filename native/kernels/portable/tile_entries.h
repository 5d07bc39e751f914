// The entries for tile kernels, which every family that has them names alike.
.packed_bytes = packed_bytes, .tile_scratch_bytes = tile_scratch_bytes, .pack_block = pack_block,
    .matmul_tiles_q4_k = matmul_tiles_q4_k, .matmul_tiles_q5_k = matmul_tiles_q5_k,
    .matmul_tiles_q6_k = matmul_tiles_q6_k,
