// Inputs for the kernels in this folder's programs: rows of every format, activations, and weights with arbitrary
// bytes.
#pragma once

#include <cmath>
#include <cstring>
#include <iterator>

#include "blocks.h"
#include "guarded.h"
#include "ops/dequantize.h"

namespace qtensor {

inline constexpr Format kFormats[] = {Format::F32,   Format::F16,     Format::BF16,  Format::Q4_0,    Format::Q4_1,
                                      Format::Q5_0,  Format::Q5_1,    Format::Q8_0,  Format::Q2_K,    Format::Q3_K,
                                      Format::Q4_K,  Format::Q5_K,    Format::Q6_K,  Format::IQ2_XXS, Format::IQ2_XS,
                                      Format::IQ2_S, Format::IQ3_XXS, Format::IQ3_S, Format::IQ4_NL,  Format::IQ1_S,
                                      Format::IQ1_M, Format::IQ4_XS,  Format::TQ1_0, Format::TQ2_0,   Format::MXFP4};
inline Format any_format(Random& random) { return kFormats[random.below(std::size(kFormats))]; }

inline bool is_plain(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }
inline bool is_super(Format f) {
  for (const Format small : {Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0, Format::IQ4_NL})
    if (f == small) return false;
  return !is_plain(f) && f != Format::MXFP4;
}

inline int64_t row_length(Format f, Random& random) {
  if (is_super(f)) return 256 * random.from(1, 5);
  return is_plain(f) ? random.from(1, 700) : 32 * random.from(1, 40);
}

inline void fill(Guarded<float>& x, Random& random) {
  const bool special = random.often(10);
  for (float& v : x) v = random.real() * (random.often(2) ? 100.0f : 1.0f);
  if (special && x.size() > 0) x[random.below(x.size())] = random.often(50) ? NAN : INFINITY;
}

// Random bytes with float16 fields as a file reader accepts them, without extreme exponents; with `wild`, these as
// well.
inline void fill(Guarded<uint8_t>& data, Format f, Random& random, bool wild = false) {
  for (uint8_t& byte : data) byte = uint8_t(random.bits());
  if (wild) return;
  auto tame = [&](int64_t at) { data[at + 1] = uint8_t((data[at + 1] & 0x80) | (0x10 + random.below(0x18))); };
  const int64_t step = is_plain(f) ? (f == Format::F32 ? 4 : 2) : bytes_per_row(f, is_super(f) ? 256 : 32);
  for (int64_t at = 0; at + step <= data.size(); at += step) {
    if (f == Format::F32) {
      const float value = random.real();
      std::memcpy(&data[at], &value, 4);
    } else if (f == Format::BF16) {
      data[at + 1] = uint8_t((data[at + 1] & 0x80) | 0x3e);
    } else if (f == Format::MXFP4) {
      data[at] = uint8_t(0x60 + random.below(0x20));
    } else if (f == Format::IQ1_M) {
      data[at + 55] = uint8_t(data[at + 55] & 0x0f) | 0x30;
    } else {
      const int64_t half = f == Format::Q6_K    ? 208
                           : f == Format::Q2_K  ? 80
                           : f == Format::Q3_K  ? 108
                           : f == Format::TQ1_0 ? 52
                           : f == Format::TQ2_0 ? 64
                                                : 0;
      tame(at + half);
      for (const Format two : {Format::Q4_1, Format::Q5_1, Format::Q2_K, Format::Q4_K, Format::Q5_K})
        if (f == two) tame(at + half + 2);
    }
  }
}

}  // namespace qtensor
