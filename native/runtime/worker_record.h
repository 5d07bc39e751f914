// Statistics of the thread pool's workers: the speed of each relative to the fastest, the time lost by waiting for a
// worker that finished last, and which workers are excluded for a while. The thread that calls `run` writes the
// statistics between two runs, so there is no lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace qtensor {

class WorkerRecords {
 public:
  using Nanoseconds = int64_t;

  // A worker's part in one run. Only that worker writes it, while it takes part.
  struct alignas(64) Part {
    Nanoseconds begun = 0, ended = 0;
    int64_t items = 0, items_in_all = 0;
    uint64_t run = 0;  // number of the run
    bool stood_back = false;
  };

  explicit WorkerRecords(int workers) : parts_(size_t(workers)), known_(size_t(workers)), rate_(double(workers)) {}

  Part& part(int worker) { return parts_[size_t(worker)]; }

  // Whether this worker takes part in a run that begins now.
  bool takes_part(int worker, Nanoseconds now) const {
    return known_[size_t(worker)].out_until.load(std::memory_order_relaxed) <= now;
  }

  // Whether a worker is so slow that it must check how many items are left before it takes another one.
  bool is_slow(int worker) const { return known_[size_t(worker)].slowness > kSlow; }

  // Whether the others finish `left` items before this worker finishes one.
  bool should_stand_back(int worker, int64_t left) const {
    const double slowness = known_[size_t(worker)].slowness;
    return slowness > kSlow && slowness * (rate_ - 1 / slowness) > double(left);
  }

  // Updates the statistics after a run. Called by worker 0.
  void account(uint64_t run, Nanoseconds now) {
    const Nanoseconds ended = parts_[0].ended, took = now - parts_[0].begun, waited = now - ended;
    const bool waited_long = waited * 4 > took;
    if (!waited_long && run % kLookedAt != 0) return;
    const int64_t weight = waited_long ? 1 : kLookedAt;
    double least = 0;
    for (const Part& p : parts_)
      if (p.run == run && p.items > 0)
        if (const double each = time_of_item(p); least == 0 || each < least) least = each;
    if (least == 0) return;
    usual_run_ += (double(took) - usual_run_) / 16;
    int last = -1;
    Nanoseconds last_end = ended, second_end = ended;
    rate_ = 0;
    for (size_t w = 0; w < parts_.size(); w++) {
      const Part& p = parts_[w];
      Known& k = known_[w];
      const bool took_part = p.run == run;
      if (took_part && p.items > 0)
        k.slowness += (std::min(time_of_item(p) / least, kSlowest) - k.slowness) / 4;
      else if (took_part && p.stood_back)
        k.slowness = std::max(1.0, k.slowness * kForgets);  // so that it is eventually tried again
      if (takes_part(int(w), now)) rate_ += 1 / k.slowness;
      if (!took_part || w == 0) continue;
      if (p.ended > last_end) {
        second_end = last_end;
        last_end = p.ended;
        last = int(w);
      } else {
        second_end = std::max(second_end, p.ended);
      }
    }
    for (size_t w = 1; w < parts_.size(); w++) {
      const Part& p = parts_[w];
      Known& k = known_[w];
      if (p.run != run || p.items == 0) continue;
      const double others = std::max(rate_ - 1 / k.slowness, 1.0);
      const double saved = double(p.items) * least / others, cost = int(w) == last ? double(last_end - second_end) : 0;
      k.debt = std::max(k.debt + cost - saved * double(weight), -kCredit * usual_run_);
      if (k.debt > kPatience * usual_run_) {
        k.absence = std::min(std::max(2 * k.absence, Nanoseconds(16 * k.debt)), kLongest);
        k.out_until.store(now + k.absence, std::memory_order_relaxed);
        k.debt = 0;
      } else if (k.debt < -kCredit * usual_run_ / 2) {
        k.absence -= k.absence / 64;
      }
    }
  }

 private:
  struct Known {
    double slowness = 1;  // time per item relative to the fastest worker
    double debt = 0;      // nanoseconds that the others waited for it, minus those that it saved them
    Nanoseconds absence = 0;
    std::atomic<Nanoseconds> out_until{0};  // atomic, because a worker reads it before it joins a run
  };
  static double time_of_item(const Part& p) {
    return double(std::max<Nanoseconds>(p.ended - p.begun, 1)) / double(p.items);
  }

  static constexpr double kSlow = 2, kSlowest = 1000, kForgets = 0.99;
  static constexpr double kPatience = 4, kCredit = 64;  // in typical runs
  static constexpr int64_t kLookedAt = 8;  // one run in this many is accounted, and every run that waited long
  static constexpr Nanoseconds kLongest = int64_t(1) << 36;  // some 70 s; a thread with idle priority can pause for 2 s

  std::vector<Part> parts_;
  std::vector<Known> known_;
  double rate_;           // items that all workers finish while the fastest finishes one
  double usual_run_ = 0;  // nanoseconds
};

}  // namespace qtensor
