// Cross entropy over one part of the vocabulary, in place on the logits.
//
// Forward reads a row from memory once, in chunks that stay in the first-level cache. It scales the running sum down
// whenever a chunk has a higher maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

#pragma once

#include "passes.h"

namespace {

constexpr int64_t kChunk = 4096;  // logits: 16 KiB in fp32

template <typename T>
INLINE void parts_of_row(const T* row, int64_t n, float* maximum, float* sum) {
  float highest = kLowest<T>, total = 0.0f;
  for (int64_t i = 0; i < n; i += kChunk) {
    const T* chunk = row + i;
    const int64_t width = std::min(kChunk, n - i);
    const float most = largest_of<T>(width, highest, [&](auto at) { return wide(chunk, at); });
    total *= exponential_or_zero(highest - most);
    highest = most;
    total += sum_of<T>(width, [&](auto at) { return exponential_or_zero(wide(chunk, at) - most); });
  }
  *maximum = highest;
  *sum = total;
}

// row = (exp(logit - log_sum) - onehot) * grad. `target` is outside [0, n) if it belongs to another part.
template <typename T>
INLINE void cross_entropy_backward_row(T* row, int64_t n, float log_sum, int64_t target, float grad) {
  log_sum = plain(log_sum);
  grad = plain(grad);
  const bool own = target >= 0 && target < n;
  const float logit = own ? wide(row[target]) : 0.0f;
  map(n, row, [&](auto at) { return exponential_or_zero(wide(row, at) - log_sum) * grad; });
  if (own) row[target] = narrow<T>((exponential_or_zero(logit - log_sum) - 1.0f) * grad);
}

#define CROSS_ENTROPY(T)                                                                                              \
  FOR_EVERY_CPU void parts_loop(const T* row, int64_t n, float* maximum, float* sum) {                                \
    parts_of_row(row, n, maximum, sum);                                                                               \
  }                                                                                                                   \
  FOR_EVERY_CPU void cross_entropy_backward_loop(T* row, int64_t n, float log_sum, int64_t target, float grad) {      \
    cross_entropy_backward_row(row, n, log_sum, target, grad);                                                        \
  }
FOR_EVERY_TYPE(CROSS_ENTROPY)
#undef CROSS_ENTROPY

}  // namespace
