// Passes over flat memory: AdamW, the sum of squares, accumulation and conversion.

#pragma once

#include "common.h"

namespace {

constexpr int64_t kBlock = 1 << 16;  // elements of one partial sum: fixed, so sums do not depend on the thread count
constexpr int kWideLanes = 32;       // independent accumulators of a partial sum in fp64

// The values that all elements of one update share.
struct Adam {
  float unscale, decay, first_weight, second_decay, second_weight, root_correction, eps, step_size;
};

// Does the arithmetic of torch's fused AdamW, operation by operation, for equal bits: multiply-adds are fused where
// torch fuses them and nowhere else. Moves 30 bytes per element with fp32 gradients: reads and writes the master and
// both moments, reads the gradient, writes the 16-bit parameter.
template <typename G, typename P>
INLINE void adamw_of(const Adam& a, float* __restrict master, const G* __restrict grad, float* __restrict first,
                     float* __restrict second, P* __restrict published, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = wide(grad[i]) / a.unscale;
    const float m = __builtin_fmaf(a.first_weight, g - first[i], first[i]);
    const float v = __builtin_fmaf(a.second_weight * g, g, second[i] * a.second_decay);
    const float p = master[i] * a.decay - a.step_size * m / (std::sqrt(v) / a.root_correction + a.eps);
    first[i] = m;
    second[i] = v;
    master[i] = p;
    published[i] = narrow<P>(p);
  }
}

#define ADAMW(G, P)                                                                                                   \
  EXACT FOR_EVERY_CPU void adamw_loop(const Adam& a, float* master, const G* grad, float* first, float* second,       \
                                      P* published, int64_t n) {                                                      \
    adamw_of(a, master, grad, first, second, published, n);                                                           \
  }
ADAMW(float, BFloat16)
ADAMW(BFloat16, BFloat16)
ADAMW(float, Half)
ADAMW(Half, Half)
#undef ADAMW

template <typename T>
INLINE double squares_of(const T* __restrict x, int64_t n) {
  double sums[kWideLanes] = {};
  int64_t i = 0;
  for (; i + kWideLanes <= n; i += kWideLanes) {
    for (int lane = 0; lane < kWideLanes; ++lane) {
      const double v = wide(x[i + lane]);
      sums[lane] += v * v;
    }
  }
  double total = 0.0;
  for (; i < n; ++i) total += static_cast<double>(wide(x[i])) * wide(x[i]);
  for (int lane = 0; lane < kWideLanes; ++lane) total += sums[lane];
  return total;
}

#define FLAT(T)                                                                                                       \
  FOR_EVERY_CPU double squares(const T* x, int64_t n) { return squares_of(x, n); }                                    \
  FOR_EVERY_CPU void accumulate(float* __restrict into, const T* __restrict x, int64_t n) {                           \
    for (int64_t i = 0; i < n; ++i) into[i] += wide(x[i]);                                                            \
  }                                                                                                                   \
  FOR_EVERY_CPU void convert(float* __restrict into, const T* __restrict x, int64_t n) {                              \
    for (int64_t i = 0; i < n; ++i) into[i] = wide(x[i]);                                                             \
  }                                                                                                                   \
  FOR_EVERY_CPU void convert(BFloat16* __restrict into, const T* __restrict x, int64_t n) {                           \
    for (int64_t i = 0; i < n; ++i) into[i] = narrow<BFloat16>(wide(x[i]));                                           \
  }                                                                                                                   \
  FOR_EVERY_CPU void convert(Half* __restrict into, const T* __restrict x, int64_t n) {                               \
    for (int64_t i = 0; i < n; ++i) into[i] = narrow<Half>(wide(x[i]));                                               \
  }
FOR_EVERY_TYPE(FLAT)
#undef FLAT

}  // namespace
