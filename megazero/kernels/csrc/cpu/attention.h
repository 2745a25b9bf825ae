// What surrounds attention: rotary positions, and the causal softmax for where no flash kernel runs.

#pragma once

#include "passes.h"

namespace {

// One head: channels i and i + half are turned by one angle. `turn` is 1, or -1 for the inverse.
template <typename T>
INLINE void rotary_head(const T* __restrict x, const T* __restrict cos, const T* __restrict sin, float turn,
                        T* __restrict y, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = wide(x[i]), b = wide(x[i + half]), c = wide(cos[i]), s = turn * wide(sin[i]);
    y[i] = narrow<T>(a * c - b * s);
    y[i + half] = narrow<T>(b * c + a * s);
  }
}

// A row is computed in whole lanes, because what remains after them is slow. A column that does not count is masked.
INLINE int64_t whole_lanes(int64_t seen) { return (seen + kLanes - 1) / kLanes * kLanes; }
template <typename At>
INLINE bool counts(At at, int64_t seen) {
  return static_cast<int32_t>(index(at)) < static_cast<int32_t>(seen);
}

// softmax(scale * scores) over the first `seen` of n columns, the others 0. `work` holds whole_lanes(n) numbers.
template <typename T>
INLINE void softmax_row(const T* scores, float scale, T* y, float* __restrict work, int64_t seen, int64_t n) {
  const int64_t all = whole_lanes(seen), there = std::min(all, n);
  for (int64_t i = 0; i < there; ++i) work[i] = scale * wide(scores[i]);
  for (int64_t i = seen; i < all; ++i) work[i] = -std::numeric_limits<float>::infinity();
  const float highest = largest_of<float>(all, kLowest<float>, [&](One at) { return work[at.i]; });
  const float sum = sum_of<float>(all, [&](One at) { return work[at.i] = exponential_or_zero(work[at.i] - highest); });
  const float share = 1.0f / sum;
  for (int64_t i = 0; i < there; ++i) y[i] = narrow<T>(work[i] * share);
  std::fill_n(y + seen, n - seen, T{});
}

// scale * p (g - sum(g p)).
template <typename T>
INLINE void softmax_backward_row(const T* grad, const T* p, float scale, T* dx, int64_t seen, int64_t n) {
  const int64_t m = whole_lanes(seen) <= n ? whole_lanes(seen) : seen;
  const float sum = sum_of<T>(m, [&](auto at) {
    const float product = wide(grad, at) * wide(p, at);
    return counts(at, seen) ? product : 0.0f;
  });
  map(m, dx, [&](auto at) { return scale * wide(p, at) * (wide(grad, at) - sum); });
  std::fill_n(dx + seen, n - seen, T{});
}

#define ATTENTION(T)                                                                                                  \
  FOR_EVERY_CPU void rotary_loop(const T* x, int64_t stride, const T* cos, const T* sin, float turn, T* y,            \
                                 int64_t heads, int64_t half) {                                                       \
    for (int64_t h = 0; h < heads; ++h) rotary_head(x + h * stride, cos, sin, turn, y + 2 * h * half, half);          \
  }                                                                                                                   \
  FOR_EVERY_CPU void softmax_loop(const T* scores, float scale, T* y, float* work, int64_t seen, int64_t n) {         \
    softmax_row(scores, scale, y, work, seen, n);                                                                     \
  }                                                                                                                   \
  FOR_EVERY_CPU void softmax_backward_loop(const T* grad, const T* p, float scale, T* dx, int64_t seen, int64_t n) {  \
    softmax_backward_row(grad, p, scale, dx, seen, n);                                                                \
  }
FOR_EVERY_TYPE(ATTENTION)
#undef ATTENTION

}  // namespace
