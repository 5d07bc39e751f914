// Dequantization of rows, for embeddings. There is one plain implementation for all machines, because a step reads only
// a few rows.
#include "ops/dequantize.h"

#include <cstring>

#include "kernels/generic/vec16.h"
#include "kernels/portable/unpacked_blocks.h"
#include "runtime/work_sharing.h"

namespace qtensor {
namespace {

template <class Block, class Write>
void each_block(const uint8_t* row, int64_t count, Write write) {
  for (int64_t b = 0; b < count; b++) {
    Block block;
    std::memcpy(&block, row + b * int64_t(sizeof block), sizeof block);
    write(b, block);
  }
}

void scale_and_min(const uint8_t* packed, int j, int& scale, int& min) {
  if (j < 4) {
    scale = packed[j] & 63;
    min = packed[j + 4] & 63;
  } else {
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
    min = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  }
}

template <class Block, class Value>
void with_mins(const uint8_t* row, int64_t k, float* out, Value value) {
  each_block<Block>(row, k / 256, [&](int64_t b, const Block& w) {
    const float d = half_to_float(w.d), dmin = half_to_float(w.dmin);
    for (int j = 0; j < 8; j++) {
      int scale, min;
      scale_and_min(w.scales, j, scale, min);
      const float step = d * float(scale), low = dmin * float(min);
      for (int l = 0; l < 32; l++) out[256 * b + 32 * j + l] = step * float(value(w, j, l)) - low;
    }
  });
}

// Formats that kernels unpack first.
template <class F>
void unpacked_row(const uint8_t* row, int64_t k, float* out) {
  if constexpr (F::kIs256)
    each_block<typename F::Block>(row, k / 256, [&](int64_t b, const typename F::Block& block) {
      Unpacked256 w;
      unpack(block, w);
      for (int i = 0; i < 256; i++) {
        const float value = half_to_float(w.d) * F::kStep * float(w.scales[i / 16]) * float(w.q[i]);
        out[256 * b + i] = F::kHasMins ? value - half_to_float(w.dmin) * float(w.mins[i / 16]) : value;
      }
    });
  else
    each_block<typename F::Block>(row, k / 32, [&](int64_t b, const typename F::Block& block) {
      Unpacked32 w;
      unpack(block, w, half_to_float);
      for (int l = 0; l < 32; l++) out[32 * b + l] = F::kHasMins ? w.d * float(w.q[l]) + w.m : w.d * float(w.q[l]);
    });
}

int nibble(const uint8_t* qs, int j, int l) { return (j % 2 ? qs[32 * (j / 2) + l] >> 4 : qs[32 * (j / 2) + l] & 15); }

}  // namespace

int64_t bytes_per_row(Format format, int64_t k) {
  switch (format) {
    case Format::F32:
      return 4 * k;
    case Format::F16:
    case Format::BF16:
      return 2 * k;
    case Format::Q4_0:
      return k / 32 * int64_t(sizeof(BlockQ4_0));
    case Format::Q4_1:
      return k / 32 * int64_t(sizeof(BlockQ4_1));
    case Format::Q8_0:
      return k / 32 * int64_t(sizeof(BlockQ8_0));
    case Format::Q4_K:
      return k / 256 * int64_t(sizeof(BlockQ4_K));
    case Format::Q5_K:
      return k / 256 * int64_t(sizeof(BlockQ5_K));
    case Format::Q6_K:
      return k / 256 * int64_t(sizeof(BlockQ6_K));
    default:
      return with_unpacked_format(
          format, [k]<class F>(F) { return k / (F::kIs256 ? 256 : 32) * int64_t(sizeof(typename F::Block)); },
          []() -> int64_t { refuse("this block format is not supported"); });
  }
}

void dequantize_row(Format format, const uint8_t* row, int64_t k, float* out) {
  switch (format) {
    case Format::F32:
      std::memcpy(out, row, size_t(k) * 4);
      break;
    case Format::F16:
    case Format::BF16:
      for (int64_t i = 0; i < k; i++) {
        uint16_t bits;
        std::memcpy(&bits, row + 2 * i, 2);
        const uint32_t wide = uint32_t(bits) << 16;
        if (format == Format::F16)
          out[i] = half_to_float(bits);
        else
          std::memcpy(out + i, &wide, 4);
      }
      break;
    case Format::Q8_0:
      each_block<BlockQ8_0>(row, k / 32, [&](int64_t b, const BlockQ8_0& w) {
        for (int l = 0; l < 32; l++) out[32 * b + l] = half_to_float(w.d) * float(w.qs[l]);
      });
      break;
    case Format::Q4_0:
      each_block<BlockQ4_0>(row, k / 32, [&](int64_t b, const BlockQ4_0& w) {
        for (int l = 0; l < 32; l++)
          out[32 * b + l] = half_to_float(w.d) * float((l < 16 ? w.qs[l] & 15 : w.qs[l - 16] >> 4) - 8);
      });
      break;
    case Format::Q4_1:
      each_block<BlockQ4_1>(row, k / 32, [&](int64_t b, const BlockQ4_1& w) {
        for (int l = 0; l < 32; l++)
          out[32 * b + l] = half_to_float(w.d) * float(l < 16 ? w.qs[l] & 15 : w.qs[l - 16] >> 4) + half_to_float(w.m);
      });
      break;
    case Format::Q4_K:
      with_mins<BlockQ4_K>(row, k, out, [](const BlockQ4_K& w, int j, int l) { return nibble(w.qs, j, l); });
      break;
    case Format::Q5_K:
      with_mins<BlockQ5_K>(
          row, k, out, [](const BlockQ5_K& w, int j, int l) { return nibble(w.qs, j, l) | (w.qh[l] >> j & 1) << 4; });
      break;
    case Format::Q6_K:
      each_block<BlockQ6_K>(row, k / 256, [&](int64_t b, const BlockQ6_K& w) {
        for (int i = 0; i < 256; i++) {
          const int n = i / 128, part = i % 128 / 32, l = i % 32;
          const uint8_t low = w.ql[64 * n + 32 * (part % 2) + l];
          const int q = (part < 2 ? low & 15 : low >> 4) | (w.qh[32 * n + l] >> (2 * part) & 3) << 4;
          out[256 * b + i] = half_to_float(w.d) * float(w.scales[i / 16]) * float(q - 32);
        }
      });
      break;
    default:
      with_unpacked_format(
          format, [&]<class F>(F) { unpacked_row<F>(row, k, out); },
          [] { refuse("this block format is not supported"); });
  }
}

}  // namespace qtensor
