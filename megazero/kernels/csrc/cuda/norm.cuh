// LayerNorm and RMSNorm, with or without a residual added first, and their backward.
//
// A block works on one row at a time and holds it in registers, as it was read (16 bits stay 16 bits): every element is
// read once and written once. Blocks stay for many rows, so that the parameters are read once a block, and the backward
// can sum their gradients over its rows in registers; each block leaves its sums in a buffer [blocks, D], which a second
// kernel adds up in a fixed order. Rows that do not fit into registers, or are not whole packs, take a kernel that reads
// them again (from the level-2 cache, mostly).

#pragma once

#include "common.cuh"

namespace megazero {

constexpr int kNormThreads = 512;  // at most: 128 registers a thread on every architecture
constexpr int kNormPacks = 4;      // that a thread holds, at most: rows of 16,384 in 16 bits, 8,192 in fp32

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
  float eps;
};

// What each thread of a row holds: PACKS packs, blockDim.x packs apart.
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

// y = (x - mean) rstd weight + bias. The parameters are read again for each row, from the level-1 cache: held in
// registers they would halve the rows in flight.
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
        const float z = (wide(x.at[p].at[k]) - mean) * rstd * wide(scale.at[k]);
        y.at[k] = narrow<T>(RMS ? z : z + wide(shift.at[k]));
      }
      store(a.y + start + column, y);
    }
  }
}

// The same for any number of columns and any alignment. Each thread reads again only what it wrote itself.
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
      const float z = (wide(x[c]) - mean) * rstd * wide(a.weight[c]);
      a.y[start + c] = narrow<T>(RMS ? z : z + wide(a.bias[c]));
    }
  }
}

// ---- launchers

constexpr int kNormResident = 1024;  // threads of one multiprocessor that the registers of these kernels allow, at least

// Threads for a row in the kernels for any size: no more than the row has elements, whole warps.
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
    // Twice as many blocks as may be resident: whatever fits, blocks get equal numbers of rows.
    launch(kernel, at_most(a.rows, launch.multiprocessors() * (2 * kNormResident / threads)), threads, kScratch, a);
  };
  if (fit && packs <= kNormPacks * kNormThreads)
    start(norm_forward<T, RMS>, row_threads(packs, kNormPacks));
  else
    start(norm_forward_any<T, RMS>, any_threads(a.columns));
}

}  // namespace megazero
