// Levels of 4 and 3 bits: a table fitted to a Gaussian, symmetric about zero, with 127 as the outermost level. For the
// upper half: where each level begins, its difference from the previous one, the first level, and the position of 127
// in standard deviations.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

struct LevelTable {
  int half;  // levels on each side
  float begins[7], larger[7];
  float first, deviations;
  uint8_t bytes[16];  // 128 + level
};
constexpr LevelTable kLevels4 = {8,
                                 {12.0f, 24.5f, 37.5f, 51.0f, 66.5f, 85.5f, 111.5f},
                                 {12.0f, 13.0f, 13.0f, 14.0f, 17.0f, 21.0f, 31.0f},
                                 6.0f,
                                 2.7326f,
                                 {1, 32, 53, 70, 84, 97, 110, 122, 134, 146, 159, 172, 186, 203, 224, 255}};
constexpr LevelTable kLevels3 = {4,
                                 {29.5f, 62.0f, 103.0f, 1e30f, 1e30f, 1e30f, 1e30f},
                                 {31.0f, 34.0f, 48.0f, 0.0f, 0.0f, 0.0f, 0.0f},
                                 14.0f,
                                 2.1520f,
                                 {1, 49, 83, 114, 142, 173, 207, 255, 1, 49, 83, 114, 142, 173, 207, 255}};

}  // namespace
}  // namespace qtensor
