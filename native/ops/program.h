// Operations over whole arrays are steps, which run now or are kept in a program and run again.
//
// A step holds pointers, not values: what it computes depends on what the arrays hold when it runs. Sizes are checked
// when a step is made; what arrays contain (row numbers, positions, block tables) is checked when it runs, before
// anything is written. Both throw std::invalid_argument.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/threads.h"

namespace qtensor {

using Step = std::function<void(ThreadPool&)>;

class Program {
 public:
  void add(Step step) { steps_.push_back(std::move(step)); }
  void run() const {
    const std::lock_guard<std::mutex> lock(engine_mutex());
    for (const auto& step : steps_) step(thread_pool());
  }
  int64_t size() const { return int64_t(steps_.size()); }

 private:
  std::vector<Step> steps_;
};

}  // namespace qtensor
