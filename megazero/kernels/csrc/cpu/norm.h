// LayerNorm and RMSNorm of rows of n columns, and both with the residual sum before them.
//
// A row is read from memory once; later passes over it find it in the first-level cache. LayerNorm takes its variance
// around the mean, in a second pass: the difference of two large sums would not do in fp32.

#pragma once

#include "common.h"

namespace {

constexpr int64_t kRowsPerSum = 64;  // rows of one partial sum of weight gradients: fixed, whatever the threads

template <typename T>
struct Norm {
  const T *x, *residual;
  const float *weight, *bias;  // widened once, not for each row
  float eps;
  T *total, *y;
  float *mean, *rstd;
  int64_t n;
};

template <typename T, bool kCentred, bool kAdds>
INLINE void norm_rows(const Norm<T>& a, int64_t begin, int64_t end) {
  const int64_t n = a.n;
  for (int64_t r = begin; r < end; ++r) {
    const T* __restrict row = a.x + r * n;
    if (kAdds) {
      const T* __restrict other = a.residual + r * n;
      T* __restrict total = a.total + r * n;
      for (int64_t i = 0; i < n; ++i) total[i] = narrow<T>(wide(row[i]) + wide(other[i]));
      row = total;
    }
    const float mean = kCentred ? sum_of(n, [&](int64_t i) { return wide(row[i]); }) / n : 0.0f;
    const float squares = sum_of(n, [&](int64_t i) {
      const float v = wide(row[i]) - mean;
      return v * v;
    });
    const float rstd = 1.0f / std::sqrt(squares / n + a.eps);
    T* __restrict y = a.y + r * n;
    const float* __restrict weight = a.weight;
    const float* __restrict bias = a.bias;
    for (int64_t i = 0; i < n; ++i) {
      const float z = (wide(row[i]) - mean) * rstd * weight[i];
      y[i] = narrow<T>(kCentred ? z + bias[i] : z);
    }
    if (kCentred) a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
}

template <typename T>
struct NormBackward {
  const T *grad, *grad_total, *x;
  const float *weight, *mean, *rstd;
  T* dx;
  int64_t rows, n;
};

// dx of the rows of one block, and their part of the weights' gradients (dbias only when centred), both [n].
template <typename T, bool kCentred, bool kAdds>
INLINE void norm_backward_block(const NormBackward<T>& a, int64_t block, float* __restrict dweight,
                                float* __restrict dbias) {
  const int64_t n = a.n;
  const float* __restrict weight = a.weight;
  for (int64_t i = 0; i < n; ++i) dweight[i] = 0.0f;
  if (kCentred)
    for (int64_t i = 0; i < n; ++i) dbias[i] = 0.0f;
  for (int64_t r = block * kRowsPerSum; r < std::min(a.rows, (block + 1) * kRowsPerSum); ++r) {
    const T* __restrict grad = a.grad + r * n;
    const T* __restrict x = a.x + r * n;
    const T* __restrict other = kAdds ? a.grad_total + r * n : nullptr;
    T* __restrict dx = a.dx + r * n;
    const float mean = kCentred ? a.mean[r] : 0.0f, rstd = a.rstd[r];
    const auto [all, along] = two_sums_of(n, [&](int64_t i, float& plain, float& weighted) {
      const float each = wide(grad[i]) * weight[i];
      if (kCentred) plain += each;
      weighted += each * (wide(x[i]) - mean);
    });
    const float h = all / n, hz = rstd * along / n;
    for (int64_t i = 0; i < n; ++i) {
      const float g = wide(grad[i]), z = (wide(x[i]) - mean) * rstd;
      float d = (g * weight[i] - h - z * hz) * rstd;
      if (kAdds) d += wide(other[i]);
      dx[i] = narrow<T>(d);
      dweight[i] += g * z;
      if (kCentred) dbias[i] += g;
    }
  }
}

// out = the sum of the blocks' parts, in their order.
template <typename T>
INLINE void sum_blocks(const float* parts, int64_t blocks, int64_t stride, T* __restrict out, int64_t n) {
  constexpr int64_t kWidth = 256;
  double sums[kWidth];
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t width = std::min(kWidth, n - i);
    for (int64_t j = 0; j < width; ++j) sums[j] = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      const float* __restrict part = parts + b * stride + i;
      for (int64_t j = 0; j < width; ++j) sums[j] += part[j];
    }
    for (int64_t j = 0; j < width; ++j) out[i + j] = narrow<T>(static_cast<float>(sums[j]));
  }
}

#define NORM(T)                                                                                                       \
  FOR_EVERY_CPU void layer_norm_loop(const Norm<T>& a, int64_t begin, int64_t end) {                                  \
    norm_rows<T, true, false>(a, begin, end);                                                                         \
  }                                                                                                                   \
  FOR_EVERY_CPU void add_layer_norm_loop(const Norm<T>& a, int64_t begin, int64_t end) {                              \
    norm_rows<T, true, true>(a, begin, end);                                                                          \
  }                                                                                                                   \
  FOR_EVERY_CPU void rms_norm_loop(const Norm<T>& a, int64_t begin, int64_t end) {                                    \
    norm_rows<T, false, false>(a, begin, end);                                                                        \
  }                                                                                                                   \
  FOR_EVERY_CPU void add_rms_norm_loop(const Norm<T>& a, int64_t begin, int64_t end) {                                \
    norm_rows<T, false, true>(a, begin, end);                                                                         \
  }                                                                                                                   \
  FOR_EVERY_CPU void layer_norm_backward_loop(const NormBackward<T>& a, int64_t block, float* dw, float* db) {        \
    norm_backward_block<T, true, false>(a, block, dw, db);                                                            \
  }                                                                                                                   \
  FOR_EVERY_CPU void add_layer_norm_backward_loop(const NormBackward<T>& a, int64_t block, float* dw, float* db) {    \
    norm_backward_block<T, true, true>(a, block, dw, db);                                                             \
  }                                                                                                                   \
  FOR_EVERY_CPU void rms_norm_backward_loop(const NormBackward<T>& a, int64_t block, float* dw, float* db) {          \
    norm_backward_block<T, false, false>(a, block, dw, db);                                                           \
  }                                                                                                                   \
  FOR_EVERY_CPU void add_rms_norm_backward_loop(const NormBackward<T>& a, int64_t block, float* dw, float* db) {      \
    norm_backward_block<T, false, true>(a, block, dw, db);                                                            \
  }                                                                                                                   \
  FOR_EVERY_CPU void sum_blocks_loop(const float* parts, int64_t blocks, int64_t stride, T* out, int64_t n) {         \
    sum_blocks(parts, blocks, stride, out, n);                                                                        \
  }
FOR_EVERY_TYPE(NORM)
#undef NORM

}  // namespace
