// LayerNorm and RMSNorm, with or without a residual added first, and their backward.
//
// A block works on one row at a time and holds it in registers in its own dtype (16 bits stay 16 bits): every element
// is read once and written once. A block processes many rows, so the backward can sum the parameters' gradients over
// them in registers; each block writes its sums to a buffer [blocks, D], which a second kernel adds up in a fixed
// order. Rows that do not fit into registers, or are not whole packs, take a kernel that reads them again (mostly from
// the level-2 cache).

#pragma once

#include "common.cuh"

namespace megazero {

constexpr int kNormThreads = 512;  // at most: 128 registers per thread on every architecture
constexpr int kNormPacks = 4;      // per thread, at most: rows of 16,384 in 16 bits, 8,192 in fp32

template <typename T>
struct NormForward {
  const T* x;
  const T* residual;  // or null
  const T* weight;
  const T* bias;  // null for RMSNorm
  T* total;       // x + residual, rounded; null without a residual
  T* y;
  float* mean;  // null for RMSNorm
  float* rstd;
  int64_t rows, columns;
  float eps, offset;  // the offset is added to the weight
  bool twice;         // RMSNorm: round z to T before the product
};

// Returns z w, with z rounded first where RMSNorm asks for it.
template <typename T, bool RMS>
__device__ __forceinline__ float weighted(const NormForward<T>& a, float z, T weight) {
  return (RMS && a.twice ? wide(narrow<T>(z)) : z) * (wide(weight) + a.offset);
}

// The part of a row that one thread holds: PACKS packs, blockDim.x packs apart.
template <typename T, int PACKS>
struct RowPacks {
  static constexpr int N = kPack<T>;
  Pack<T, N> at[PACKS];

  __device__ __forceinline__ static int column(int p) {  // these rows are short: 32 bits save registers
    return (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }
  __device__ __forceinline__ void read(const T* row, int columns) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
      if (column(p) < columns) at[p] = load_fixed<N>(row + column(p));
  }
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) megazero::keep_packed(at[p]);
  }
};

// y = (x - mean) rstd weight + bias. Reads the parameters again for each row, from the level-1 cache: holding them in
// registers would halve the rows in flight.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kNormThreads, 1) norm_forward(const NormForward<T> a) {
  constexpr int N = kPack<T>, PACKS = kNormPacks;
  using Row = RowPacks<T, PACKS>;
  const int columns = static_cast<int>(a.columns);
  Row x;
  Team team;
  const float inverse = 1.0f / static_cast<float>(a.columns);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    x.read(a.x + start, columns);
    if (a.residual) {
      Row residual;
      residual.read(a.residual + start, columns);
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        if (Row::column(p) >= columns) continue;
#pragma unroll
        for (int k = 0; k < N; ++k) x.at[p].at[k] = narrow<T>(wide(x.at[p].at[k]) + wide(residual.at[p].at[k]));
        store(a.total + start + Row::column(p), x.at[p]);
      }
    }
    x.keep_packed();
    float mean = 0.0f, squares = 0.0f;
    if (!RMS) {
#pragma unroll
      for (int p = 0; p < PACKS; ++p)
        if (Row::column(p) < columns)
#pragma unroll
          for (int k = 0; k < N; ++k) mean += wide(x.at[p].at[k]);
      mean = team.reduce<Sum>(mean) * inverse;
      x.keep_packed();
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
      if (Row::column(p) < columns)
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float distance = wide(x.at[p].at[k]) - mean;
          squares += distance * distance;
        }
    const float rstd = rsqrtf(team.reduce<Sum>(squares) * inverse + a.eps);
    if (threadIdx.x == 0) {
      a.rstd[row] = rstd;
      if (!RMS) a.mean[row] = mean;
    }
    x.keep_packed();
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int column = Row::column(p);
      if (column >= columns) continue;
      Pack<T, N> y;
      const Pack<T, N> scale = load<N>(a.weight + column);
      const Pack<T, N> shift = RMS ? Pack<T, N>{} : load<N>(a.bias + column);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float z = weighted<T, RMS>(a, (wide(x.at[p].at[k]) - mean) * rstd, scale.at[k]);
        y.at[k] = narrow<T>(RMS ? z : z + wide(shift.at[k]));
      }
      store(a.y + start + column, y);
    }
  }
}

// norm_forward for any number of columns and any alignment. Each thread rereads only elements that it wrote itself.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kNormThreads, 1) norm_forward_any(const NormForward<T> a) {
  Team team;
  const float inverse = 1.0f / static_cast<float>(a.columns);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    const T* x = a.x + start;
    if (a.residual) {
      for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x)
        a.total[start + c] = narrow<T>(wide(x[c]) + wide(a.residual[start + c]));
      x = a.total + start;
    }
    float mean = 0.0f, squares = 0.0f;
    if (!RMS) {
      for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x) mean += wide(x[c]);
      mean = team.reduce<Sum>(mean) * inverse;
    }
    for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x) {
      const float distance = wide(x[c]) - mean;
      squares += distance * distance;
    }
    const float rstd = rsqrtf(team.reduce<Sum>(squares) * inverse + a.eps);
    if (threadIdx.x == 0) {
      a.rstd[row] = rstd;
      if (!RMS) a.mean[row] = mean;
    }
    for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x) {
      const float z = weighted<T, RMS>(a, (wide(x[c]) - mean) * rstd, a.weight[c]);
      a.y[start + c] = narrow<T>(RMS ? z : z + wide(a.bias[c]));
    }
  }
}

// ---- launchers

constexpr int kNormResident = 1024;  // resident threads per multiprocessor: the registers allow at least these

// Returns the threads per row in the kernels for any size: whole warps, no more than the row's elements need.
__host__ inline int any_threads(int64_t columns) {
  return static_cast<int>(at_most(row_threads(at_least(columns, 1), 1), kNormThreads));
}

template <typename T, bool RMS, typename Launch>
__host__ void launch_norm_forward(const Launch& launch, const NormForward<T>& a) {
  constexpr int N = kPack<T>;
  const int64_t packs = a.columns / N;
  const bool fit = packs_fit<N>(a.x, a.columns) && packs_fit<N>(a.weight, a.columns) && packs_fit<N>(a.y, a.columns) &&
                   packs_fit<N>(a.bias, a.columns) && packs_fit<N>(a.residual, a.columns) &&
                   packs_fit<N>(a.total, a.columns);
  auto start = [&](auto kernel, int threads) {
    // Twice as many blocks as kNormResident allows: blocks get equal numbers of rows, however many are resident.
    launch(kernel, at_most(a.rows, launch.multiprocessors() * (2 * kNormResident / threads)), threads, kScratch, a);
  };
  if (fit && packs <= kNormPacks * kNormThreads)
    start(norm_forward<T, RMS>, row_threads(packs, kNormPacks));
  else
    start(norm_forward_any<T, RMS>, any_threads(a.columns));
}

}  // namespace megazero
