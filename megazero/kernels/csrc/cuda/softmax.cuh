// softmax(scale * scores) under a causal mask, and its backward, for attention without a flash kernel.
//
// A block takes a row and holds it in registers: read once, written once, and of the row only what the mask lets through
// is read, half of the matrix when it is square. Rows that do not fit, or are not whole packs, are read again.

#pragma once

#include "common.cuh"

namespace megazero {

constexpr int kSoftmaxThreads = 512;
constexpr int kSoftmaxPacks = 4;  // that a thread holds

struct CausalRows {
  int64_t rows, queries, keys;
  float scale;

  // Columns that row `row` sees: those up to its own position, the last query standing at the last key.
  __host__ __device__ int64_t visible(int64_t row) const {
    const int64_t seen = row % queries + 1 + keys - queries;
    return seen < 0 ? 0 : seen;
  }
};

template <typename T>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    causal_softmax_forward(const T* scores, T* y, const CausalRows shape) {
  constexpr int N = kPack<T>, PACKS = kSoftmaxPacks;
  Team team;
  const int64_t row = blockIdx.x;
  const int64_t start = row * shape.keys, seen = shape.visible(row);
  float z[PACKS][N];
  float highest = -INFINITY, sum = 0.0f;
  Pack<T, N> packs[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
    if (column < seen) packs[p] = load_fixed<N>(scores + start + column);
  }
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      z[p][k] = column + k < seen ? wide(packs[p].at[k]) * shape.scale : -INFINITY;
      highest = fmaxf(highest, z[p][k]);
    }
  }
  highest = team.reduce<Maximum>(highest);
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      z[p][k] = column + k < seen ? exponential(z[p][k] - highest) : 0.0f;
      sum += z[p][k];
    }
  }
  const float inverse = 1.0f / team.reduce<Sum>(sum);
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
    if (column >= shape.keys) continue;
#pragma unroll
    for (int k = 0; k < N; ++k) packs[p].at[k] = narrow<T>(column + k < seen ? z[p][k] * inverse : 0.0f);
    store(y + start + column, packs[p]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    causal_softmax_forward_any(const T* scores, T* y, const CausalRows shape) {
  Team team;
  const int64_t row = blockIdx.x;
  const int64_t start = row * shape.keys, seen = shape.visible(row);
  float highest = -INFINITY, sum = 0.0f;
  for (int64_t c = threadIdx.x; c < seen; c += blockDim.x) highest = fmaxf(highest, wide(scores[start + c]) * shape.scale);
  highest = team.reduce<Maximum>(highest);
  for (int64_t c = threadIdx.x; c < seen; c += blockDim.x)
    sum += exponential(wide(scores[start + c]) * shape.scale - highest);
  const float inverse = 1.0f / team.reduce<Sum>(sum);
  for (int64_t c = threadIdx.x; c < shape.keys; c += blockDim.x)
    y[start + c] =
        narrow<T>(c < seen ? exponential(wide(scores[start + c]) * shape.scale - highest) * inverse : 0.0f);
}

// dx = scale p (grad - sum(p grad)).
template <typename T>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    causal_softmax_backward(const T* grad, const T* probabilities, T* dx, const CausalRows shape) {
  constexpr int N = kPack<T>, PACKS = kSoftmaxPacks;
  Team team;
  const int64_t row = blockIdx.x;
  const int64_t start = row * shape.keys, seen = shape.visible(row);
  Pack<T, N> g[PACKS], y[PACKS];
  float along = 0.0f;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
    if (column >= seen) continue;
    g[p] = load_fixed<N>(grad + start + column);
    y[p] = load_fixed<N>(probabilities + start + column);
  }
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (column + k < seen) along += wide(g[p].at[k]) * wide(y[p].at[k]);
  }
  along = team.reduce<Sum>(along);
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int64_t column = (int64_t{p} * blockDim.x + threadIdx.x) * N;
    if (column >= shape.keys) continue;
    Pack<T, N> d;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const bool inside = column + k < seen;
      d.at[k] = narrow<T>(inside ? shape.scale * wide(y[p].at[k]) * (wide(g[p].at[k]) - along) : 0.0f);
    }
    store(dx + start + column, d);
  }
}

template <typename T>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    causal_softmax_backward_any(const T* grad, const T* probabilities, T* dx, const CausalRows shape) {
  Team team;
  const int64_t row = blockIdx.x;
  const int64_t start = row * shape.keys, seen = shape.visible(row);
  float along = 0.0f;
  for (int64_t c = threadIdx.x; c < seen; c += blockDim.x)
    along += wide(grad[start + c]) * wide(probabilities[start + c]);
  along = team.reduce<Sum>(along);
  for (int64_t c = threadIdx.x; c < shape.keys; c += blockDim.x) {
    const int64_t i = start + c;
    dx[i] = narrow<T>(c < seen ? shape.scale * wide(probabilities[i]) * (wide(grad[i]) - along) : 0.0f);
  }
}

// ---- launchers

// The widest row of the kernels that hold it.
template <typename T>
constexpr int64_t kSoftmaxHeld = int64_t{kSoftmaxThreads} * kSoftmaxPacks * kPack<T>;

template <typename T, typename Kernel, typename AnyKernel, typename Launch, typename... Arguments>
__host__ void launch_rows(const Launch& launch, bool fit, const CausalRows& shape, Kernel held, AnyKernel any,
                          Arguments... arguments) {
  if (fit && shape.keys <= kSoftmaxHeld<T>)
    launch(held, shape.rows, row_threads(shape.keys / kPack<T>, kSoftmaxPacks), kScratch, arguments..., shape);
  else
    launch(any, shape.rows, static_cast<int>(at_most(row_threads(shape.keys, 1), kSoftmaxThreads)), kScratch, arguments...,
           shape);
}

template <typename T, typename Launch>
__host__ void launch_causal_softmax(const Launch& launch, const T* scores, T* y, const CausalRows& shape) {
  constexpr int N = kPack<T>;
  launch_rows<T>(launch, packs_fit<N>(scores, shape.keys) && packs_fit<N>(y, shape.keys), shape,
                 causal_softmax_forward<T>, causal_softmax_forward_any<T>, scores, y);
}

template <typename T, typename Launch>
__host__ void launch_causal_softmax_backward(const Launch& launch, const T* grad, const T* probabilities, T* dx,
                                             const CausalRows& shape) {
  constexpr int N = kPack<T>;
  const bool fit =
      packs_fit<N>(grad, shape.keys) && packs_fit<N>(probabilities, shape.keys) && packs_fit<N>(dx, shape.keys);
  launch_rows<T>(launch, fit, shape, causal_softmax_backward<T>, causal_softmax_backward_any<T>, grad, probabilities,
                 dx);
}

}  // namespace megazero
