// Only reads memory, with the widest loads of the family, to measure the upper limit for its kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qtensor {
namespace {

#if defined(__AVX512F__)
typedef uint64_t ReadVector __attribute__((vector_size(64), may_alias, aligned(8)));
#elif defined(__AVX2__)
typedef uint64_t ReadVector __attribute__((vector_size(32), may_alias, aligned(8)));
#else
typedef uint64_t ReadVector __attribute__((vector_size(16), may_alias, aligned(8)));
#endif

// The exclusive or of the words of a vector.
inline uint64_t reduce_words(ReadVector all) {
  uint64_t word = 0;
  for (size_t j = 0; j < sizeof(ReadVector) / 8; j++) word ^= all[j];
  return word;
}

inline uint64_t read_in_order(const uint8_t* data, int64_t lines) {
  constexpr int kParts = 4;
  constexpr int64_t kStep = kParts * int64_t(sizeof(ReadVector));
  ReadVector sums[kParts] = {};
  const int64_t bytes = 64 * lines;
  int64_t at = 0;
  for (; at + kStep <= bytes; at += kStep)
    for (int j = 0; j < kParts; j++) sums[j] ^= *(const ReadVector*)(data + at + j * int64_t(sizeof(ReadVector)));
  for (; at < bytes; at += int64_t(sizeof(ReadVector))) sums[0] ^= *(const ReadVector*)(data + at);
  return reduce_words(sums[0] ^ sums[1] ^ sums[2] ^ sums[3]);
}

// Reads PLACES equal parts alternately, two lines of each in turn, which are prefetched a little earlier.
template <int PLACES>
inline uint64_t read_side_by_side(const uint8_t* data, int64_t lines) {
  constexpr int64_t kEarlier = 2048, kTwoLines = 128;
  const int64_t part = lines / (2 * PLACES) * kTwoLines;
  ReadVector sums[PLACES] = {};
  for (int64_t at = 0; at < part; at += kTwoLines)
    for (int p = 0; p < PLACES; p++) {
      const uint8_t* const from = data + p * part + at;
      __builtin_prefetch(from + kEarlier);
      __builtin_prefetch(from + kEarlier + 64);
      for (int64_t i = 0; i < kTwoLines; i += int64_t(sizeof(ReadVector))) sums[p] ^= *(const ReadVector*)(from + i);
    }
  ReadVector all = {};
  for (int p = 0; p < PLACES; p++) all ^= sums[p];
  return reduce_words(all) ^ read_in_order(data + PLACES * part, lines - PLACES * part / 64);
}

inline uint64_t read_lines(const uint8_t* data, int64_t lines, int places) {
  return places == 4   ? read_side_by_side<4>(data, lines)
         : places == 2 ? read_side_by_side<2>(data, lines)
                       : read_in_order(data, lines);
}

}  // namespace
}  // namespace qtensor
