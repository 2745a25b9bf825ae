// Sums over rows, one for each column, in fp32: the gradients of vectors (norm weights, biases).
//
// A block of kRowsPerSum rows has one partial sum, and the blocks' sums are added in order. So the number of threads
// changes no bit. Partial sums of a row of n elements are in the order of `place`.

#pragma once

#include "passes.h"
#include "tensors.h"

namespace {

constexpr int64_t kRowsPerSum = 64;

// Adds the rows of a block to `sums`, which starts at 0.
template <typename T>
INLINE void sum_rows_block(const T* x, int64_t rows, int64_t n, float* __restrict sums) {
  for (int64_t r = 0; r < rows; ++r, x += n) {
    const T* row = x;
    if constexpr (kPaired<T>) {
      for (int64_t i = 0; i < n / 2; ++i) {
        sums[place<T>(First{i}, n)] += wide(row, First{i});
        sums[place<T>(Second{i}, n)] += wide(row, Second{i});
      }
      if (n % 2) sums[place<T>(One{n - 1}, n)] += wide(row, One{n - 1});
    } else {
      for (int64_t i = 0; i < n; ++i) sums[i] += wide(row, One{i});
    }
  }
}

// out = the sum of the blocks' parts, added in block order; with `adds`, out += this sum.
template <typename T>
INLINE void sum_blocks(const float* parts, int64_t blocks, int64_t stride, float* __restrict out, int64_t n,
                       bool adds) {
  constexpr int64_t kWidth = 256;
  double sums[kWidth];
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t width = std::min(kWidth, n - i);
    for (int64_t j = 0; j < width; ++j) sums[j] = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      const float* __restrict part = parts + b * stride + i;
      for (int64_t j = 0; j < width; ++j) sums[j] += part[j];
    }
    for (int64_t j = 0; j < width; ++j) {
      float& at = out[element_at<T>(i + j, n)];
      at = static_cast<float>(sums[j]) + (adds ? at : 0.0f);
    }
  }
}

#define COLUMNS(T)                                                                                                   \
  FOR_EVERY_CPU void sum_rows_loop(const T* x, int64_t rows, int64_t n, float* sums) {                               \
    sum_rows_block(x, rows, n, sums);                                                                                \
  }                                                                                                                  \
  FOR_EVERY_CPU void sum_blocks_loop(const T*, const float* parts, int64_t blocks, int64_t stride, float* out,       \
                                     int64_t n, bool adds) {                                                         \
    sum_blocks<T>(parts, blocks, stride, out, n, adds);                                                              \
  }
FOR_EVERY_TYPE(COLUMNS)
#undef COLUMNS

// Writes the sums of one vector of n elements for each of `outs`, or adds them there. work(begin, end, sums) adds these
// rows to the partial sums of all vectors, one after the other.
template <typename T, typename F>
void sum_columns(int64_t rows, int64_t n, const std::vector<float*>& outs, F work, bool adds = false) {
  const int64_t blocks = (rows + kRowsPerSum - 1) / kRowsPerSum, stride = n * static_cast<int64_t>(outs.size());
  const auto parts = std::make_unique<float[]>(blocks * stride);
  parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      work(b * kRowsPerSum, std::min(rows, (b + 1) * kRowsPerSum), parts.get() + b * stride);
  });
  for (size_t k = 0; k < outs.size(); ++k)
    sum_blocks_loop(static_cast<const T*>(nullptr), parts.get() + k * n, blocks, stride, outs[k], n, adds);
}

}  // namespace
