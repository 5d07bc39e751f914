// Packing transposes four dwords of four rows at a time. There is one plain implementation for all machines.
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

struct Transposed {
  Four four[4];
};
inline Transposed transposed(Four a, Four b, Four c, Four d) {
  const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return {{__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
           __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)}};
}

template <class P>
constexpr int line_of(int dword) {
  int line = 0;
  while (P::dword(line) != dword) line++;
  return line;
}

// Copies four dwords that are consecutive in the file, of all rows, to their lines.
template <class P, int FIRST>
void transpose(const uint8_t* const (&rows)[kGroupRows], uint8_t* lines) {
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
    const Transposed to = transposed(a, b, c, d);
    for (int k = 0; k < 4; k++) std::memcpy(lines + kLineBytes * kTo[k] + 4 * r, &to.four[k], sizeof(Four));
  }
}
template <class P, int FIRST = 0>
void transpose_all(const uint8_t* const (&rows)[kGroupRows], uint8_t* lines) {
  if constexpr (FIRST < P::lines) {
    transpose<P, FIRST + 4 <= P::lines ? FIRST : P::lines - 4>(rows, lines);
    transpose_all<P, FIRST + 4>(rows, lines);
  }
}

// The inverse: copies four lines to the rows of their blocks in the file.
template <class P, int FIRST>
void untranspose(const uint8_t* lines, uint8_t* rows, int64_t row_bytes) {
  constexpr int kTo[4] = {P::in_file(FIRST), P::in_file(FIRST + 1), P::in_file(FIRST + 2), P::in_file(FIRST + 3)};
  constexpr int kFrom[4] = {line_of<P>(kTo[0]), line_of<P>(kTo[1]), line_of<P>(kTo[2]), line_of<P>(kTo[3])};
  constexpr bool kNeighbors = kTo[1] == kTo[0] + 4 && kTo[2] == kTo[0] + 8 && kTo[3] == kTo[0] + 12;
  for (int r = 0; r < kGroupRows; r += 4, rows += 4 * row_bytes) {
    const auto of_line = [&](int k) { return four_at(lines + kLineBytes * kFrom[k] + 4 * r); };
    const Transposed rows_of = transposed(of_line(0), of_line(1), of_line(2), of_line(3));
    for (int i = 0; i < 4; i++) {
      uint8_t* const to = rows + i * row_bytes;
      if constexpr (kNeighbors)
        std::memcpy(to + kTo[0], &rows_of.four[i], sizeof(Four));
      else
        for (int k = 0; k < 4; k++) {
          const uint32_t dword = rows_of.four[i][k];
          std::memcpy(to + kTo[k], &dword, 4);
        }
    }
  }
}
template <class P, int FIRST = 0>
void untranspose_all(const uint8_t* lines, uint8_t* rows, int64_t row_bytes) {
  if constexpr (FIRST < P::lines) {
    untranspose<P, FIRST + 4 <= P::lines ? FIRST : P::lines - 4>(lines, rows, row_bytes);
    untranspose_all<P, FIRST + 4>(lines, rows, row_bytes);
  }
}

// Reads the pages of a file in order, so that the hardware prefetches. Mapping the pages row by row took ten times as
// long.
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
      transpose_all<P>(at, slab + P::lines_at);
      if constexpr (P::halves > 0)
        for (int i = 0; i < P::halves; i++)
          for (int64_t r = 0; r < kGroupRows; r++) std::memcpy(slab + 2 * (kGroupRows * i + r), at[r] + P::half(i), 2);
    }
}

template <class Use>
auto with_its_packing(Format format, Use use) {
  return with_packing(
      format, [&]<class Block>(Block) { return use(Packing<Block>{}); },
      []() -> decltype(use(Packing<BlockQ4_K>{})) { refuse("this block format cannot be packed"); });
}

}  // namespace

bool is_packed(Format format) {
  const KernelTable& table = kernels();
  return table.slabs != nullptr && table.slabs(format, 1).kernel != nullptr;
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

void unpack_group(const Weight& packed, int64_t row, uint8_t* to) {
  const int64_t first = row / kSlabRows * kSlabRows, row_bytes = bytes_per_row(packed.format, packed.k);
  const int64_t groups = groups_of(packed.rows - first);
  with_its_packing(packed.format, [&]<class P>(P) {
    const uint8_t* from =
        packed.data + row / kSlabRows * packed.slab_stride + (row - first) / kGroupRows * P::packed_bytes;
    for (int64_t b = 0; b < packed.k / kSuperBlock; b++, from += groups * P::packed_bytes) {
      uint8_t* const blocks = to + b * P::bytes;
      read_in_order(from, P::packed_bytes);
      untranspose_all<P>(from + P::lines_at, blocks, row_bytes);
      if constexpr (P::halves > 0)
        for (int i = 0; i < P::halves; i++)
          for (int64_t r = 0; r < kGroupRows; r++)
            std::memcpy(blocks + r * row_bytes + P::half(i), from + 2 * (kGroupRows * i + r), 2);
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
      [] { refuse("this block format cannot be packed"); });
}

}  // namespace qtensor
