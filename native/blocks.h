// The quantised blocks of GGUF, byte for byte as they lie in the file, and the block activations are quantised to.
// Source of the layouts: ggml's ggml-common.h. All little-endian; `half` fields hold IEEE binary16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qtensor {

enum class Format : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  BF16 = 30
};

constexpr int64_t kSuperBlock = 256;  // values that share one float step: a K-quant block, a Q8K activation block
constexpr int64_t kSubBlock = 32;

using half = uint16_t;

#pragma pack(push, 1)
struct BlockQ4_0 {
  half d;
  uint8_t qs[16];
};
struct BlockQ4_1 {
  half d, m;
  uint8_t qs[16];
};
struct BlockQ8_0 {
  half d;
  int8_t qs[32];
};
struct BlockQ4_K {
  half d, dmin;
  uint8_t scales[12];  // eight 6-bit scales and eight 6-bit mins, packed
  uint8_t qs[128];
};
struct BlockQ5_K {
  half d, dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
struct BlockQ6_K {
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  half d;  // last, so the block is only 2-byte aligned
};
#pragma pack(pop)

static_assert(sizeof(BlockQ4_0) == 18 && offsetof(BlockQ4_0, qs) == 2);
static_assert(sizeof(BlockQ4_1) == 20 && offsetof(BlockQ4_1, m) == 2 && offsetof(BlockQ4_1, qs) == 4);
static_assert(sizeof(BlockQ8_0) == 34 && offsetof(BlockQ8_0, qs) == 2);
static_assert(sizeof(BlockQ4_K) == 144 && offsetof(BlockQ4_K, scales) == 4 && offsetof(BlockQ4_K, qs) == 16);
static_assert(sizeof(BlockQ5_K) == 176 && offsetof(BlockQ5_K, qh) == 16 && offsetof(BlockQ5_K, qs) == 48);
static_assert(sizeof(BlockQ6_K) == 210 && offsetof(BlockQ6_K, qh) == 128 && offsetof(BlockQ6_K, scales) == 192 &&
              offsetof(BlockQ6_K, d) == 208);

// 256 activations as signed bytes with one scale: x ~ d * q. The sums serve the mins of Q4_K and Q5_K and the offset of
// Q6_K. A row whose length is not a multiple of 256 ends in a block padded with zeros.
struct alignas(64) BlockQ8K {
  int8_t q[256];
  int16_t sums16[16];  // of 16 consecutive q
  int16_t sums32[8];   // of 32 consecutive q
  float d;
  uint8_t padding[12];
};
static_assert(sizeof(BlockQ8K) == 320 && offsetof(BlockQ8K, sums16) == 256 && offsetof(BlockQ8K, d) == 304);

}  // namespace qtensor
