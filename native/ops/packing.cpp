// Packing turns dwords: four of four rows at a time. One plain implementation for every machine.
#include "ops/packing.h"

#include <cstring>

#include "kernel_table.h"
#include "packed_weights.h"
#include "runtime/dispatch.h"
#include "runtime/work_sharing.h"

namespace qtensor {
namespace {

typedef uint32_t Four __attribute__((vector_size(16)));
Four four_at(const uint8_t* from) {
  Four four;
  std::memcpy(&four, from, sizeof four);
  return four;
}

template <class P>
constexpr int line_of(int dword) {
  int line = 0;
  while (P::dword(line) != dword) line++;
  return line;
}

// Four dwords that follow one another in the file, of all rows, to their lines.
template <class P, int FIRST>
void turn(const uint8_t* const (&rows)[kGroupRows], uint8_t* lines) {
  constexpr int kFrom[4] = {P::in_file(FIRST), P::in_file(FIRST + 1), P::in_file(FIRST + 2), P::in_file(FIRST + 3)};
  constexpr int kTo[4] = {line_of<P>(kFrom[0]), line_of<P>(kFrom[1]), line_of<P>(kFrom[2]), line_of<P>(kFrom[3])};
  constexpr bool kNeighbors = kFrom[1] == kFrom[0] + 4 && kFrom[2] == kFrom[0] + 8 && kFrom[3] == kFrom[0] + 12;
  const auto four_of = [&](const uint8_t* row) {
    if constexpr (kNeighbors) return four_at(row + kFrom[0]);
    uint32_t dwords[4];
    for (int k = 0; k < 4; k++) std::memcpy(dwords + k, row + kFrom[k], 4);
    return Four{dwords[0], dwords[1], dwords[2], dwords[3]};
  };
  for (int r = 0; r < kGroupRows; r += 4) {
    const Four a = four_of(rows[r]), b = four_of(rows[r + 1]), c = four_of(rows[r + 2]), d = four_of(rows[r + 3]);
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Four turned[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                            __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5),
                            __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
    for (int k = 0; k < 4; k++) std::memcpy(lines + kLineBytes * kTo[k] + 4 * r, &turned[k], sizeof turned[k]);
  }
}
template <class P, int FIRST = 0>
void turn_all(const uint8_t* const (&rows)[kGroupRows], uint8_t* lines) {
  if constexpr (FIRST < P::lines) {
    turn<P, FIRST + 4 <= P::lines ? FIRST : P::lines - 4>(rows, lines);
    turn_all<P, FIRST + 4>(rows, lines);
  }
}

// So that pages of a file are met in order: by rows in turns it took ten times as long to map them.
void read_in_order(const uint8_t* from, int64_t bytes) {
  uint8_t all = 0;
  for (int64_t at = 0; at < bytes; at += 64) all ^= from[at];
  asm volatile("" ::"r"(all));
}

template <class P>
void pack_slab(const uint8_t* from, int64_t rows, int64_t blocks, uint8_t* slab) {
  static constexpr uint8_t kZeros[P::bytes] = {};
  const int64_t groups = groups_of(rows), row_bytes = blocks * P::bytes;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t g = 0; g < groups; g++, slab += P::packed_bytes) {
      const uint8_t* at[kGroupRows];
      for (int64_t r = 0; r < kGroupRows; r++) {
        const int64_t row = kGroupRows * g + r;
        at[r] = row < rows ? from + row * row_bytes + b * P::bytes : kZeros;
      }
      turn_all<P>(at, slab + P::lines_at);
      if constexpr (P::halves > 0)
        for (int i = 0; i < P::halves; i++)
          for (int64_t r = 0; r < kGroupRows; r++) std::memcpy(slab + 2 * (kGroupRows * i + r), at[r] + P::half(i), 2);
    }
}

template <class Use>
auto with_its_packing(Format format, Use use) {
  return with_packing(
      format, [&]<class Block>(Block) { return use(Packing<Block>{}); },
      []() -> decltype(use(Packing<BlockQ4_K>{})) { refuse("this block format is not packed"); });
}

}  // namespace

bool is_packed(Format format) {
  const KernelTable& table = kernels();
  return table.slabs != nullptr && table.slabs(format).kernel != nullptr;
}

int64_t slab_bytes(Format format, int64_t k, int64_t rows) {
  return with_its_packing(format, [=]<class P>(P) { return groups_of(rows) * (k / kSuperBlock) * P::packed_bytes; });
}

int64_t packed_bytes(const Weight& w) {
  const int64_t before = (w.rows - 1) / kSlabRows;
  return before * w.slab_stride + slab_bytes(w.format, w.k, w.rows - before * kSlabRows);
}

void pack_weight(const Weight& rows, uint8_t* to, int64_t slab_stride) {
  const int64_t row_bytes = bytes_per_row(rows.format, rows.k);
  with_its_packing(rows.format, [&]<class P>(P) {
    for (int64_t row = 0; row < rows.rows; row += kSlabRows, to += slab_stride) {
      const int64_t count = rows.rows - row < kSlabRows ? rows.rows - row : kSlabRows;
      read_in_order(rows.data + row * row_bytes, count * row_bytes);
      pack_slab<P>(rows.data + row * row_bytes, count, rows.k / kSuperBlock, to);
    }
  });
}

void unpack_row(const Weight& packed, int64_t row, uint8_t* to) {
  const int64_t first = row / kSlabRows * kSlabRows;
  const uint8_t* const slab = packed.data + row / kSlabRows * packed.slab_stride;
  const int64_t groups = groups_of(packed.rows - first);
  with_packing(
      packed.format,
      [&]<class Block>(Block) {
        for (int64_t b = 0; b < packed.k / kSuperBlock; b++, to += Packing<Block>::bytes)
          unpack_bytes<Block>(slab, groups, row - first, b, to);
      },
      [] { refuse("this block format is not packed"); });
}

}  // namespace qtensor
