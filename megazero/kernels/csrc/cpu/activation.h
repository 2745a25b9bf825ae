// GELU in its tanh form, and SwiGLU, over rows or flat memory: one pass and one exponential per element.

#pragma once

#include "columns.h"

namespace {

constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;

// The tanh form of GELU is v sigmoid(z) with z = 2 sqrt(2/pi) (v + 0.044715 v^3), because 1 + tanh(u) = 2 sigmoid(2u).
// The exponential is that of -|z|, which never overflows: with e = e^-|z| and s = 1 / (1 + e), sigmoid(z) is s for
// v > 0 and e s otherwise; its derivative is e s s. There is no subtraction whose error a large v would amplify.
INLINE float exponential_of_gelu(float v) {
  constexpr float kLinear = -2.0f * kSqrt2OverPi;
  return exponential_or_zero(__builtin_fabsf(v) * (kLinear + kLinear * kCubic * (v * v)));
}

INLINE float gelu(float v) {
  const float e = exponential_of_gelu(v);
  return v * (v > 0.0f ? 1.0f : e) / (1.0f + e);
}

INLINE float gelu_slope(float v) {
  v = __builtin_fabsf(v) > 1e15f ? std::copysign(1e15f, v) : v;  // the slope is 0 or 1 there, and v^2 does not overflow
  const float e = exponential_of_gelu(v), s = 1.0f / (1.0f + e);
  const float dz = 2.0f * kSqrt2OverPi * (1.0f + 3.0f * kCubic * v * v);
  return (v > 0.0f ? s : e * s) + v * (e * s * s) * dz;
}

template <typename T>
INLINE void gelu_rows(const T* x, const T* bias, T* y, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n)
    if (bias)
      map(n, y, [&](auto at) { return gelu(wide(x, at) + wide(bias, at)); });
    else
      map(n, y, [&](auto at) { return gelu(wide(x, at)); });
}

// Writes dx and, with a bias, adds its rows to dbias.
template <typename T>
INLINE void gelu_backward_rows(const T* grad, const T* x, const T* bias, T* dx, int64_t rows, int64_t n,
                               float* dbias) {
  for (int64_t r = 0; r < rows; ++r, grad += n, x += n, dx += n)
    if (bias)
      map(n, dx, [&](auto at) {
        const float d = wide(grad, at) * gelu_slope(wide(x, at) + wide(bias, at));
        dbias[place<T>(at, n)] += d;
        return d;
      });
    else
      map(n, dx, [&](auto at) { return wide(grad, at) * gelu_slope(wide(x, at)); });
}

// silu(v) = v sigmoid(v), with e = e^-|v| and s = 1 / (1 + e) as above.
template <typename T>
INLINE void swiglu_of(const T* gate, const T* up, T* y, int64_t n) {
  map(n, y, [&](auto at) {
    const float v = wide(gate, at), e = exponential_or_zero(-__builtin_fabsf(v));
    return v * (v > 0.0f ? 1.0f : e) / (1.0f + e) * wide(up, at);
  });
}

template <typename T>
INLINE void swiglu_backward_of(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  map(n, std::array{dgate, dup}, [&](auto at) {
    const float g = wide(grad, at), v = wide(gate, at);
    const float e = exponential_or_zero(-__builtin_fabsf(v)), s = 1.0f / (1.0f + e);
    const float sigmoid = v > 0.0f ? s : e * s;
    return std::array{g * wide(up, at) * (sigmoid + v * (e * s * s)), g * v * sigmoid};
  });
}

#define ACTIVATION(T)                                                                                                 \
  FOR_EVERY_CPU void gelu_loop(const T* x, const T* bias, T* y, int64_t rows, int64_t n) {                            \
    gelu_rows(x, bias, y, rows, n);                                                                                   \
  }                                                                                                                   \
  FOR_EVERY_CPU void gelu_backward_loop(const T* grad, const T* x, const T* bias, T* dx, int64_t rows, int64_t n,     \
                                        float* dbias) {                                                               \
    gelu_backward_rows(grad, x, bias, dx, rows, n, dbias);                                                            \
  }                                                                                                                   \
  FOR_EVERY_CPU void swiglu_loop(const T* gate, const T* up, T* y, int64_t n) { swiglu_of(gate, up, y, n); }          \
  FOR_EVERY_CPU void swiglu_backward_loop(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {   \
    swiglu_backward_of(grad, gate, up, dgate, dup, n);                                                                \
  }
FOR_EVERY_TYPE(ACTIVATION)
#undef ACTIVATION

}  // namespace
