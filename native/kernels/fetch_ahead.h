// The next tile of the cache, fetched while one is worked on: two lines at a time, from either half, all the way
// through the scores, the powers and the values. A burst of requests would hold up everything else, and a phase without
// any would leave the memory idle. Figures: docs/kernels/attention.md.
struct FetchAhead {
  const uint8_t* at = nullptr;
  int64_t half = 0, left = 0;  // bytes of a half, and turns until it is all asked for
  FetchAhead() = default;
  FetchAhead(const uint8_t* tile, int64_t bytes) : at(tile), half((bytes + 127) / 128 * 64), left(half / 64) {}
  void ask() {
    if (left == 0) return;
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + half, 0, 2);
    at += 64;
    left--;
  }
};
