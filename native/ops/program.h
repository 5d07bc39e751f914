// Operations over whole arrays are steps, which run immediately or are stored in a program and run repeatedly.
//
// A step holds pointers, so its result depends on the contents of the arrays when it runs. Sizes are checked when a
// step is created; contents (row numbers, positions, block tables) are checked when it runs, before anything is
// written. Both checks throw std::invalid_argument.
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
