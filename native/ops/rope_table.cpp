// Cosines and sines for rotary positions, in double precision. The reduction and the polynomials are part of this file,
// so that the table does not depend on a math library. Compiled without contraction to fused multiply-add.
#include "ops/rope_table.h"

#include <stdexcept>
#include <string>

namespace qtensor {
namespace {

// x reduced to [-pi/4, pi/4] by subtracting a multiple of pi/2, which is stored in three parts. The first two parts
// have 33 bits, so the reduction is exact for quotients below 2^20, that is, for angles below 1.6 million.
struct Reduced {
  double angle;
  int64_t quadrant;
};
Reduced reduce(double x) {
  constexpr double high = 0x1.921fb544p+0, middle = 0x1.0b4611a6p-34, low = 0x1.3198a2e037073p-69;
  const double n = __builtin_rint(x * 0x1.45f306dc9c883p-1);  // 2 / pi
  return {((x - n * high) - n * middle) - n * low, int64_t(n)};
}

// Taylor series. For |x| <= pi/4, the first omitted terms are below 2^-60.
double sine_series(double x) {
  const double z = x * x;
  double sum = 0.0;
  for (int k = 19; k >= 3; k -= 2) sum = (1.0 - sum) * z / double(k * (k - 1));
  return x - x * sum;
}
double cosine_series(double x) {
  const double z = x * x;
  double sum = 0.0;
  for (int k = 20; k >= 2; k -= 2) sum = (1.0 - sum) * z / double(k * (k - 1));
  return 1.0 - sum;
}

}  // namespace

Step rope_table(const double* frequency, int64_t dim_half, const int32_t* positions, int64_t rows, double factor,
                float* cosine, float* sine) {
  return [=](ThreadPool&) {
    for (int64_t row = 0; row < rows; row++)
      if (positions[row] < 0)
        throw std::invalid_argument("position " + std::to_string(positions[row]) + " is negative");
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < dim_half; i++) {
        const Reduced r = reduce(double(positions[row]) * frequency[i]);
        const double s = sine_series(r.angle), c = cosine_series(r.angle);
        const int quarter = int(r.quadrant & 3);
        const double sin = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
        const double cos = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
        cosine[row * dim_half + i] = float(cos * factor);
        sine[row * dim_half + i] = float(sin * factor);
      }
  };
}

}  // namespace qtensor
