// What surrounds attention: rotary positions, and the causal softmax for where no flash kernel runs.

#pragma once

#include "common.h"

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

// softmax(scale * scores) over the first `seen` of n columns, the others 0. `work` holds a row in fp32.
template <typename T>
INLINE void softmax_row(const T* __restrict scores, float scale, T* __restrict y, float* __restrict work, int64_t seen,
                        int64_t n) {
  const float highest = largest_of(seen, kLowest<float>, [&](int64_t i) { return scale * wide(scores[i]); });
  for (int64_t i = 0; i < seen; ++i) work[i] = exponential_or_zero(scale * wide(scores[i]) - highest);
  const float share = 1.0f / sum_of(seen, [&](int64_t i) { return work[i]; });
  for (int64_t i = 0; i < seen; ++i) y[i] = narrow<T>(work[i] * share);
  for (int64_t i = seen; i < n; ++i) y[i] = narrow<T>(0.0f);
}

// scale * p (g - sum(g p)).
template <typename T>
INLINE void softmax_backward_row(const T* __restrict grad, const T* __restrict p, float scale, T* __restrict dx,
                                 int64_t seen, int64_t n) {
  const float sum = sum_of(seen, [&](int64_t i) { return wide(grad[i]) * wide(p[i]); });
  for (int64_t i = 0; i < seen; ++i) dx[i] = narrow<T>(scale * wide(p[i]) * (wide(grad[i]) - sum));
  for (int64_t i = seen; i < n; ++i) dx[i] = narrow<T>(0.0f);
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
