// Rotary positions: rotate each pair of channels of a head by the angle of the position.

#pragma once

#include "passes.h"

namespace {

// Rotates the pairs of channels i and i + half of one head. `turn` is 1, or -1 for the inverse rotation.
template <typename T>
INLINE void rotary_head(const T* __restrict x, const T* __restrict cos, const T* __restrict sin, float turn,
                        T* __restrict y, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = wide(x[i]), b = wide(x[i + half]), c = wide(cos[i]), s = turn * wide(sin[i]);
    y[i] = narrow<T>(a * c - b * s);
    y[i + half] = narrow<T>(b * c + a * s);
  }
}

#define ROTARY(T)                                                                                                     \
  FOR_EVERY_CPU void rotary_loop(const T* x, int64_t stride, const T* cos, const T* sin, float turn, T* y,            \
                                 int64_t heads, int64_t half) {                                                       \
    for (int64_t h = 0; h < heads; ++h) rotary_head(x + h * stride, cos, sin, turn, y + 2 * h * half, half);          \
  }
FOR_EVERY_TYPE(ROTARY)
#undef ROTARY

}  // namespace
