// The quantized blocks of GGUF, byte for byte as in the file, and the blocks to which activations are quantized.
// Source of the layouts: ggml's ggml-common.h. All are little-endian; `half` fields hold IEEE binary16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qtensor {

enum class Format : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  IQ1_M = 29,
  BF16 = 30,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39
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
  half d;  // last, so the block is aligned to 2 bytes only
};
struct BlockQ5_0 {
  half d;
  uint8_t qh[4], qs[16];
};
struct BlockQ5_1 {
  half d, m;
  uint8_t qh[4], qs[16];
};
struct BlockIQ4_NL {
  half d;
  uint8_t qs[16];
};
struct BlockMXFP4 {
  uint8_t e;  // the exponent of a power of two
  uint8_t qs[16];
};
struct BlockQ2_K {
  uint8_t scales[16];  // a scale in the low four bits, a min in the high four
  uint8_t qs[64];
  half d, dmin;
};
struct BlockQ3_K {
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];  // sixteen 6-bit scales
  half d;
};
struct BlockIQ4_XS {
  half d;
  uint16_t scales_h;
  uint8_t scales_l[4], qs[128];
};
struct BlockIQ2_XXS {
  half d;
  uint8_t qs[64];  // for each 32 values: four grid row numbers, then four times seven sign bits and a 4-bit scale
};
struct BlockIQ2_XS {
  half d;
  uint16_t qs[32];  // nine bits of a grid row number, seven of signs
  uint8_t scales[8];
};
struct BlockIQ2_S {
  half d;
  uint8_t qs[32], signs[32], qh[8], scales[8];
};
struct BlockIQ3_XXS {
  half d;
  uint8_t qs[64];
  uint8_t scales[32];  // four bytes for each 32 values: four times seven sign bits and a scale of four bits
};
struct BlockIQ3_S {
  half d;
  uint8_t qs[64], qh[8], signs[32], scales[4];
};
struct BlockIQ1_S {
  half d;
  uint8_t qs[32];
  uint16_t qh[8];  // four times three bits of grid row numbers, three of a scale, one of the shift
};
struct BlockIQ1_M {
  uint8_t qs[32], qh[16];
  uint16_t scales[4];  // each has four scales of three bits and four bits of the half d
};
struct BlockTQ1_0 {
  uint8_t qs[48], qh[4];  // five ternary digits per byte; qh has four per byte
  half d;
};
struct BlockTQ2_0 {
  uint8_t qs[64];
  half d;
};
#pragma pack(pop)

static_assert(sizeof(BlockQ4_0) == 18 && offsetof(BlockQ4_0, qs) == 2);
static_assert(sizeof(BlockQ4_1) == 20 && offsetof(BlockQ4_1, m) == 2 && offsetof(BlockQ4_1, qs) == 4);
static_assert(sizeof(BlockQ8_0) == 34 && offsetof(BlockQ8_0, qs) == 2);
static_assert(sizeof(BlockQ4_K) == 144 && offsetof(BlockQ4_K, scales) == 4 && offsetof(BlockQ4_K, qs) == 16);
static_assert(sizeof(BlockQ5_K) == 176 && offsetof(BlockQ5_K, qh) == 16 && offsetof(BlockQ5_K, qs) == 48);
static_assert(sizeof(BlockQ6_K) == 210 && offsetof(BlockQ6_K, qh) == 128 && offsetof(BlockQ6_K, scales) == 192 &&
              offsetof(BlockQ6_K, d) == 208);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24 && sizeof(BlockIQ4_NL) == 18);
static_assert(sizeof(BlockMXFP4) == 17 && sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110);
static_assert(sizeof(BlockIQ4_XS) == 136 && sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74);
static_assert(sizeof(BlockIQ2_S) == 82 && sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110);
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56);
static_assert(sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);

// 256 activations as signed bytes with one scale: x ~ d * q. The sums are used for the mins of Q4_K and Q5_K and the
// offset of Q6_K. A row whose length is not a multiple of 256 ends in a block padded with zeros.
struct alignas(64) BlockQ8K {
  int8_t q[256];
  int16_t sums16[16];  // of 16 consecutive q
  int16_t sums32[8];   // of 32 consecutive q
  float d;
  uint8_t padding[12];
};
static_assert(sizeof(BlockQ8K) == 320 && offsetof(BlockQ8K, sums16) == 256 && offsetof(BlockQ8K, d) == 304);

// 256 activations for weights in blocks of 32: each 32 activations have a scale, x ~ d[i] * q.
struct alignas(64) BlockQ8x32 {
  int8_t q[256];
  float d[8];
  int32_t sums[8];  // of 32 consecutive q
};
static_assert(sizeof(BlockQ8x32) == 320 && offsetof(BlockQ8x32, d) == 256 && offsetof(BlockQ8x32, sums) == 288);

constexpr bool has_blocks_of_32(Format f) {
  return f == Format::Q4_0 || f == Format::Q4_1 || f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q8_0 ||
         f == Format::IQ4_NL || f == Format::MXFP4;
}
constexpr bool has_grids(Format f) {  // whether the format uses the tables in grids.h
  return f == Format::IQ2_XXS || f == Format::IQ2_XS || f == Format::IQ2_S || f == Format::IQ3_XXS ||
         f == Format::IQ3_S || f == Format::IQ1_S || f == Format::IQ1_M;
}

}  // namespace qtensor
