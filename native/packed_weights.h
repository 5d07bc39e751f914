// The layout of packed weights. A packed block holds 256 values of each of 32 rows: one block of the file per row, or
// eight blocks of 32. It consists of lines: line u is one dword of each row, so that a row is a lane of a vector. The
// bytes within a dword are those of the file.
//
// A slab is 64 rows: [block][two groups of 32 rows]. Kernels read it from beginning to end while they multiply a block
// of 64 rows with the same block of all batch rows. Lines are in the order in which kernels use them. A d that is not
// part of a dword (Q6_K and most blocks of 32) is stored before the lines, as half a line. The last slab may have only
// one group; rows beyond the last one are zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "blocks.h"

namespace qtensor {

constexpr int64_t kSlabRows = 64, kGroupRows = 32, kLineBytes = 4 * kGroupRows;

constexpr int64_t groups_of(int64_t rows) { return rows > kGroupRows ? 2 : 1; }

// Base of Packing. A format adds the positions in the file's blocks from which line i and half line i are taken.
template <class Block, int HALVES, int FILE_BLOCKS = 1>
struct PackedBlock {
  static constexpr bool exists = true;
  static constexpr int file_blocks = FILE_BLOCKS, halves = HALVES, bytes = FILE_BLOCKS * int(sizeof(Block));
  static constexpr int lines = (bytes - 2 * HALVES) / 4;
  static constexpr int in_file(int i) { return 4 * i; }  // dwords in the order of the file
  static constexpr int64_t packed_bytes = kGroupRows * bytes, lines_at = 2 * kGroupRows * HALVES;
  static_assert(lines_at + kLineBytes * lines == packed_bytes && packed_bytes % 64 == 0);
};

template <class Block>
struct Packing {  // most formats cannot be packed
  static constexpr bool exists = false;
};
template <>
struct Packing<BlockQ4_K> : PackedBlock<BlockQ4_K, 0> {  // d and dmin, three dwords of scales and mins, values
  static constexpr int dword(int i) { return 4 * i; }
  static constexpr int values(int chunk, int four) {
    return 4 + 8 * chunk + four;
  }  // values 64 * chunk + 4 * four, and those 32 further
};
template <>
struct Packing<BlockQ5_K> : PackedBlock<BlockQ5_K, 0> {  // fifth bits and the first values alternate, then the others
  static constexpr int dword(int i) {
    return i < 4 ? 4 * i : i < 20 ? (i % 2 ? 48 : 16) + (i - 4) / 2 * 4 : 48 + 4 * (i - 12);
  }
  static constexpr int values(int chunk, int four) { return chunk == 0 ? 5 + 2 * four : 12 + 8 * chunk + four; }
  static constexpr int fifth_bits(int four) { return 4 + 2 * four; }
};
template <>
struct Packing<BlockQ6_K> : PackedBlock<BlockQ6_K, 1> {
  // Scales; then for each 128 values, upper bits and the first 32 bytes of lower bits alternate, then the others.
  static constexpr int dword(int i) {
    if (i < 4) return 192 + 4 * i;
    const int n = (i - 4) / 24, at = (i - 4) % 24;
    return at < 16 ? (at % 2 ? 64 * n : 128 + 32 * n) + at / 2 * 4 : 64 * n + 32 + 4 * (at - 16);
  }
  static constexpr int half(int) { return 208; }
  static constexpr int values(int n, int second, int four) { return 4 + 24 * n + (second ? 16 + four : 2 * four + 1); }
  static constexpr int upper_bits(int n, int four) { return 4 + 24 * n + 2 * four; }
};

template <>
struct Packing<BlockIQ4_XS> : PackedBlock<BlockIQ4_XS, 0> {  // d and upper bits of scales, lower bits of scales, values
  static constexpr int dword(int i) { return 4 * i; }
};
// Eight blocks of 32 that begin with a half, or (EightWithMins) with two halves, which are a dword.
template <class Block>
struct EightWithHalves : PackedBlock<Block, 8, 8> {
  static constexpr int dwords = int(sizeof(Block)) / 4;  // per block
  static constexpr int in_file(int i) { return i / dwords * int(sizeof(Block)) + 2 + i % dwords * 4; }
  static constexpr int dword(int i) { return in_file(i); }
  static constexpr int half(int i) { return i * int(sizeof(Block)); }
};
template <class Block>
struct EightWithMins : PackedBlock<Block, 0, 8> {  // the eight dwords of d and m first
  static constexpr int size = int(sizeof(Block)), others = size / 4 - 1;
  static constexpr int dword(int i) { return i < 8 ? size * i : (i - 8) / others * size + 4 + (i - 8) % others * 4; }
};
template <>
struct Packing<BlockQ4_0> : EightWithHalves<BlockQ4_0> {};
template <>
struct Packing<BlockIQ4_NL> : EightWithHalves<BlockIQ4_NL> {};
template <>
struct Packing<BlockQ5_0> : EightWithHalves<BlockQ5_0> {};
template <>
struct Packing<BlockQ8_0> : EightWithHalves<BlockQ8_0> {  // values 16 apart alternate
  static constexpr int dword(int i) { return in_file(i / 8 * 8 + i % 2 * 4 + i % 8 / 2); }
};
template <>
struct Packing<BlockQ4_1> : EightWithMins<BlockQ4_1> {};
template <>
struct Packing<BlockQ5_1> : EightWithMins<BlockQ5_1> {};

// Used only for rows that are packed while they are multiplied, because a stored packed weight would be larger than in
// the file. A scale is the first byte of a half.
template <>
struct Packing<BlockMXFP4> {
  static constexpr bool exists = false;
  static constexpr int halves = 8, bytes = 8 * int(sizeof(BlockMXFP4)), lines = 32;
  static constexpr int64_t lines_at = 2 * kGroupRows * halves, packed_bytes = lines_at + kLineBytes * lines;
  static constexpr int half(int i) { return i * int(sizeof(BlockMXFP4)); }
  static constexpr int dword(int i) { return half(i / 4) + 1 + i % 4 * 4; }
};

// Unpacks packed block b of row `row` (256 values) of a slab with `groups` groups to the bytes of the file.
template <class Block>
inline void unpack_bytes(const uint8_t* slab, int64_t groups, int64_t row, int64_t b, uint8_t* to) {
  using P = Packing<Block>;
  const uint8_t* const from = slab + (b * groups + row / kGroupRows) * P::packed_bytes;
  const int64_t lane = row % kGroupRows;
  for (int u = 0; u < P::lines; u++) std::memcpy(to + P::dword(u), from + P::lines_at + kLineBytes * u + 4 * lane, 4);
  if constexpr (P::halves > 0)
    for (int i = 0; i < P::halves; i++) std::memcpy(to + P::half(i), from + 2 * (kGroupRows * i + lane), 2);
}

// Returns use(Block{}) if the format can be packed, else none().
template <class Use, class None>
inline auto with_packing(Format format, Use use, None none) {
  switch (format) {
    case Format::Q4_K:
      return use(BlockQ4_K{});
    case Format::Q5_K:
      return use(BlockQ5_K{});
    case Format::Q6_K:
      return use(BlockQ6_K{});
    case Format::IQ4_XS:
      return use(BlockIQ4_XS{});
    case Format::Q4_0:
      return use(BlockQ4_0{});
    case Format::Q4_1:
      return use(BlockQ4_1{});
    case Format::Q5_0:
      return use(BlockQ5_0{});
    case Format::Q5_1:
      return use(BlockQ5_1{});
    case Format::Q8_0:
      return use(BlockQ8_0{});
    case Format::IQ4_NL:
      return use(BlockIQ4_NL{});
    default:
      return none();
  }
}

}  // namespace qtensor
