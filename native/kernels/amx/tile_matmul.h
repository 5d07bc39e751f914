// Products of K-quant weights and 8-bit activations in tiles: the entries of the kernel table.

template <class Planes>
inline void matmul_tiles(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  configure_tiles();
  if (t.columns <= 16 * kFewTiles)
    few_columns<Planes>(t);
  else
    many_columns<Planes>(t);
  if (t.past_cache) _mm_sfence();
  _tile_release();
}
int64_t packed_tile_bytes(int64_t blocks) { return blocks * int64_t(sizeof(PackedValues) + sizeof(PackedSums)); }
int64_t tile_scratch_bytes(int64_t columns) {
  if (columns <= 16 * kFewTiles) return sizeof(FewScratch);
  return int64_t(sizeof(ManyScratch)) + (columns + 31) / 32 * kPanelTiles * 512 * 4;
}
void matmul_tiles_q4_k(const TileTask& t) { matmul_tiles<MinPlanes<Q4_K512>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_tiles<MinPlanes<Q5_K512>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_tiles<SignedPlanes>(t); }
