// LayerNorm and RMSNorm of rows of n columns, each also with a residual added first.
//
// A row is read from memory once; later passes find it in the first-level cache. LayerNorm computes the variance around
// the mean, in a second pass: mean(x^2) - mean^2 would lose too many digits in fp32.

#pragma once

#include "columns.h"

namespace {

constexpr int64_t kFetched = 512;    // elements of the next row prefetched per chunk; even

template <typename T>
struct Norm {
  const T *x, *residual;
  const float *weight, *bias;  // in fp32, widened once for all rows, in the order of `place`
  float eps;
  bool twice;  // RMSNorm: round z to T before the product
  T *total, *y;
  float *mean, *rstd;
  int64_t n;
};

template <typename T, bool kCentred, bool kAdds>
INLINE void norm_rows(const Norm<T>& a, int64_t begin, int64_t end) {
  const int64_t n = a.n;
  const bool twice = a.twice;
  for (int64_t r = begin; r < end; ++r) {
    const T* row = a.x + r * n;
    if (kAdds) {
      const T* other = a.residual + r * n;
      map(n, a.total + r * n, [&](auto at) { return wide(row, at) + wide(other, at); });
      row = a.total + r * n;
    }
    const float mean = kCentred ? sum_of<T>(n, [&](auto at) { return wide(row, at); }) / n : 0.0f;
    const float squares = sum_of<T>(n, [&](auto at) {
      const float v = wide(row, at) - mean;
      return v * v;
    });
    const float rstd = 1.0f / std::sqrt(squares / n + a.eps);
    const float *weight = a.weight, *bias = a.bias;
    map(n, a.y + r * n, [&](auto at) {
      const float z = (wide(row, at) - mean) * rstd;
      const float y = (!kCentred && twice ? wide(narrow<T>(z)) : z) * weight[place<T>(at, n)];
      return kCentred ? y + bias[place<T>(at, n)] : y;
    });
    if (kCentred) a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
}

template <typename T>
struct NormBackward {
  const T *grad, *grad_total, *x;
  const float *weight, *mean, *rstd;
  T* dx;
  int64_t n;
};

// Writes dx of some rows, and adds their part of dweight and (if centred) dbias.
template <typename T, bool kCentred, bool kAdds>
INLINE void norm_backward_rows(const NormBackward<T>& a, int64_t begin, int64_t end, float* dweight, float* dbias) {
  const int64_t n = a.n;
  const float* weight = a.weight;
  for (int64_t r = begin; r < end; ++r) {
    const T *grad = a.grad + r * n, *x = a.x + r * n, *other = kAdds ? a.grad_total + r * n : nullptr;
    const float mean = kCentred ? plain(a.mean[r]) : 0.0f, rstd = plain(a.rstd[r]);
    const auto [all, along] = two_sums_of<T>(n, [&](auto at, float& unweighted, float& weighted) {
      const float each = wide(grad, at) * weight[place<T>(at, n)];
      if (kCentred) unweighted += each;
      weighted += each * (wide(x, at) - mean);
    });
    const float h = all / n, hz = rstd * along / n;
    // Each chunk prefetches the next row: otherwise memory would idle in this pass, and arithmetic in the pass above.
    for (int64_t from = 0; from < n; from += kFetched) {
      const int64_t count = std::min(kFetched, n - from), place_of = kPaired<T> ? from / 2 : from;
      for (const T* row : {grad, x, other})
        if (row) fetch(row + n + from, count);
      const T *g_at = grad + from, *x_at = x + from, *other_at = other + from;
      const float* weight_at = weight + place_of;
      float *dweight_at = dweight + place_of, *dbias_at = dbias + place_of;
      map(count, a.dx + r * n + from, [&](auto at) {
        const int64_t i = place<T>(at, n);
        const float g = wide(g_at, at), z = (wide(x_at, at) - mean) * rstd;
        dweight_at[i] += g * z;
        if (kCentred) dbias_at[i] += g;
        const float d = (g * weight_at[i] - h - z * hz) * rstd;
        return kAdds ? d + wide(other_at, at) : d;
      });
    }
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
  FOR_EVERY_CPU void layer_norm_backward_loop(const NormBackward<T>& a, int64_t begin, int64_t end, float* dw,        \
                                              float* db) {                                                            \
    norm_backward_rows<T, true, false>(a, begin, end, dw, db);                                                        \
  }                                                                                                                   \
  FOR_EVERY_CPU void add_layer_norm_backward_loop(const NormBackward<T>& a, int64_t begin, int64_t end, float* dw,    \
                                                  float* db) {                                                        \
    norm_backward_rows<T, true, true>(a, begin, end, dw, db);                                                         \
  }                                                                                                                   \
  FOR_EVERY_CPU void rms_norm_backward_loop(const NormBackward<T>& a, int64_t begin, int64_t end, float* dw,          \
                                            float* db) {                                                              \
    norm_backward_rows<T, false, false>(a, begin, end, dw, db);                                                       \
  }                                                                                                                   \
  FOR_EVERY_CPU void add_rms_norm_backward_loop(const NormBackward<T>& a, int64_t begin, int64_t end, float* dw,      \
                                                float* db) {                                                          \
    norm_backward_rows<T, false, true>(a, begin, end, dw, db);                                                        \
  }
FOR_EVERY_TYPE(NORM)
#undef NORM

}  // namespace
