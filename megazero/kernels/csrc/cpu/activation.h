// GELU in both forms, and SwiGLU: rows (or flat memory) in, one pass, one exponential an element.

#pragma once

#include "passes.h"

namespace {

constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;
constexpr float kOneOverSqrt2Pi = 0.3989422804014327f;

// The tanh form of GELU is v sigmoid(z) with z = 2 sqrt(2/pi) (v + 0.044715 v^3), because 1 + tanh(u) = 2 sigmoid(2u).
// Its exponential is taken of -|z|, which never overflows: with e = e^-|z| and s = 1 / (1 + e), sigmoid(z) is s for
// v > 0 and e s below, its derivative e s s. No difference is taken whose error a large v would multiply.
INLINE float exponential_of_tanh(float v) {
  constexpr float kLinear = -2.0f * kSqrt2OverPi;
  return exponential_or_zero(__builtin_fabsf(v) * (kLinear + kLinear * kCubic * (v * v)));
}

INLINE float gelu_tanh(float v) {
  const float e = exponential_of_tanh(v);
  return v * (v > 0.0f ? 1.0f : e) / (1.0f + e);
}

INLINE float gelu_tanh_slope(float v) {
  v = __builtin_fabsf(v) > 1e15f ? std::copysign(1e15f, v) : v;  // where the slope is 0 or 1, and v^2 can be had
  const float e = exponential_of_tanh(v), s = 1.0f / (1.0f + e);
  const float dz = 2.0f * kSqrt2OverPi * (1.0f + 3.0f * kCubic * v * v);
  return (v > 0.0f ? s : e * s) + v * (e * s * s) * dz;
}

// Phi(v), the normal distribution: of its tail erfc(x) / 2 with x = |v| / sqrt(2). erfc(x) = e^-x^2 t Q(t) with
// t = 1 / (1 + 0.4 x), a form of C. Hastings (1955); this Q of degree 8 is fitted to x <= 10 for the smallest relative
// error, 7e-8, and 4e-7 with fp32's roundings. The bell is e^(-v^2 / 2).
INLINE float normal_distribution(float v, float bell_of_v) {
  const float t = 1.0f / (1.0f + 0.28284271247461906f * __builtin_fabsf(v));
  float q = 4.125302657e-02f;
  q = q * t - 1.403191984e-01f;
  q = q * t + 8.398725837e-02f;
  q = q * t + 8.796431124e-02f;
  q = q * t + 7.975655049e-02f;
  q = q * t + 1.933931708e-01f;
  q = q * t + 2.018876076e-01f;
  q = q * t + 2.264431119e-01f;
  q = q * t + 2.256342322e-01f;
  const float tail = 0.5f * bell_of_v * t * q;
  return v > 0.0f ? 1.0f - tail : tail;
}

INLINE float bell(float v) { return exponential_or_zero(-0.5f * v * v); }

INLINE float gelu_erf(float v) { return v * normal_distribution(v, bell(v)); }

// Phi(v) + v phi(v) with phi(v) = e^(-v^2 / 2) / sqrt(2 pi).
INLINE float gelu_erf_slope(float v) {
  const float e = bell(v);
  return normal_distribution(v, e) + v * e * kOneOverSqrt2Pi;
}

template <auto form, typename T>
INLINE void gelu_rows(const T* x, const T* bias, T* y, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n)
    if (bias)
      map(n, y, [&](auto at) { return form(wide(x, at) + wide(bias, at)); });
    else
      map(n, y, [&](auto at) { return form(wide(x, at)); });
}

template <auto slope, typename T>
INLINE void gelu_backward_rows(const T* grad, const T* x, const T* bias, T* dx, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r, grad += n, x += n, dx += n)
    if (bias)
      map(n, dx, [&](auto at) { return wide(grad, at) * slope(wide(x, at) + wide(bias, at)); });
    else
      map(n, dx, [&](auto at) { return wide(grad, at) * slope(wide(x, at)); });
}

// silu(v) = v sigmoid(v), with e and s as above, of |v|.
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
  FOR_EVERY_CPU void gelu_tanh_loop(const T* x, const T* bias, T* y, int64_t rows, int64_t n) {                       \
    gelu_rows<gelu_tanh>(x, bias, y, rows, n);                                                                        \
  }                                                                                                                   \
  FOR_EVERY_CPU void gelu_erf_loop(const T* x, const T* bias, T* y, int64_t rows, int64_t n) {                        \
    gelu_rows<gelu_erf>(x, bias, y, rows, n);                                                                         \
  }                                                                                                                   \
  FOR_EVERY_CPU void gelu_tanh_backward_loop(const T* grad, const T* x, const T* bias, T* dx, int64_t rows,           \
                                             int64_t n) {                                                             \
    gelu_backward_rows<gelu_tanh_slope>(grad, x, bias, dx, rows, n);                                                  \
  }                                                                                                                   \
  FOR_EVERY_CPU void gelu_erf_backward_loop(const T* grad, const T* x, const T* bias, T* dx, int64_t rows,            \
                                            int64_t n) {                                                              \
    gelu_backward_rows<gelu_erf_slope>(grad, x, bias, dx, rows, n);                                                   \
  }                                                                                                                   \
  FOR_EVERY_CPU void swiglu_loop(const T* gate, const T* up, T* y, int64_t n) { swiglu_of(gate, up, y, n); }          \
  FOR_EVERY_CPU void swiglu_backward_loop(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {   \
    swiglu_backward_of(grad, gate, up, dgate, dup, n);                                                                \
  }
FOR_EVERY_TYPE(ACTIVATION)
#undef ACTIVATION

}  // namespace
