// Exact sums of products for attention over bytes (specified in generic/byte_dots.h), written once over the registers
// of AVX2, AVX-512 or NEON. Packed levels are looked up just before the products, or unpacked once for many queries.
#pragma once

#include <cstdint>

#include "byte_words.h"
#include "kernels/portable/fetch_ahead.h"
#include "kernels/portable/level_tables.h"

namespace qtensor {
namespace {

// One row of packed bytes, which contains `groups` groups. SIGNED: bytes<GROUP>() are levels, else levels plus 128.
template <int BITS, bool SIGNED>
struct PackedRow;
template <bool SIGNED>
struct PackedRow<8, SIGNED> {
  static constexpr int groups = 1;
  Words raw;
  void load(const uint8_t* b, int64_t row, int64_t, int64_t row_bytes) { raw = w_load(b + row * row_bytes); }
  template <int GROUP>
  Words bytes() const {
    return SIGNED ? w_xor(raw, w_bytes(128)) : raw;
  }
};
template <bool SIGNED>
struct PackedRow<4, SIGNED> {
  static constexpr int groups = 2;
  Words raw;
  void load(const uint8_t* b, int64_t row, int64_t, int64_t row_bytes) { raw = w_load(b + row * row_bytes); }
  template <int GROUP>
  Words bytes() const {
    return w_look_up<4>(w_table<SIGNED>(kLevels4.bytes), GROUP == 0 ? raw : w_right<4>(raw));
  }
};
template <bool SIGNED>
struct PackedRow<3, SIGNED> {
  static constexpr int groups = 8;
  Words low[2], high;
  void load(const uint8_t* b, int64_t row, int64_t all_groups, int64_t row_bytes) {
    low[0] = w_load(b + 2 * row * row_bytes);
    low[1] = w_load(b + (2 * row + 1) * row_bytes);
    high = w_load(b + (all_groups / 4 + row) * row_bytes);
  }
  template <int GROUP>
  Words bytes() const {
    const Words two = w_right<GROUP % 4 * 2>(low[GROUP / 4]);
    Words one;
    if constexpr (GROUP < 2)
      one = w_left<2 - GROUP>(high);
    else
      one = w_right<GROUP - 2>(high);
    return w_look_up<3>(w_table<SIGNED>(kLevels3.bytes), w_lower_bits<2>(two, one));
  }
};

template <int GROUP, int QUERIES, int VECTORS, class Lane, class Row>
inline void add_row(const Lane* const* a, int64_t first, const Row (&row)[VECTORS],
                    DotSums<Lane, QUERIES, VECTORS>& sums, FetchAhead& ahead) {
  if constexpr (GROUP < Row::groups) {
    constexpr uint32_t time = sizeof(Lane) == sizeof(QueryLane) ? kScoreGroupTime : kValueGroupTime;
    if constexpr (Row::groups == 1)
      ahead.pass(time * VECTORS / kDotVectors);
    else if (GROUP % 2 == 0 || !ahead.seldom)
      ahead.pass((ahead.seldom ? 2 : 1) * time * VECTORS / kDotVectors);
    Words bytes[VECTORS];
    for (int v = 0; v < VECTORS; v++) bytes[v] = row[v].template bytes<GROUP>();
    sums.add(a, first + GROUP, bytes);
    add_row<GROUP + 1, QUERIES, VECTORS>(a, first, row, sums, ahead);
  }
}

// Computes VECTORS registers of lanes over all groups.
template <int QUERIES, int BITS, int VECTORS, class Lane>
inline void byte_dots_block(const Lane* const* a, const uint8_t* b, int64_t groups, int64_t used, int64_t row_bytes,
                            const int32_t* start, int32_t* out, int64_t out_stride, FetchAhead& ahead) {
  using Sums = DotSums<Lane, QUERIES, VECTORS>;
  using Row = PackedRow<BITS, Sums::kSigned>;
  Sums sums(start);
  const int64_t rows = (used + Row::groups - 1) / Row::groups;
  for (int64_t row = 0; row < rows; row++) {
    Row packed[VECTORS];
    for (int v = 0; v < VECTORS; v++) packed[v].load(b + v * kWordBytes, row, groups, row_bytes);
    add_row<0, QUERIES, VECTORS>(a, row * Row::groups, packed, sums, ahead);
  }
  for (int i = 0; i < QUERIES; i++)
    for (int v = 0; v < VECTORS; v++) w_store(out + i * out_stride + v * kWordBytes / 4, sums.total(i, v));
}

// b has `groups` groups; only the first `used` are read.
template <int QUERIES, int BITS, class Lane>
inline void byte_dots(const Lane* const* a, const uint8_t* b, int64_t groups, int64_t used, int64_t width,
                      int64_t lanes, const int32_t* start, int32_t* out, int64_t out_stride, FetchAhead& ahead) {
  constexpr int vectors = dot_vectors<Lane>();
  constexpr int64_t block_lanes = vectors * kWordBytes / 4;
  int64_t lane = 0;
  for (; lane + block_lanes <= lanes; lane += block_lanes)
    byte_dots_block<QUERIES, BITS, vectors>(a, b + 4 * lane, groups, used, 4 * width, start, out + lane, out_stride,
                                            ahead);
  for (; lane < lanes; lane += kWordBytes / 4)
    byte_dots_block<QUERIES, BITS, 1>(a, b + 4 * lane, groups, used, 4 * width, start, out + lane, out_stride, ahead);
}

template <int GROUP, class Row>
inline void store_row(const Row& row, uint8_t* out, int64_t row_bytes) {
  if constexpr (GROUP < Row::groups) {
    w_store(out + GROUP * row_bytes, row.template bytes<GROUP>());
    store_row<GROUP + 1>(row, out, row_bytes);
  }
}
template <int BITS>
inline void unpack_groups(const uint8_t* packed, int64_t groups, int64_t width, uint8_t* out) {
  using Row = PackedRow<BITS, false>;
  const int64_t row_bytes = 4 * width;
  for (int64_t row = 0; row < groups / Row::groups; row++) {
    for (int64_t i = 0; i < row_bytes; i += kWordBytes) {
      Row one;
      one.load(packed + i, row, groups, row_bytes);
      store_row<0>(one, out + row * Row::groups * row_bytes + i, row_bytes);
    }
  }
}

}  // namespace
}  // namespace qtensor
