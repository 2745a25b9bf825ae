// Cross entropy over one part of the vocabulary: maximum, sum and target logit of each row; the gradient, in place.
//
// Forward: one read. Each thread keeps a running maximum and the sum of exp(logit - maximum); it scales the sum down
// when the maximum rises (Milakov and Gimelshein 2018), at most once per group of packs. Backward: one read and one
// write of (exp(logit - log_sum) - onehot) grad over the logits, which the forward does not change. There is no second
// matrix of the vocabulary's size, and none in fp32.

#pragma once

#include "common.cuh"

namespace megazero {

constexpr int kLossThreads = 512;
constexpr int kLossGroup = 4;  // packs read before the maximum is updated

template <typename T, int N>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_parts(const T* logits, const int64_t* targets, float* parts, int64_t rows, int64_t columns) {
  Team team;
  const int64_t packs = columns / N;
  const int64_t row = blockIdx.x;
  const T* from = logits + row * columns;
  float highest = lowest<T>(), sum = 0.0f;  // finite, so that a row of -inf sums to 0 rather than NaN
  for (int64_t base = threadIdx.x; base < packs; base += int64_t{kLossGroup} * blockDim.x) {
    Pack<T, N> group[kLossGroup];
#pragma unroll
    for (int g = 0; g < kLossGroup; ++g)
      if (base + int64_t{g} * blockDim.x < packs) group[g] = load_fixed<N>(from + (base + int64_t{g} * blockDim.x) * N);
    float above = highest;
#pragma unroll
    for (int g = 0; g < kLossGroup; ++g)
      if (base + int64_t{g} * blockDim.x < packs)
#pragma unroll
        for (int k = 0; k < N; ++k) above = fmaxf(above, wide(group[g].at[k]));
    sum *= exponential(highest - above);
    highest = above;
#pragma unroll
    for (int g = 0; g < kLossGroup; ++g)
      if (base + int64_t{g} * blockDim.x < packs)
#pragma unroll
        for (int k = 0; k < N; ++k) sum += exponential(wide(group[g].at[k]) - highest);
  }
  const float maximum = team.reduce<Maximum>(highest);
  sum = team.reduce<Sum>(sum * exponential(highest - maximum));
  if (threadIdx.x == 0) {
    const int64_t target = targets[row];
    // fmaxf ignores a NaN logit, but the sum is then NaN. With +inf the sum is NaN too, and the maximum infinite.
    parts[row] = isnan(sum) && maximum < INFINITY ? sum : maximum;
    parts[rows + row] = sum;
    parts[2 * rows + row] = target >= 0 && target < columns ? wide(from[target]) : -INFINITY;
  }
}

template <typename T, int N>
struct LogitInputs {
  Pack<T, N> logits;
  float log_sum, grad;
  int64_t target;
};

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    cross_entropy_backward(T* logits, const float* log_sums, const int64_t* targets, const float* grad,
                           const Tiles tiles) {
  for_each_tile<N>(
      tiles, [](int64_t) {},
      [&](int64_t row, int64_t column) {
        return LogitInputs<T, N>{load<N>(logits + row * tiles.columns + column), log_sums[row], grad[row],
                                 targets[row]};
      },
      [&](int64_t row, int64_t column, LogitInputs<T, N> in) {
        keep_packed(in.logits);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float p = exponential(wide(in.logits.at[k]) - in.log_sum);
          in.logits.at[k] = narrow<T>((column + k == in.target ? p - 1.0f : p) * in.grad);
        }
        store(logits + row * tiles.columns + column, in.logits);
      });
}

// ---- launchers

template <typename T, typename Launch>
__host__ void launch_cross_entropy_parts(const Launch& launch, const T* logits, const int64_t* targets, float* parts,
                                         int64_t rows, int64_t columns) {
  constexpr int N = kPack<T>;
  auto start = [&](auto kernel, int pack) {
    // As few threads as take the least number of rounds: with more, most would be idle in the last round.
    const int64_t packs = at_least(columns / pack, 1), rounds = divide_up<int64_t>(packs, kLossThreads * kLossGroup);
    const int threads = row_threads(packs, kLossGroup * static_cast<int>(rounds));
    launch(kernel, rows, threads, kScratch, logits, targets, parts, rows, columns);
  };
  if (packs_fit<N>(logits, columns))
    start(cross_entropy_parts<T, N>, N);
  else
    start(cross_entropy_parts<T, 1>, 1);
}

template <typename T, typename Launch>
__host__ void launch_cross_entropy_backward(const Launch& launch, T* logits, const float* log_sums,
                                            const int64_t* targets, const float* grad, int64_t rows, int64_t columns) {
  constexpr int N = kPack<T>;
  auto start = [&](auto kernel, int pack) {
    const Tiles tiles(rows, columns, pack);
    launch(kernel, tiles.blocks(), kTileThreads, 0, logits, log_sums, targets, grad, tiles);
  };
  if (packs_fit<N>(logits, columns))
    start(cross_entropy_backward<T, N>, N);
  else
    start(cross_entropy_backward<T, 1>, 1);
}

}  // namespace megazero
