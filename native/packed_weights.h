// Weights packed for vectors: line u of a packed block is dword u of the block in the file of each of 32 rows. Nothing
// within a dword changes, so scales and values lie as the file has them, and a row is a lane.
//
// A slab is 64 rows: [block][two groups of 32]. It is read from end to end, in order, while a block of the batch rows
// meets 64 rows of the weight. Lines lie in the order in which kernels want them; what is no dword (the d of Q6_K) is
// half a line before them. The last slab may have only one group; what is beyond the last row is zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "blocks.h"

namespace qtensor {

constexpr int64_t kSlabRows = 64, kGroupRows = 32, kLineBytes = 4 * kGroupRows;

constexpr int64_t groups_of(int64_t rows) { return rows > kGroupRows ? 2 : 1; }

// Where line i comes from in the file's block, and from where the half does, is all that a format adds to this.
template <class Block, int HALVES>
struct PackedBlock {
  static constexpr bool exists = true;
  static constexpr int halves = HALVES, bytes = int(sizeof(Block)), lines = (bytes - 2 * HALVES) / 4;
  static constexpr int64_t packed_bytes = kGroupRows * bytes, lines_at = 2 * kGroupRows * HALVES;
  static_assert(lines_at + kLineBytes * lines == packed_bytes && packed_bytes % 64 == 0);
};

template <class Block>
struct Packing {  // of most formats there is none
  static constexpr bool exists = false;
};
template <>
struct Packing<BlockQ4_K> : PackedBlock<BlockQ4_K, 0> {  // d and dmin, three dwords of scales and mins, values
  static constexpr int dword(int i) { return 4 * i; }
  static constexpr int values(int chunk, int four) {
    return 4 + 8 * chunk + four;
  }  // 64 chunk + 4 four, and 32 farther
};
template <>
struct Packing<BlockQ5_K> : PackedBlock<BlockQ5_K, 0> {  // fifth bits and the first values in turns, then the others
  static constexpr int dword(int i) {
    return i < 4 ? 4 * i : i < 20 ? (i % 2 ? 48 : 16) + (i - 4) / 2 * 4 : 48 + 4 * (i - 12);
  }
  static constexpr int values(int chunk, int four) { return chunk == 0 ? 5 + 2 * four : 12 + 8 * chunk + four; }
  static constexpr int fifth_bits(int four) { return 4 + 2 * four; }
};
template <>
struct Packing<BlockQ6_K> : PackedBlock<BlockQ6_K, 1> {
  // Scales; of each 128 values upper bits and the first 32 bytes of lower ones in turns, then the others.
  static constexpr int dword(int i) {
    if (i < 4) return 192 + 4 * i;
    const int n = (i - 4) / 24, at = (i - 4) % 24;
    return at < 16 ? (at % 2 ? 64 * n : 128 + 32 * n) + at / 2 * 4 : 64 * n + 32 + 4 * (at - 16);
  }
  static constexpr int half() { return 208; }
  static constexpr int values(int n, int second, int four) { return 4 + 24 * n + (second ? 16 + four : 2 * four + 1); }
  static constexpr int upper_bits(int n, int four) { return 4 + 24 * n + 2 * four; }
};

// Block b of row `row` of a slab with so many groups, as the file has it.
template <class Block>
inline void unpack_block(const uint8_t* slab, int64_t groups, int64_t row, int64_t b, Block& to) {
  using P = Packing<Block>;
  const uint8_t* const from = slab + (b * groups + row / kGroupRows) * P::packed_bytes;
  const int64_t lane = row % kGroupRows;
  auto* const bytes = reinterpret_cast<uint8_t*>(&to);
  for (int u = 0; u < P::lines; u++)
    std::memcpy(bytes + P::dword(u), from + P::lines_at + kLineBytes * u + 4 * lane, 4);
  if constexpr (P::halves > 0) std::memcpy(bytes + P::half(), from + 2 * lane, 2);
}

// use(Block{}) of the formats that can be packed, or none().
template <class Use, class None>
inline auto with_packing(Format format, Use use, None none) {
  switch (format) {
    case Format::Q4_K:
      return use(BlockQ4_K{});
    case Format::Q5_K:
      return use(BlockQ5_K{});
    case Format::Q6_K:
      return use(BlockQ6_K{});
    default:
      return none();
  }
}

}  // namespace qtensor
