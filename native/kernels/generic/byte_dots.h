// Exact sums of products for attention over bytes, in plain C++:
//   out[i][lane] = start[i] + sum over groups of 4 of a[i][4 * group + k] * b[group][lane][k]
// for QUERIES rows i and `lanes` lanes; a row of b has `width` lanes. For scores a is a query and the lanes are
// positions, for values a are weights and the lanes are dimensions. `ahead` is what to fetch meanwhile, laid out as b.
// Sums stay below 2^31: 1024 dimensions of 127 * 255, and 128 positions of 32767 * 255.

using QueryLane = int16_t;

inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) {
  for (int64_t i = 0; i < dim; i++) out[i] = bytes[i];
}
// Sixteen whole numbers, each within 15 bits and a sign.
inline void lay_weights(int16_t* out, V16 whole) {
  for (int i = 0; i < 16; i++) out[i] = int16_t(whole.lane[i]);
}

template <int QUERIES>
inline void byte_dots(const int16_t* const* a, const uint8_t* b, int64_t groups, int64_t width, int64_t lanes,
                      const int32_t* start, int32_t* out, int64_t out_stride, const uint8_t*) {
  for (int i = 0; i < QUERIES; i++) {
    int32_t* const sums = out + i * out_stride;
    for (int64_t lane = 0; lane < lanes; lane++) sums[lane] = start[i];
    for (int64_t group = 0; group < groups; group++) {
      const int16_t* const x = a[i] + 4 * group;
      const uint8_t* const row = b + group * width * 4;
      for (int64_t lane = 0; lane < lanes; lane++) {
        const uint8_t* const y = row + 4 * lane;
        sums[lane] += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
      }
    }
  }
}

// Numbers of levels as the bytes of a table; cache_format.h has their order. A row of a group has row_bytes.
inline void unpack_4_bits(const uint8_t* packed, int64_t groups, int64_t row_bytes, const uint8_t* table, uint8_t* out,
                          const uint8_t*) {
  for (int64_t row = 0; row < groups / 2; row++) {
    for (int64_t i = 0; i < row_bytes; i++) {
      const uint8_t both = packed[row * row_bytes + i];
      out[2 * row * row_bytes + i] = table[both & 15];
      out[(2 * row + 1) * row_bytes + i] = table[both >> 4];
    }
  }
}
inline void unpack_3_bits(const uint8_t* packed, int64_t groups, int64_t row_bytes, const uint8_t* table, uint8_t* out,
                          const uint8_t*) {
  const uint8_t* const upper = packed + groups / 4 * row_bytes;
  for (int64_t group = 0; group < groups; group++) {
    for (int64_t i = 0; i < row_bytes; i++) {
      const int low = packed[group / 4 * row_bytes + i] >> (group % 4 * 2) & 3;
      const int high = upper[group / 8 * row_bytes + i] >> (group % 8) & 1;
      out[group * row_bytes + i] = table[low | high << 2];
    }
  }
}
