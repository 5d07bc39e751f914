// Exact sums of products for attention over bytes, in plain C++:
//   out[i][lane] = start[i] + sum over groups of 4 of a[i][4 * group + k] * b[group][lane][k]
// for QUERIES rows i and `lanes` lanes; a row of b has `width` lanes. For scores, a is a query and the lanes are
// positions. For values, a are weights and the lanes are dimensions. b may be packed in 4 or 3 bits (cache_format.h);
// it is then read to the end of a row, so a has zeros up to a multiple of 32. `FetchAhead` prefetches meanwhile. Sums
// are below 2^31: 1024 dimensions of 127 * 255, and 128 positions of 32767 * 255.
#pragma once

#include <cstdint>

#include "kernels/portable/fetch_ahead.h"
#include "kernels/portable/level_tables.h"
#include "vec16.h"

namespace qtensor {
namespace {

using QueryLane = int16_t;
constexpr int64_t kBlockLanes = 64;
// Prefetching hardly matters for these kernels.
constexpr uint32_t kScoreGroupTime = 1, kValueGroupTime = 1;
// Whether byte_dots multiplies values as signed levels, without 128 added, so that no excess must be subtracted.
constexpr bool kSignedValues = false;

inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) {
  for (int64_t i = 0; i < dim; i++) out[i] = bytes[i];
}
// Stores sixteen integers of 15 bits and a sign.
inline void lay_weights(int16_t* out, V16 whole) {
  for (int i = 0; i < 16; i++) out[i] = int16_t(whole.lane[i]);
}

// Byte `at` of a group's row after unpacking.
template <int BITS>
inline int unpacked_byte(const uint8_t* b, int64_t groups, int64_t group, int64_t row_bytes, int64_t at) {
  if constexpr (BITS == 8) return b[group * row_bytes + at];
  if constexpr (BITS == 4) return kLevels4.bytes[b[group / 2 * row_bytes + at] >> group % 2 * 4 & 15];
  const int low = b[group / 4 * row_bytes + at] >> group % 4 * 2 & 3;
  const int high = b[(groups / 4 + group / 8) * row_bytes + at] >> group % 8 & 1;
  return kLevels3.bytes[low | high << 2];
}

template <int BITS>
inline void unpack_groups(const uint8_t* packed, int64_t groups, int64_t width, uint8_t* out) {
  for (int64_t group = 0; group < groups; group++)
    for (int64_t i = 0; i < 4 * width; i++)
      out[group * 4 * width + i] = uint8_t(unpacked_byte<BITS>(packed, groups, group, 4 * width, i));
}

template <int QUERIES, int BITS>
inline void byte_dots(const int16_t* const* a, const uint8_t* b, int64_t groups, int64_t used, int64_t width,
                      int64_t lanes, const int32_t* start, int32_t* out, int64_t out_stride, FetchAhead&) {
  for (int i = 0; i < QUERIES; i++) {
    int32_t* const sums = out + i * out_stride;
    for (int64_t lane = 0; lane < lanes; lane++) sums[lane] = start[i];
    for (int64_t group = 0; group < used; group++) {
      const int16_t* const x = a[i] + 4 * group;
      for (int64_t at = 0; at < 4 * lanes; at += 4) {
        int sum = 0;
        for (int k = 0; k < 4; k++) sum += x[k] * unpacked_byte<BITS>(b, groups, group, 4 * width, at + k);
        sums[at / 4] += sum;
      }
    }
  }
}

}  // namespace
}  // namespace qtensor
