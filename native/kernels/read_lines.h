// Reads memory and nothing else, with loads as wide as the family has them: what its kernels could reach at the most.

#if defined(__AVX512F__)
typedef uint64_t ReadVector __attribute__((vector_size(64), may_alias, aligned(8)));
#elif defined(__AVX2__)
typedef uint64_t ReadVector __attribute__((vector_size(32), may_alias, aligned(8)));
#else
typedef uint64_t ReadVector __attribute__((vector_size(16), may_alias, aligned(8)));
#endif

inline uint64_t read_lines(const uint8_t* data, int64_t lines) {
  constexpr int kParts = 4;
  constexpr int64_t kStep = kParts * int64_t(sizeof(ReadVector));
  ReadVector sums[kParts] = {};
  const int64_t bytes = 64 * lines;
  int64_t at = 0;
  for (; at + kStep <= bytes; at += kStep)
    for (int j = 0; j < kParts; j++) sums[j] ^= *(const ReadVector*)(data + at + j * int64_t(sizeof(ReadVector)));
  for (; at < bytes; at += int64_t(sizeof(ReadVector))) sums[0] ^= *(const ReadVector*)(data + at);
  const ReadVector all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  uint64_t word = 0;
  for (size_t j = 0; j < sizeof(ReadVector) / 8; j++) word ^= all[j];
  return word;
}
