// Attention over a cache of bytes: the float steps, written once over the virtual vector, around exact integer sums
// (byte_dots.h of each instruction set). The order of operations stands in kernel_table.h.

// 2^x: x = n + r, |r| <= 1/2; 2^r by a polynomial fitted for the least relative error (9e-8). x is clamped to
// [-100, 127]: what is smaller counts as nothing, and products with a scale stay normal numbers.
inline V16 v_exp2(V16 x) {
  x = v_min(v_set(127.0f), v_max(v_set(-100.0f), x));  // in this order a NaN comes through
  const V16 n = v_round(x), r = v_sub(x, n);
  V16 p = v_set(0.001326472731307149f);
  p = v_fma(p, r, v_set(0.009671512991189957f));
  p = v_fma(p, r, v_set(0.05550733581185341f));
  p = v_fma(p, r, v_set(0.24022242426872253f));
  p = v_fma(p, r, v_set(0.6931470036506653f));
  p = v_fma(p, r, v_set(1.0f));
  return v_scale(p, n);
}

// The first n lanes of a, `rest` in the others.
inline V16 v_first_or(V16 a, int64_t n, float rest) {
  float lane[16];
  v_store(lane, a);
  for (int64_t i = n; i < 16; i++) lane[i] = rest;
  return v_load(lane);
}

constexpr int kByteQueries = 4;  // queries that go through a tile together

// Where everything lies in the scratch of one task.
struct ByteScratch {
  float* o;         // queries x dim
  float* top;       // per query: largest score, in units of log2
  float* total;     // sum of powers
  float* unit;      // dq * scale * log2(e)
  int32_t* start;   // -128 * sum of the query's bytes, which takes off what the keys carry too much
  int32_t* chosen;  // queries that read the tile at hand
  QueryLane* query;
  float *key_scales, *value_scales;  // of the tile at hand
  int32_t* sums;                     // kByteQueries x the wider of 128 and dim
  int16_t* weights;                  // kByteQueries x 128
  uint8_t *keys, *values;            // the tile at hand as bytes, where the cache holds less
  int64_t sum_stride;

  ByteScratch(uint8_t* at, int64_t queries, int64_t dim) {
    auto take = [&](int64_t bytes) {
      uint8_t* const room = at;
      at += (bytes + 63) / 64 * 64;
      return room;
    };
    sum_stride = dim > kTilePositions ? dim : kTilePositions;
    o = reinterpret_cast<float*>(take(queries * dim * 4));
    query = reinterpret_cast<QueryLane*>(take(queries * dim * int64_t(sizeof(QueryLane))));
    top = reinterpret_cast<float*>(take(queries * 4));
    total = reinterpret_cast<float*>(take(queries * 4));
    unit = reinterpret_cast<float*>(take(queries * 4));
    start = reinterpret_cast<int32_t*>(take(queries * 4));
    chosen = reinterpret_cast<int32_t*>(take(queries * 4));
    key_scales = reinterpret_cast<float*>(take(kTilePositions * 4));
    value_scales = reinterpret_cast<float*>(take(kTilePositions * 4));
    sums = reinterpret_cast<int32_t*>(take(kByteQueries * sum_stride * 4));
    weights = reinterpret_cast<int16_t*>(take(kByteQueries * kTilePositions * 2));
    keys = take(kTilePositions * dim);
    values = take(kTilePositions * dim);
  }
};

// One tile as bytes, and the next one, which is fetched from memory meanwhile (or null).
struct ByteTile {
  const uint8_t *keys, *values;
  const uint8_t *next_keys, *next_values;
};

inline void begin_query(const ByteAttentionTask& t, int64_t i, const ByteScratch& s) {
  float* const turned = s.o + i * t.dim;
  rotate_head(t.q[i], t.dim, turned);
  const float top = largest_magnitude(turned, t.dim);
  int8_t bytes[kMostByteDim];
  const bool usable = top >= 1e-30f;
  if (usable)
    round_to_bytes(turned, t.dim, 127.0f / top, bytes);
  else
    __builtin_memset(bytes, 0, size_t(t.dim));
  const float step = usable ? top / 127.0f : top == top ? 0.0f : top;
  s.unit[i] = step * t.scale * 1.44269504f;
  int32_t sum = 0;
  for (int64_t d = 0; d < t.dim; d++) sum += bytes[d];
  s.start[i] = -128 * sum;
  lay_query(bytes, t.dim, s.query + i * t.dim);
  s.top[i] = -1e30f;
  s.total[i] = 0.0f;
  for (int64_t d = 0; d < t.dim; d += 16) v_store(turned + d, v_zero());
}

// What the first `count` scores of a tile make of one query: weights in 15 bits and what goes with them.
struct TileStep {
  float correction, unit;
  int32_t start;
};
inline TileStep weigh(const ByteScratch& s, int64_t query, int64_t count, const int32_t* scores, int16_t* weights) {
  const int64_t vectors = (count + 15) / 16, last = count - 16 * (vectors - 1);
  V16 lane[kTilePositions / 16];
  V16 peak = v_set(-1e30f);
  const V16 unit = v_set(s.unit[query]);
  for (int64_t v = 0; v < vectors; v++) {
    lane[v] = v_mul(v_load_int(scores + 16 * v), v_mul(v_load(s.key_scales + 16 * v), unit));
    if (v + 1 == vectors && last < 16) lane[v] = v_first_or(lane[v], last, -1e30f);
    peak = v_max(peak, lane[v]);
  }
  TileStep step;
  const float tile_top = v_fold_max(peak), before = s.top[query];
  const float top = before > tile_top ? before : tile_top;
  step.correction = 1.0f;
  if (!(before == top)) {
    float power[16];
    v_store(power, v_exp2(v_set(before - top)));
    step.correction = power[0];
  }
  s.top[query] = top;
  V16 sum = v_zero();
  V16 largest = v_zero();
  for (int64_t v = 0; v < vectors; v++) {
    V16 p = v_exp2(v_sub(lane[v], v_set(top)));
    V16 w = v_mul(p, v_load(s.value_scales + 16 * v));
    if (v + 1 == vectors && last < 16) {
      p = v_first_or(p, last, 0.0f);
      w = v_first_or(w, last, 0.0f);
    }
    sum = v_add(sum, p);
    lane[v] = w;
    largest = v_max_magnitude(largest, w);
  }
  const uint32_t largest_bits = v_magnitude_bits(largest, 0);
  s.total[query] = __builtin_fmaf(s.total[query], step.correction, v_fold_add(sum));
  float most;
  __builtin_memcpy(&most, &largest_bits, 4);
  V16 weight_sum = v_zero();
  const bool usable = largest_bits < 0x7f800000 && most >= 1e-30f;
  const V16 inverse = v_set(usable ? 32767.0f / most : 0.0f);
  for (int64_t v = 0; v < vectors; v++) {
    const V16 whole = usable ? v_round(v_mul(lane[v], inverse)) : v_zero();
    weight_sum = v_add(weight_sum, whole);
    lay_weights(weights + 16 * v, whole);
  }
  step.unit = usable ? most / 32767.0f : largest_bits < 0x7f800000 ? 0.0f : __builtin_nanf("");
  step.start = -128 * int32_t(v_fold_add(weight_sum));
  return step;
}

// One tile for QUERIES of the chosen queries.
template <int QUERIES>
inline void byte_tile(const ByteAttentionTask& t, const ByteTile& tile, const int32_t* chosen, int64_t before,
                      const ByteScratch& s) {
  const QueryLane* query[QUERIES];
  const int16_t* weights[QUERIES];
  int32_t start[QUERIES];
  TileStep step[QUERIES];
  int64_t counts[QUERIES], most = 0;
  for (int i = 0; i < QUERIES; i++) {
    query[i] = s.query + chosen[i] * t.dim;
    start[i] = s.start[chosen[i]];
    counts[i] = t.limits[chosen[i]] - before < kTilePositions ? t.limits[chosen[i]] - before : kTilePositions;
    most = counts[i] > most ? counts[i] : most;
  }
  byte_dots<QUERIES>(query, tile.keys, t.dim / 4, kTilePositions, (most + 15) / 16 * 16, start, s.sums, s.sum_stride,
                     tile.next_keys);
  for (int i = 0; i < QUERIES; i++) {
    int16_t* const row = s.weights + i * kTilePositions;
    step[i] = weigh(s, chosen[i], counts[i], s.sums + i * s.sum_stride, row);
    const int64_t laid = (counts[i] + 15) / 16 * 16;
    if (laid < most) __builtin_memset(row + laid, 0, size_t(kTilePositions - laid) * 2);
    weights[i] = row;
    start[i] = step[i].start;
  }
  byte_dots<QUERIES>(weights, tile.values, (most + 3) / 4, t.dim, t.dim, start, s.sums, s.sum_stride, tile.next_values);
  for (int i = 0; i < QUERIES; i++) {
    float* const o = s.o + chosen[i] * t.dim;
    const int32_t* const sums = s.sums + i * s.sum_stride;
    const V16 correction = v_set(step[i].correction), unit = v_set(step[i].unit);
    for (int64_t d = 0; d < t.dim; d += 16)
      v_store(o + d, v_fma(v_load_int(sums + d), unit, v_mul(v_load(o + d), correction)));
  }
}

// Packed levels as bytes; `groups` groups of four of `lanes` lanes.
inline void unpack_levels(const uint8_t* packed, int bits, int64_t groups, int64_t lanes, uint8_t* out,
                          const uint8_t* ahead) {
  if (bits == 4)
    unpack_4_bits(packed, groups, 4 * lanes, kLevels4.bytes, out, ahead);
  else
    unpack_3_bits(packed, groups, 4 * lanes, kLevels3.bytes, out, ahead);
}

// The queries chosen read this tile, whose data lie in `format`; the next tile in it is fetched meanwhile.
inline void read_tile(const ByteAttentionTask& t, CacheFormat format, const uint8_t* data, const uint8_t* next,
                      int64_t before, int64_t readers, const ByteScratch& s) {
  const int64_t values_at = key_bytes(format, t.dim);
  const half* const scale = reinterpret_cast<const half*>(data + scales_at(format, t.dim));
  for (int64_t j = 0; j < kTilePositions; j += 16) {
    v_store(s.key_scales + j, v_load_half(scale + j));
    v_store(s.value_scales + j, v_load_half(scale + kTilePositions + j));
  }
  const uint8_t* const next_values = next == nullptr ? nullptr : next + values_at;
  ByteTile tile{data, data + values_at, next, next_values};
  if (key_bits(format) < 8) {
    unpack_levels(tile.keys, key_bits(format), t.dim / 4, kTilePositions, s.keys, next);
    tile.keys = s.keys;
    tile.next_keys = nullptr;
  }
  if (value_bits(format) < 8) {
    unpack_levels(tile.values, value_bits(format), kTilePositions / 4, t.dim, s.values, next_values);
    tile.values = s.values;
    tile.next_values = nullptr;
  }
  for (int64_t i = 0; i < readers; i += kByteQueries) {
    const int32_t* const chosen = s.chosen + i;
    switch (readers - i) {
      case 1:
        byte_tile<1>(t, tile, chosen, before, s);
        break;
      case 2:
        byte_tile<2>(t, tile, chosen, before, s);
        break;
      case 3:
        byte_tile<3>(t, tile, chosen, before, s);
        break;
      default:
        byte_tile<kByteQueries>(t, tile, chosen, before, s);
    }
    tile.next_keys = tile.next_values = nullptr;
  }
}

void attention_bytes(const ByteAttentionTask& t) {
  const ByteScratch s(t.scratch, t.queries, t.dim);
  const bool small = t.format > CacheFormat::k8v8;
  int64_t longest = 0;
  for (int64_t i = 0; i < t.queries; i++) {
    begin_query(t, i, s);
    longest = t.limits[i] > longest ? t.limits[i] : longest;
  }
  const int64_t tiles = (longest + kTilePositions - 1) / kTilePositions;
  for (int64_t number = 0; number < tiles; number++) {
    const int64_t before = number * kTilePositions;
    for (int source = 0; source < 2; source++) {
      const bool recent = source == 0;
      int64_t readers = 0;
      for (int64_t i = 0; i < t.queries; i++) {
        const bool is_last = t.limits[i] - before <= kTilePositions;
        if (t.limits[i] > before && (small && (number == 0 || is_last)) == recent) s.chosen[readers++] = int32_t(i);
      }
      if (readers == 0) continue;
      if (recent) {
        read_tile(t, CacheFormat::k8v8, t.recent[number], nullptr, before, readers, s);
      } else {
        const bool more = number + 1 < (small ? tiles - 1 : tiles);
        read_tile(t, t.format, t.tiles[number], more ? t.tiles[number + 1] : nullptr, before, readers, s);
      }
    }
  }
  float turned[kMostByteDim];
  for (int64_t i = 0; i < t.queries; i++) {
    const V16 divisor = v_set(s.total[i]);
    for (int64_t d = 0; d < t.dim; d += 16) v_store(turned + d, v_div(v_load(s.o + i * t.dim + d), divisor));
    rotate_head(turned, t.dim, t.out[i]);
  }
}
