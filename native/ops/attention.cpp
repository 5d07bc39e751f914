#include "ops/attention.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "runtime/dispatch.h"
#include "runtime/work_sharing.h"

namespace qtensor {
namespace {

void check_rows(const RowPlaces& at) {
  for (int64_t i = 0; i < at.rows; i++) {
    const int64_t s = at.sequences[i], p = at.positions[i];
    if (s < 0 || s >= at.table_count) refuse("row " + std::to_string(i) + " refers to a sequence that does not exist");
    if (p < 0 || p >= at.table_length * kTilePositions)
      refuse("position " + std::to_string(p) + " is outside the block table");
  }
}

void check_block(int64_t block, const KeyValuePool& pool) {
  if (block < 0 || block >= pool.blocks)
    refuse("block " + std::to_string(block) + " is outside the pool of " + std::to_string(pool.blocks));
}

const int32_t* table_of(const RowPlaces& at, const int32_t* tables, int64_t row) {
  return tables + at.sequences[row] * at.table_length;
}

// Checks that each row has at least one block to be stored in, and that its blocks exist.
void check_written(const RowPlaces& at, const KeyValuePool& pool, const WindowTiles& window) {
  check_rows(at);
  for (int64_t i = 0; i < at.rows; i++) {
    const int64_t tile = at.positions[i] / kTilePositions, block = table_of(at, at.tables, i)[tile];
    if (window.tables == nullptr) {
      check_block(block, pool);
      continue;
    }
    const int64_t other = table_of(at, window.tables, i)[tile];
    if (block == -1 && other == -1) refuse("row " + std::to_string(i) + " has no block to be stored in");
    if (block != -1) check_block(block, pool);
    if (other != -1) check_block(other, window.pool);
  }
}

// Checks the blocks that each row reads. Adjacent rows of a sequence read the same tiles, up to the furthest position.
void check_read(const RowPlaces& at, const KeyValuePool& pool, const WindowTiles& window) {
  check_rows(at);
  for (int64_t i = 0; i < at.rows;) {
    int64_t furthest = 0, next = i;
    const int32_t* const other = window.tables == nullptr ? nullptr : table_of(at, window.tables, i);
    for (; next < at.rows && at.sequences[next] == at.sequences[i]; next++) {
      const int64_t own = at.positions[next] / kTilePositions;
      furthest = std::max(furthest, own);
      if (other != nullptr) check_block(other[own], window.pool);
    }
    const int32_t* const table = table_of(at, at.tables, i);
    if (other == nullptr) check_block(table[furthest], pool);
    if (other != nullptr) check_block(other[0], window.pool);
    for (int64_t tile = other == nullptr ? 0 : 1; tile < furthest; tile++) check_block(table[tile], pool);
    i = next;
  }
}

uint8_t* head_of(const KeyValuePool& pool, int64_t block, int64_t head) {
  const int64_t number = (block / pool.run * pool.kv_heads + head) * pool.run + block % pool.run;
  return pool.data + number * head_bytes(pool.format, pool.dim);
}

void put_halves(const KernelTable& table, const float* k, const float* v, int64_t dim, int64_t slot, uint8_t* head) {
  half* const keys = reinterpret_cast<half*>(head);
  half rounded[64];
  for (int64_t d = 0; d < dim; d += 64) {
    const int64_t count = std::min<int64_t>(64, dim - d);
    table.to_half(k + d, count, rounded);
    for (int64_t i = 0; i < count; i++) keys[(d + i) * kTilePositions + slot] = rounded[i];
  }
  table.to_half(v, dim, keys + dim * kTilePositions + slot * dim);
}

// Stores a key. The four levels of a group are adjacent.
void put_key(const uint8_t* levels, int64_t dim, int bits, int64_t slot, uint8_t* keys) {
  for (int64_t group = 0; group < dim / 4; group++) {
    uint32_t four, byte;
    std::memcpy(&four, levels + 4 * group, 4);
    uint8_t* const at = keys + (group * bits / 8 * kTilePositions + slot) * 4;
    if (bits == 4) {
      const int shift = int(group % 2) * 4;
      std::memcpy(&byte, at, 4);
      four = (byte & ~(0x0f0f0f0fu << shift)) | four << shift;
    }
    std::memcpy(at, &four, 4);
  }
}

// Writes one bit field of every fourth byte.
void put_fields(const uint8_t* levels, int64_t dim, int from, int bits, int shift, uint8_t* out) {
  const unsigned mask = (1u << bits) - 1;
  for (int64_t i = 0; i < dim; i++)
    out[4 * i] = uint8_t((out[4 * i] & ~(mask << shift)) | (levels[i] >> from & mask) << shift);
}

// Stores a value: one of the four positions of a group, in every lane.
void put_value(const uint8_t* levels, int64_t dim, int bits, int64_t slot, uint8_t* values) {
  const int64_t group = slot / 4, row_bytes = 4 * dim;
  uint8_t* const lane = values + slot % 4;
  if (bits == 8) {
    for (int64_t i = 0; i < dim; i++) lane[group * row_bytes + 4 * i] = levels[i];
  } else if (bits == 4) {
    put_fields(levels, dim, 0, 4, int(group % 2) * 4, lane + group / 2 * row_bytes);
  } else {
    constexpr int64_t kLowRows = kTilePositions / 4 / 4;
    put_fields(levels, dim, 0, 2, int(group % 4) * 2, lane + group / 4 * row_bytes);
    put_fields(levels, dim, 2, 1, int(group % 8), lane + (kLowRows + group / 8) * row_bytes);
  }
}

void put_rounded(const KernelTable& table, const float* k, const float* v, const KeyValuePool& pool, int64_t slot,
                 uint8_t* head) {
  const CacheFormat format = pool.format;
  uint8_t levels[kMostByteDim];
  half* const scales = reinterpret_cast<half*>(head + scales_at(format, pool.dim));
  table.round_head(k, pool.dim, key_bits(format), levels, scales + slot);
  put_key(levels, pool.dim, key_bits(format), slot, head);
  table.round_head(v, pool.dim, value_bits(format), levels, scales + kTilePositions + slot);
  put_value(levels, pool.dim, value_bits(format), slot, head + key_bytes(format, pool.dim));
}

void put(const KernelTable& table, const float* k, const float* v, const KeyValuePool& pool, int64_t block,
         int64_t head, int64_t slot) {
  uint8_t* const to = head_of(pool, block, head);
  if (pool.format == CacheFormat::f16)
    put_halves(table, k, v, pool.dim, slot, to);
  else
    put_rounded(table, k, v, pool, slot, to);
}

}  // namespace

Step store_key_values(const float* k, const float* v, RowPlaces places, KeyValuePool pool, WindowTiles window) {
  return [=](ThreadPool& threads) {
    check_written(places, pool, window);
    const KernelTable& table = kernels();
    // One thread writes all rows of a head, because neighboring positions share bytes and cache lines.
    auto task = [&](int64_t head, int) {
      for (int64_t i = 0; i < places.rows; i++) {
        const int64_t p = places.positions[i], tile = p / kTilePositions, slot = p % kTilePositions;
        const int64_t from = (i * pool.kv_heads + head) * pool.dim;
        const int64_t block = table_of(places, places.tables, i)[tile];
        if (block >= 0) put(table, k + from, v + from, pool, block, head, slot);
        if (window.tables == nullptr) continue;
        const int64_t other = table_of(places, window.tables, i)[tile];
        if (other >= 0) put(table, k + from, v + from, window.pool, other, head, slot);
      }
    };
    run_tasks(threads, pool.kv_heads, places.rows * pool.kv_heads * pool.dim * 256, task);
  };
}

namespace {

// Adjacent rows of one sequence. Each tile is read once for all of them.
struct Group {
  int64_t row, rows;
};
std::vector<Group> group_rows(const RowPlaces& places, int64_t most) {
  std::vector<Group> groups;
  for (int64_t i = 0; i < places.rows; i++) {
    if (!groups.empty() && groups.back().rows < most && places.sequences[groups.back().row] == places.sequences[i])
      groups.back().rows++;
    else
      groups.push_back({i, 1});
  }
  return groups;
}

// The lists of pointers of one worker.
struct Pointers {
  std::vector<const float*> q;
  std::vector<float*> out;
  std::vector<int64_t> limits;
  std::vector<const uint8_t*> first, second;  // tiles and window tiles; for f16, keys and values
};

}  // namespace

Step attention(const float* q, int64_t heads, RowPlaces places, KeyValuePool pool, WindowTiles window, float scale,
               float* out) {
  const int64_t shared = heads / pool.kv_heads;  // query heads that read the same keys
  const bool halves = pool.format == CacheFormat::f16;
  return [=](ThreadPool& threads) {
    check_read(places, pool, window);
    const KernelTable& table = kernels();
    const bool by_tiles = attention_by_tiles();
    int64_t rows_together = halves ? 8 : 16;
    if (!halves && by_tiles) {  // fewer if threads would be idle; groups are even, in multiples of four rows
      const int64_t rows = places.rows, most_rows = table.attention_tile_rows;
      const auto groups_of = [&](int64_t together) { return (rows + together - 1) / together; };
      int64_t groups = std::max<int64_t>(1, groups_of(most_rows));
      while (groups * pool.kv_heads < 2 * threads.size() && groups_of(4) > groups) groups++;
      rows_together = std::min(most_rows, (groups_of(groups) + 3) / 4 * 4);
    }
    const std::vector<Group> groups = group_rows(places, rows_together);
    const int64_t most = rows_together * shared;
    const int64_t bytes =
        halves ? 4 * attention_scratch_floats(most, pool.dim) : byte_attention_scratch(most, pool.dim);
    const size_t worker_bytes = (size_t(bytes) + 63) / 64 * 64;
    static Scratch scratch;  // guarded by engine_mutex()
    auto* const scratch_bytes = static_cast<uint8_t*>(scratch.get(worker_bytes * size_t(threads.size())));
    int64_t tiles = 1;
    for (int64_t i = 0; i < places.rows; i++) tiles = std::max(tiles, places.positions[i] / kTilePositions + 1);
    std::vector<Pointers> per_worker(size_t(threads.size()));
    for (auto& p : per_worker) {
      p.q.resize(size_t(most));
      p.out.resize(size_t(most));
      p.limits.resize(size_t(most));
      p.first.resize(size_t(tiles));
      p.second.resize(size_t(tiles));
    }
    auto task = [&](int64_t index, int worker) {
      const Group group = groups[size_t(int64_t(groups.size()) - 1 - index / pool.kv_heads)];  // the longest first
      const int64_t head = index % pool.kv_heads, queries = group.rows * shared;
      Pointers& to = per_worker[size_t(worker)];
      const int32_t* const blocks = table_of(places, places.tables, group.row);
      const int32_t* const others = window.tables == nullptr ? nullptr : table_of(places, window.tables, group.row);
      int64_t furthest = 0;
      for (int64_t row = group.row; row < group.row + group.rows; row++) {
        for (int64_t i = 0; i < shared; i++) {
          const size_t query = size_t((row - group.row) * shared + i);
          to.q[query] = q + (row * heads + head * shared + i) * pool.dim;
          to.out[query] = out + (row * heads + head * shared + i) * pool.dim;
          to.limits[query] = places.positions[row] + 1;
        }
        const int64_t own = places.positions[row] / kTilePositions;
        furthest = std::max(furthest, own);
        if (others != nullptr) to.second[size_t(own)] = head_of(window.pool, others[own], head);
      }
      if (others != nullptr) to.second[0] = head_of(window.pool, others[0], head);
      for (int64_t tile = others == nullptr ? 0 : 1; tile < furthest + (others == nullptr); tile++) {
        const uint8_t* const data = head_of(pool, blocks[tile], head);
        to.first[size_t(tile)] = data;
        if (halves) to.second[size_t(tile)] = data + key_bytes(pool.format, pool.dim);
      }
      uint8_t* const mine = scratch_bytes + worker_bytes * size_t(worker);
      if (halves) {
        AttentionTask t{};
        t.q = to.q.data();
        t.out = to.out.data();
        t.limits = to.limits.data();
        t.queries = queries;
        t.dim = pool.dim;
        t.k_tiles = reinterpret_cast<const half* const*>(to.first.data());
        t.v_tiles = reinterpret_cast<const half* const*>(to.second.data());
        t.scale = scale;
        t.scratch = reinterpret_cast<float*>(mine);
        table.attention(t);
      } else {
        ByteAttentionTask t{};
        t.q = to.q.data();
        t.out = to.out.data();
        t.limits = to.limits.data();
        t.queries = queries;
        t.dim = pool.dim;
        t.format = pool.format;
        t.tiles = to.first.data();
        t.window = to.second.data();
        t.scale = scale;
        t.by_tiles = by_tiles;
        t.scratch = mine;
        table.attention_bytes(t);
      }
    };
    int64_t pairs = 0;
    for (int64_t i = 0; i < places.rows; i++) pairs += places.positions[i] + 1;
    run_tasks(threads, int64_t(groups.size()) * pool.kv_heads, 2 * pairs * heads * pool.dim, task);
  };
}

}  // namespace qtensor
