// All float kernels, written once over the virtual vector of 16 lanes. Each instruction set compiles this file with its
// own vec16.h, so all of them execute the same operations in the same order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/fetch_ahead.h"
#include "tuning.h"
#include "vec16.h"

namespace qtensor {
namespace {

inline V16 v_zero() { return v_set(0.0f); }

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. ln 2 is split so that n * high is exact. The polynomial
// is the Taylor series to degree 7, whose remainder is below 2^-27 on that interval. x is clamped to [-87, 88]. The
// error is about 1 ulp.
inline V16 v_exp(V16 x) {
  x = v_min(v_set(88.0f), v_max(v_set(-87.0f), x));  // in this order, NaN is propagated
  const V16 n = v_round(v_mul(x, v_set(1.44269504f)));
  V16 r = v_fma(n, v_set(-0.693145751953125f), x);
  r = v_fma(n, v_set(-1.42860682e-6f), r);
  V16 p = v_set(1.0f / 5040.0f);
  p = v_fma(p, r, v_set(1.0f / 720.0f));
  p = v_fma(p, r, v_set(1.0f / 120.0f));
  p = v_fma(p, r, v_set(1.0f / 24.0f));
  p = v_fma(p, r, v_set(1.0f / 6.0f));
  p = v_fma(p, r, v_set(0.5f));
  p = v_fma(p, r, v_set(1.0f));
  p = v_fma(p, r, v_set(1.0f));
  return v_scale(p, n);
}

// The scale for rounding values to bytes, from the bits of their largest magnitude.
struct ByteScale {
  bool usable;
  float d, inverse;
};
inline ByteScale byte_scale(uint32_t top_bits) {
  float top;
  __builtin_memcpy(&top, &top_bits, 4);
  if (top_bits >= 0x7f800000) return {false, __builtin_nanf(""), 0.0f};
  if (top < 1e-30f) return {false, 0.0f, 0.0f};
  return {true, top / 127.0f, 127.0f / top};
}

// Loads COUNT vectors from x, which has `left` values, and fills the rest with zeros.
template <int COUNT>
inline void load_padded(const float* x, int64_t left, V16 (&v)[COUNT]) {
  for (int i = 0; i < COUNT; i++, left -= 16)
    v[i] = left >= 16 ? v_load(x + 16 * i) : left > 0 ? v_load_first(x + 16 * i, left) : v_zero();
}

void quantize_q8k(const float* x, int64_t k, BlockQ8K* out) {
  for (int64_t begin = 0; begin < k; begin += kSuperBlock, out++) {
    V16 v[16];
    load_padded(x + begin, k - begin, v);
    const ByteScale scale = byte_scale(v_top_magnitude(v));
    out->d = scale.d;
    if (scale.usable) {
      v_store_block(*out, v, v_set(scale.inverse));
    } else {
      __builtin_memset(out->q, 0, sizeof out->q);
      __builtin_memset(out->sums16, 0, sizeof out->sums16);
      __builtin_memset(out->sums32, 0, sizeof out->sums32);
    }
    __builtin_memset(out->padding, 0, sizeof out->padding);
  }
}

void quantize_q8x32(const float* x, int64_t k, BlockQ8x32* out) {
  for (int64_t begin = 0; begin < k; begin += kSuperBlock, out++)
    for (int i = 0; i < 8; i++) {
      V16 v[2];
      load_padded(x + begin + 32 * i, k - begin - 32 * i, v);
      const ByteScale scale = byte_scale(v_top_magnitude(v));
      int8_t* const q = out->q + 32 * i;
      out->d[i] = scale.d;
      if (scale.usable)
        for (int h = 0; h < 2; h++) v_store_bytes(q + 16 * h, v[h], v_set(scale.inverse));
      else
        __builtin_memset(q, 0, 32);
      int32_t sum = 0;
      for (int l = 0; l < 32; l++) sum += q[l];
      out->sums[i] = sum;
    }
}

struct LoadF32 {
  using Value = float;
  static V16 load(const float* p) { return v_load(p); }
  static float one(const float* p) {
    float f;
    __builtin_memcpy(&f, p, sizeof f);
    return f;
  }
};
struct LoadF16 {
  using Value = half;
  static V16 load(const half* p) { return v_load_half(p); }
  static float one(const half* p) {
    half bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return half_to_float(bits);
  }
};
struct LoadBF16 {
  using Value = uint16_t;
  static V16 load(const uint16_t* p) { return v_load_bf16(p); }
  static float one(const uint16_t* p) {
    uint16_t top;
    __builtin_memcpy(&top, p, sizeof top);
    const uint32_t bits = uint32_t(top) << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
  }
};

// Four rows at a time hide the latency of the fused multiply-add, because each output is a chain of its own.
template <class Load, int ROWS>
inline void float_rows(const MatmulTask& t, int64_t row) {
  using Value = typename Load::Value;
  const int64_t whole = t.k / 16 * 16, rest = t.k - whole;
  for (int64_t j = 0; j < t.m; j++) {
    const float* x = t.floats + j * t.k;
    V16 acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = v_zero();
    for (int64_t k = 0; k < whole; k += 16) {
      const V16 xv = v_load(x + k);
      for (int r = 0; r < ROWS; r++) {
        const auto* w = reinterpret_cast<const Value*>(t.weight + (row + r) * t.row_bytes);
        acc[r] = v_fma(Load::load(w + k), xv, acc[r]);
      }
    }
    for (int r = 0; r < ROWS; r++) {
      if (rest > 0) {
        const auto* w = reinterpret_cast<const Value*>(t.weight + (row + r) * t.row_bytes);
        float tail[16] = {};
        for (int64_t i = 0; i < rest; i++) tail[i] = Load::one(w + whole + i);
        acc[r] = v_fma(v_load(tail), v_load_first(x + whole, rest), acc[r]);
      }
    }
    float* const y = t.y + j * t.y_stride + row;
    if constexpr (ROWS == 4)
      v_store_sums(y, acc);
    else
      y[0] = v_reduce_add(acc[0]);
  }
}

template <class Load>
inline void matmul_float(const MatmulTask& t) {
  int64_t row = t.row_begin;
  for (; row + 4 <= t.row_end; row += 4) float_rows<Load, 4>(t, row);
  for (; row < t.row_end; row++) float_rows<Load, 1>(t, row);
}
void matmul_f32(const MatmulTask& t) { matmul_float<LoadF32>(t); }
void matmul_f16(const MatmulTask& t) { matmul_float<LoadF16>(t); }
void matmul_bf16(const MatmulTask& t) { matmul_float<LoadBF16>(t); }

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  V16 sum = v_zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const V16 v = v_load(x + i);
    sum = v_fma(v, v, sum);
  }
  if (i < n) {
    const V16 v = v_load_first(x + i, n - i);
    sum = v_fma(v, v, sum);
  }
  const V16 scale = v_set(1.0f / __builtin_sqrtf(v_reduce_add(sum) / float(n) + eps));
  for (i = 0; i + 16 <= n; i += 16) v_store(out + i, v_mul(v_mul(v_load(x + i), scale), v_load(weight + i)));
  if (i < n)
    v_store_first(out + i, v_mul(v_mul(v_load_first(x + i, n - i), scale), v_load_first(weight + i, n - i)), n - i);
}

inline V16 silu_mul_lanes(V16 gate, V16 up) {
  const V16 one = v_set(1.0f);
  return v_mul(v_div(gate, v_add(one, v_exp(v_sub(v_zero(), gate)))), up);
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) v_store(out + i, silu_mul_lanes(v_load(gate + i), v_load(up + i)));
  if (i < n) v_store_first(out + i, silu_mul_lanes(v_load_first(gate + i, n - i), v_load_first(up + i, n - i)), n - i);
}

void add(const float* a, const float* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) v_store(out + i, v_add(v_load(a + i), v_load(b + i)));
  if (i < n) v_store_first(out + i, v_add(v_load_first(a + i, n - i), v_load_first(b + i, n - i)), n - i);
}

// Computes exp(x - top) of n floats in place. Returns the sum of the results by lanes; lanes beyond n add zero.
inline V16 exp_and_sum(float* x, int64_t n, V16 top) {
  V16 sum = v_zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const V16 e = v_exp(v_sub(v_load(x + i), top));
    v_store(x + i, e);
    sum = v_add(sum, e);
  }
  if (i < n) {
    v_store_first(x + i, v_exp(v_sub(v_load_first(x + i, n - i), top)), n - i);
    sum = v_add(sum, v_load_first(x + i, n - i));
  }
  return sum;
}

inline float top_of(const float* x, int64_t n) {
  if (n < 16) {
    float top = x[0];
    for (int64_t i = 1; i < n; i++) top = top > x[i] ? top : x[i];
    return top;
  }
  V16 top = v_load(x);
  for (int64_t i = 16; i + 16 <= n; i += 16) top = v_max(top, v_load(x + i));
  top = v_max(top, v_load(x + n - 16));
  return v_reduce_max(top);
}

void softmax(float* x, int64_t n) {
  const float total = v_reduce_add(exp_and_sum(x, n, v_set(top_of(x, n))));
  const V16 divisor = v_set(total);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) v_store(x + i, v_div(v_load(x + i), divisor));
  if (i < n) v_store_first(x + i, v_div(v_load_first(x + i, n - i), divisor), n - i);
}

void rope_adjacent(float* x, const float* cosine, const float* sine, int64_t dim) {
  for (int64_t i = 0; i < dim / 2; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = __builtin_fmaf(-b, sine[i], a * cosine[i]);
    x[2 * i + 1] = __builtin_fmaf(b, cosine[i], a * sine[i]);
  }
}

void rope_halves(float* x, const float* cosine, const float* sine, int64_t dim) {
  for (int64_t i = 0; i < dim / 2; i++) {
    const float a = x[i], b = x[i + dim / 2];
    x[i] = __builtin_fmaf(-b, sine[i], a * cosine[i]);
    x[i + dim / 2] = __builtin_fmaf(b, cosine[i], a * sine[i]);
  }
}

void to_half(const float* x, int64_t n, half* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) v_store_half(out + i, v_load(x + i));
  if (i < n) {
    half tail[16];
    v_store_half(tail, v_load_first(x + i, n - i));
    __builtin_memcpy(out + i, tail, size_t(n - i) * sizeof(half));
  }
}

// Scores of QUERIES queries with LANES * 16 keys, beginning at `key`: one fused chain over dim for each score.
template <int QUERIES, int LANES>
inline void attention_scores(const AttentionTask& t, const half* keys, int64_t first, int64_t key, float* scores,
                             FetchAhead& ahead) {
  V16 acc[QUERIES][LANES];
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < LANES; j++) acc[i][j] = v_zero();
  for (int64_t d = 0; d < t.dim; d++) {
    ahead.ask();
    V16 k[LANES];
    for (int j = 0; j < LANES; j++) k[j] = v_load_half(keys + d * kTilePositions + key + 16 * j);
    for (int i = 0; i < QUERIES; i++) {
      const V16 q = v_set(t.q[first + i][d]);
      for (int j = 0; j < LANES; j++) acc[i][j] = v_fma(q, k[j], acc[i][j]);
    }
  }
  const V16 scale = v_set(t.scale);
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < LANES; j++) v_store(scores + i * kTilePositions + key + 16 * j, v_mul(acc[i][j], scale));
}

// o = fma(p_j, v_j, o) for j in [0, count), QUERIES queries and LANES * 16 dims at a time.
template <int QUERIES, int LANES>
inline void attention_values(const AttentionTask& t, const half* values, int64_t count, int64_t dim, const float* p,
                             float* o, FetchAhead& ahead) {
  V16 acc[QUERIES][LANES];
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < LANES; j++) acc[i][j] = v_load(o + i * t.dim + dim + 16 * j);
  for (int64_t at = 0; at < count; at++) {
    ahead.ask();
    V16 v[LANES];
    for (int j = 0; j < LANES; j++) v[j] = v_load_half(values + at * t.dim + dim + 16 * j);
    for (int i = 0; i < QUERIES; i++) {
      const V16 weight = v_set(p[i * kTilePositions + at]);
      for (int j = 0; j < LANES; j++) acc[i][j] = v_fma(weight, v[j], acc[i][j]);
    }
  }
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < LANES; j++) v_store(o + i * t.dim + dim + 16 * j, acc[i][j]);
}

// Processes one tile for QUERIES queries with the same limit in it.
template <int QUERIES>
inline void attention_tile(const AttentionTask& t, const half* keys, const half* values, int64_t first, int64_t count,
                           float* p, float* o, float* top, float* total, FetchAhead& ahead) {
  int64_t key = 0;
  for (; key + 16 * kScoreLanes <= kTilePositions && key < count; key += 16 * kScoreLanes)
    attention_scores<QUERIES, kScoreLanes>(t, keys, first, key, p, ahead);
  for (int i = 0; i < QUERIES; i++) {
    float* row = p + i * kTilePositions;
    const float tile_top = top_of(row, count);
    const float new_top = top[i] > tile_top ? top[i] : tile_top;
    float correction[16];
    v_store(correction, v_exp(v_set(top[i] - new_top)));
    total[i] = __builtin_fmaf(total[i], correction[0], v_reduce_add(exp_and_sum(row, count, v_set(new_top))));
    top[i] = new_top;
    const V16 shrink = v_set(correction[0]);
    for (int64_t d = 0; d < t.dim; d += 16) v_store(o + i * t.dim + d, v_mul(v_load(o + i * t.dim + d), shrink));
  }
  int64_t d = 0;
  for (; d + 16 * kValueLanes <= t.dim; d += 16 * kValueLanes)
    attention_values<QUERIES, kValueLanes>(t, values, count, d, p, o, ahead);
  for (; d < t.dim; d += 16) attention_values<QUERIES, 1>(t, values, count, d, p, o, ahead);
}

void attention(const AttentionTask& t) {
  float* o = t.scratch;
  float* p = o + t.queries * t.dim;
  float* top = p + t.queries * kTilePositions;
  float* total = top + t.queries;
  int64_t longest = 0;
  for (int64_t i = 0; i < t.queries; i++) {
    longest = t.limits[i] > longest ? t.limits[i] : longest;
    top[i] = -1e30f;
    total[i] = 0.0f;
    for (int64_t d = 0; d < t.dim; d++) o[i * t.dim + d] = 0.0f;
  }
  for (int64_t tile = 0; tile * kTilePositions < longest; tile++) {
    const half* keys = t.k_tiles[tile];
    const half* values = t.v_tiles[tile];
    const int64_t before = tile * kTilePositions;
    FetchAhead ahead;  // values follow the keys of a tile in memory
    if (before + kTilePositions < longest)
      ahead = FetchAhead(reinterpret_cast<const uint8_t*>(t.k_tiles[tile + 1]), 2 * kTilePositions * t.dim * 2);
    for (int64_t i = 0; i < t.queries;) {
      const int64_t seen = t.limits[i] - before;
      const int64_t count = seen < kTilePositions ? seen : kTilePositions;
      int64_t run = 1;  // adjacent queries that see the same part of the tile are processed together
      while (run < kQueryGroup && i + run < t.queries) {
        const int64_t next = t.limits[i + run] - before;
        if ((next < kTilePositions ? next : kTilePositions) != count) break;
        run++;
      }
      if (count > 0) {
        if (run == kQueryGroup) {
          attention_tile<kQueryGroup>(t, keys, values, i, count, p, o + i * t.dim, top + i, total + i, ahead);
        } else {
          run = 1;
          attention_tile<1>(t, keys, values, i, count, p, o + i * t.dim, top + i, total + i, ahead);
        }
      }
      i += run;
    }
  }
  for (int64_t i = 0; i < t.queries; i++) {
    const V16 divisor = v_set(total[i]);
    for (int64_t d = 0; d < t.dim; d += 16) v_store(t.out[i] + d, v_div(v_load(o + i * t.dim + d), divisor));
  }
}

}  // namespace
}  // namespace qtensor
