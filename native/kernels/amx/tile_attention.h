// Attention of many queries over bytes with AMX tiles: the same bits as byte_attention.h, sixteen queries at a time.
//
// The cache has the layout of a B operand, keys [dim / 4][128 positions][4] and values [128 / 4][dim][4], and tiles are
// loaded from it. Queries are signed bytes. The weights of values, 15 bits, are two planes of unsigned bytes. Between
// the products, each query's float steps are those of TileSteps in the same order, but a number that each query has
// once is computed for sixteen queries in one register. A block of four tiles of sums is processed while the products
// of the next one run.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/tiles.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/fetch_ahead.h"
#include "vec16.h"

namespace qtensor {
namespace {

constexpr int64_t kTileQueries = 16;
constexpr int64_t kLeastTileQueries = kTileQueries;  // with fewer, tiles are mostly empty and gain little

// Lane i is the horizontal reduction of a[i], in the order (l, l+8), (l, l+4), (l, l+2), (l, l+1).
template <class Join>
inline V16 reduce_sixteen(const V16 (&a)[16], Join join) {
  V16 eight[8], four[4], two[2];
  for (int i = 0; i < 8; i++)
    eight[i] = join(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
  for (int i = 0; i < 4; i++)
    four[i] =
        join(_mm512_shuffle_f32x4(eight[i], eight[i + 4], 0x88), _mm512_shuffle_f32x4(eight[i], eight[i + 4], 0xdd));
  for (int i = 0; i < 2; i++)
    two[i] = join(_mm512_shuffle_ps(four[i], four[i + 2], 0x44), _mm512_shuffle_ps(four[i], four[i + 2], 0xee));
  const V16 one = join(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(order, one);
}

// The state of sixteen queries for one tile of the cache.
struct alignas(64) TileQueries {
  float lanes[kTileQueries][kTilePositions];  // sums, then scores, then powers times the scale of their value
  uint8_t high[kTileQueries][kTilePositions], low[kTileQueries][kTilePositions];  // weights = 256 * high + low
  int32_t sums[2][2][2][kTileQueries][16];  // [turn][high, low][tile of dimensions]: weights times values
  V16 partial[kTileQueries];                // by lanes, for each query; not yet reduced
  float score_unit[16], value_unit[16], correction[16], top[16], inverse[16];
  int32_t score_start[16], value_start[16];
  int64_t count[16];  // positions of this tile that the query sees
};

// Computes sums of 64 positions. Calls `shade(part, parts)` once for each step in depth, to overlap with its products.
template <class Shade>
inline void score_block(const int8_t* queries, int64_t stride, const uint8_t* keys, int64_t dim, int64_t depth,
                        float* out, Shade shade) {
  constexpr int64_t row_bytes = 4 * kTilePositions;
  before_tile_loads();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += depth) {
    const uint8_t* const at = keys + d / 4 * row_bytes;
    _tile_loadd(4, queries + d, stride);
    _tile_loadd(6, at, row_bytes);
    _tile_loadd(7, at + 64, row_bytes);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(6, at + 128, row_bytes);
    _tile_loadd(7, at + 192, row_bytes);
    _tile_dpbsud(2, 4, 6);
    _tile_dpbsud(3, 4, 7);
    shade(d / depth, dim / depth);
  }
  _tile_stored(0, out, 4 * kTilePositions);
  _tile_stored(1, out + 16, 4 * kTilePositions);
  _tile_stored(2, out + 32, 4 * kTilePositions);
  _tile_stored(3, out + 48, 4 * kTilePositions);
}

// Multiplies both planes of weights with TILES tiles of dimensions, over the first `used` positions.
template <int TILES, class Shade>
inline void value_block(const TileQueries& w, const uint8_t* values, int64_t dim, int64_t depth, int64_t used,
                        int32_t (&out)[2][2][kTileQueries][16], Shade shade) {
  before_tile_loads();
  _tile_zero(0);
  _tile_zero(2);
  if (TILES == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t p = 0; p < used; p += depth) {
    const uint8_t* const at = values + p * dim;
    _tile_loadd(4, w.high[0] + p, kTilePositions);
    _tile_loadd(6, at, 4 * dim);
    _tile_loadd(5, w.low[0] + p, kTilePositions);
    if (TILES == 2) _tile_loadd(7, at + 64, 4 * dim);
    _tile_dpbuud(0, 4, 6);
    _tile_dpbuud(2, 5, 6);
    if (TILES == 2) {
      _tile_dpbuud(1, 4, 7);
      _tile_dpbuud(3, 5, 7);
    }
    shade(p / depth, used / depth);
  }
  _tile_stored(0, out[0][0], 64);
  _tile_stored(2, out[1][0], 64);
  if (TILES == 2) {
    _tile_stored(1, out[0][1], 64);
    _tile_stored(3, out[1][1], 64);
  }
}

inline __mmask16 seen_lanes(int64_t count, int64_t from) {
  const int64_t seen = count - from;
  return seen >= 16 ? __mmask16(0xffff) : seen <= 0 ? __mmask16(0) : first_lanes(seen);
}

// Computes scores of 64 positions for queries [from, to), and the largest score of each lane so far.
template <bool WHOLE>
inline void scale_scores(TileQueries& w, const ByteScratch& s, int64_t half, int64_t from, int64_t to) {
  const V16 nothing = v_set(-1e30f);
  for (int64_t q = from; q < to; q++) {
    const V16 unit = v_set(w.score_unit[q]);
    const __m512i start = _mm512_set1_epi32(w.score_start[q]);
    V16 peak = half == 0 ? nothing : w.partial[q];
    for (int64_t at = 64 * half; at < 64 * half + 64; at += 16) {
      const V16 sums = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(w.lanes[q] + at), start));
      V16 score = v_mul(sums, v_mul(v_load(s.key_scales + at), unit));
      if (!WHOLE) score = _mm512_mask_mov_ps(nothing, seen_lanes(w.count[q], at), score);
      v_store(w.lanes[q] + at, score);
      peak = v_max(peak, score);
    }
    w.partial[q] = peak;
  }
}

// Converts scores to powers times the scale of their value. Also computes, by lanes, the sum of the powers and the
// largest weight.
template <bool WHOLE>
inline void raise_powers(TileQueries& w, const ByteScratch& s, int64_t queries, int64_t laid, V16 (&largest)[16],
                         FetchAhead& ahead, int64_t turns) {
  for (int64_t q = 0; q < queries; q++) {
    for (int64_t i = 0; i < turns; i++) ahead.ask();
    const V16 top = v_set(w.top[q]);
    V16 sum = v_zero(), most = v_zero();
    for (int64_t at = 0; at < laid; at += 16) {
      V16 p = v_exp2(v_sub(v_load(w.lanes[q] + at), top));
      V16 weight = v_mul(p, v_load(s.value_scales + at));
      if (!WHOLE) {
        const __mmask16 seen = seen_lanes(w.count[q], at);
        p = _mm512_maskz_mov_ps(seen, p);
        weight = _mm512_maskz_mov_ps(seen, weight);
      }
      sum = v_add(sum, p);
      most = v_max_magnitude(most, weight);
      v_store(w.lanes[q] + at, weight);
    }
    w.partial[q] = sum;
    largest[q] = most;
  }
}

// Converts the scaled powers to two planes of bytes, and computes the sum of each query's weights by lanes. Scales are
// never negative, so weights are not either. If the largest weight is NaN, packing turns NaN into zeros.
inline void lay_planes(TileQueries& w, int64_t queries, int64_t laid) {
  const __m512i low_byte = _mm512_set1_epi16(255), ones = _mm512_set1_epi16(1);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t q = 0; q < queries; q++) {
    const V16 inverse = v_set(w.inverse[q]);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t at = 0; at < laid; at += 64) {
      __m512i whole[4];
      for (int v = 0; v < 4; v++) whole[v] = _mm512_cvtps_epi32(v_mul(v_load(w.lanes[q] + at + 16 * v), inverse));
      const __m512i a = _mm512_packus_epi32(whole[0], whole[1]), b = _mm512_packus_epi32(whole[2], whole[3]);
      sum = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, a, ones), b, ones);
      const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
      const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, low_byte), _mm512_and_si512(b, low_byte));
      _mm512_store_si512(w.high[q] + at, _mm512_permutexvar_epi32(order, high));
      _mm512_store_si512(w.low[q] + at, _mm512_permutexvar_epi32(order, low));
    }
    w.partial[q] = _mm512_castsi512_ps(sum);
  }
}

// o = fma(float(sum), unit, o * correction) for TILES tiles of dimensions and queries [from, to).
template <int TILES>
inline void add_values(const TileQueries& w, const int32_t (&sums)[2][2][kTileQueries][16], const int32_t* chosen,
                       float* o, int64_t dim, int64_t from, int64_t to) {
  for (int64_t q = from; q < to; q++) {
    const V16 unit = v_set(w.value_unit[q]), correction = v_set(w.correction[q]);
    const __m512i start = _mm512_set1_epi32(w.value_start[q]);
    for (int tile = 0; tile < TILES; tile++) {
      float* const at = o + chosen[q] * dim + 16 * tile;
      const __m512i low = _mm512_add_epi32(_mm512_load_si512(sums[1][tile][q]), start);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[0][tile][q]), 8), low);
      v_store(at, v_fma(_mm512_cvtepi32_ps(sum), unit, v_mul(v_load(at), correction)));
    }
  }
}

// Processes one tile of the cache for up to sixteen of the chosen queries. WHOLE: each of them sees the whole tile.
template <bool WHOLE>
inline void tile_queries(const ByteAttentionTask& t, const uint8_t* keys, const uint8_t* values, const int32_t* chosen,
                         int64_t queries, int64_t before, int64_t depth, const ByteScratch& s, FetchAhead& ahead,
                         int64_t turns) {
  auto& w = *reinterpret_cast<TileQueries*>(s.rest);
  const auto* bytes = reinterpret_cast<const int8_t*>(s.query) + chosen[0] * t.dim;
  if (queries < kTileQueries || chosen[queries - 1] - chosen[0] != queries - 1) {  // not adjacent
    auto* const gathered = reinterpret_cast<int8_t*>(&w + 1);
    for (int64_t q = 0; q < kTileQueries; q++)
      __builtin_memcpy(gathered + q * t.dim, s.query + chosen[q < queries ? q : 0] * t.dim, size_t(t.dim));
    bytes = gathered;
  }
  int64_t most = kTilePositions;
  if (!WHOLE) {
    most = 0;
    for (int64_t q = 0; q < queries; q++) {
      const int64_t seen = t.limits[chosen[q]] - before;
      w.count[q] = seen < kTilePositions ? seen : kTilePositions;
      most = w.count[q] > most ? w.count[q] : most;
    }
  }
  const int64_t laid = (most + 63) / 64 * 64, used = (most + depth - 1) / depth * depth;
  const __mmask16 real = queries < 16 ? first_lanes(queries) : __mmask16(0xffff);
  const __m512i which = _mm512_maskz_loadu_epi32(real, chosen);
  v_store(w.score_unit, _mm512_mask_i32gather_ps(v_zero(), real, which, s.unit, 4));
  _mm512_store_si512(w.score_start, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), real, which, s.start, 4));

  score_block(bytes, t.dim, keys, t.dim, depth, w.lanes[0], [](int64_t, int64_t) {});
  if (laid > 64) {
    score_block(bytes, t.dim, keys + 256, t.dim, depth, w.lanes[0] + 64, [&](int64_t part, int64_t parts) {
      scale_scores<WHOLE>(w, s, 0, queries * part / parts, queries * (part + 1) / parts);
    });
    scale_scores<WHOLE>(w, s, 1, 0, queries);
  } else {
    scale_scores<WHOLE>(w, s, 0, 0, queries);
  }

  const V16 top_before = _mm512_mask_i32gather_ps(v_zero(), real, which, s.top, 4);
  const V16 top = v_max(top_before, reduce_sixteen(w.partial, [](V16 a, V16 b) { return v_max(a, b); }));
  const __mmask16 same = _mm512_cmp_ps_mask(top_before, top, _CMP_EQ_OQ);
  const V16 correction = _mm512_mask_mov_ps(v_exp2(v_sub(top_before, top)), same, v_set(1.0f));
  v_store(w.top, top);
  v_store(w.correction, correction);
  _mm512_mask_i32scatter_ps(s.top, real, which, top, 4);

  V16 largest[16];
  for (int64_t q = queries; q < kTileQueries; q++) largest[q] = v_zero();
  raise_powers<WHOLE>(w, s, queries, laid, largest, ahead, turns);
  const V16 powers = reduce_sixteen(w.partial, [](V16 a, V16 b) { return v_add(a, b); });
  const V16 total = v_fma(_mm512_mask_i32gather_ps(v_zero(), real, which, s.total, 4), correction, powers);
  _mm512_mask_i32scatter_ps(s.total, real, which, total, 4);
  const V16 weight = reduce_sixteen(largest, [](V16 a, V16 b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  });
  const V16 least = v_set(1e-30f), full = v_set(32767.0f), infinity = v_set(__builtin_inff());
  const __mmask16 usable =
      _mm512_cmp_ps_mask(weight, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(weight, infinity, _CMP_LT_OQ);
  const __mmask16 tiny = _mm512_cmp_ps_mask(weight, least, _CMP_LT_OQ);
  v_store(w.inverse, _mm512_maskz_div_ps(usable, full, weight));
  const V16 other = _mm512_mask_mov_ps(v_set(__builtin_nanf("")), tiny, v_zero());
  v_store(w.value_unit, _mm512_mask_div_ps(other, usable, weight, full));

  lay_planes(w, queries, laid);
  const V16 sum = reduce_sixteen(w.partial, [](V16 a, V16 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  });
  const __m512i sums_of_weights = _mm512_castps_si512(sum);
  _mm512_store_si512(w.value_start, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums_of_weights, 7)));

  int64_t d = 0;
  int turn = 0;
  for (; d + 32 <= t.dim; d += 32, turn ^= 1)
    value_block<2>(w, values + 4 * d, t.dim, depth, used, w.sums[turn], [&](int64_t part, int64_t parts) {
      if (d > 0)
        add_values<2>(w, w.sums[turn ^ 1], chosen, s.o + d - 32, t.dim, queries * part / parts,
                      queries * (part + 1) / parts);
    });
  if (d > 0) add_values<2>(w, w.sums[turn ^ 1], chosen, s.o + d - 32, t.dim, 0, queries);
  if (d < t.dim) {
    value_block<1>(w, values + 4 * d, t.dim, depth, used, w.sums[turn], [](int64_t, int64_t) {});
    add_values<1>(w, w.sums[turn], chosen, s.o + d, t.dim, 0, queries);
  }
}

inline int64_t tile_depth(int64_t dim) { return dim % 64 == 0 ? 64 : dim % 32 == 0 ? 32 : 16; }

// Like read_tile. Below 8 bits, levels are unpacked to bytes once for all queries.
inline void read_tile_by_tiles(const ByteAttentionTask& t, CacheFormat format, const uint8_t* data, const uint8_t* next,
                               int64_t before, int64_t readers, const ByteScratch& s) {
  if (readers < kLeastTileQueries) return read_tile(t, format, data, next, before, readers, s);
  const int64_t depth = tile_depth(t.dim);
  load_scales(t, format, data, s);
  TileSide keys{data, key_bits(format)}, values{data + key_bytes(format, t.dim), value_bits(format)};
  unpack_side(keys, t.dim / 4, kTilePositions, s.keys);
  unpack_side(values, kTilePositions / 4, t.dim, s.values);
  FetchAhead ahead = next == nullptr ? FetchAhead() : FetchAhead(next, head_bytes(format, t.dim));
  const int64_t turns = (ahead.left + readers - 1) / readers;
  for (int64_t i = 0; i < readers; i += kTileQueries) {
    const int32_t* const chosen = s.chosen + i;
    const int64_t queries = readers - i < kTileQueries ? readers - i : kTileQueries;
    bool whole = true;
    for (int64_t q = 0; q < queries; q++) whole &= t.limits[chosen[q]] - before >= kTilePositions;
    if (whole)
      tile_queries<true>(t, keys.data, values.data, chosen, queries, before, depth, s, ahead, turns);
    else
      tile_queries<false>(t, keys.data, values.data, chosen, queries, before, depth, s, ahead, turns);
  }
}

void attention_bytes(const ByteAttentionTask& t) {
  if (!t.by_tiles || t.queries < kLeastTileQueries) return attend_bytes(t, read_tile);
  configure_tiles(int(tile_depth(t.dim)));
  attend_bytes(t, read_tile_by_tiles);
  _tile_release();
}

}  // namespace
}  // namespace qtensor
