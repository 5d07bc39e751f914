// Numbers of executed tile instructions of all threads.
#pragma once

#include <atomic>
#include <cstdint>

struct TileCounts {
  std::atomic<int64_t> configures{0}, zeros{0}, loads{0}, stores{0}, byte_products{0}, float_products{0};
  std::atomic<int64_t> in_use{0};  // threads whose tiles are configured
};
TileCounts& tile_counts();
