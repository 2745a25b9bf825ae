// Flat memory: sums of squares in fp64, accumulation into fp32 and casts.

#pragma once

#include "common.cuh"

namespace megazero {

// Elements of one partial sum: a constant, so that the order of the additions depends only on the size.
constexpr int64_t kSquaresBlock = 1 << 15;
constexpr int kSquaresThreads = 256;
constexpr int kSquaresGroup = 4;  // packs in flight
constexpr int kTotalThreads = 1024;
constexpr int kSquaresFlats = 128;

// The tensors of one launch. Passed as a kernel argument (at most 4,096 bytes), so nothing is copied to the device.
struct SquaresFlats {
  const void* at[kSquaresFlats];
  int64_t numel[kSquaresFlats];
  int64_t first[kSquaresFlats + 1];  // first block of each tensor; last entry: number of blocks
  int count;

  // Returns the tensor of a block: the last one whose first block is at most `block`; empty tensors have no blocks.
  __device__ __forceinline__ int of(int64_t block) const {
    int i = 0;
#pragma unroll
    for (int step = kSquaresFlats / 2; step; step /= 2)
      if (i + step < count && first[i + step] <= block) i += step;
    return i;
  }
};

__device__ __forceinline__ double sum_block(double x) {
  double* sums = reinterpret_cast<double*>(scratch);
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane == 0) sums[warp] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x) / kWarp ? sums[lane] : 0.0;
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// Computes one partial sum for each kSquaresBlock elements of each tensor. If the memory is not aligned, elements are
// loaded one by one; they are added in the same order.
template <typename T>
__global__ void __launch_bounds__(kSquaresThreads) square_blocks(const SquaresFlats flats, double* partial) {
  constexpr int N = kPack<T>;
  const int64_t block = blockIdx.x;
  const int i = flats.of(block);
  const int64_t begin = (block - flats.first[i]) * kSquaresBlock, n = flats.numel[i];
  const T* flat = static_cast<const T*>(flats.at[i]);
  const bool aligned = reinterpret_cast<uintptr_t>(flat) % alignof(Pack<T, N>) == 0;
  const int count = static_cast<int>(n - begin < kSquaresBlock ? n - begin : kSquaresBlock);
  double sum = 0.0;
  for (int base = threadIdx.x * N; base < count; base += kSquaresGroup * kSquaresThreads * N) {
    Pack<T, N> group[kSquaresGroup];
#pragma unroll
    for (int g = 0; g < kSquaresGroup; ++g) {
      const int at = base + g * kSquaresThreads * N;
      if (aligned && at + N <= count) {
        group[g] = load_fixed<N>(flat + begin + at);
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) group[g].at[k] = at + k < count ? flat[begin + at + k] : narrow<T>(0.0f);
      }
    }
#pragma unroll
    for (int g = 0; g < kSquaresGroup; ++g)
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const double v = wide(group[g].at[k]);
        sum += v * v;
      }
  }
  sum = sum_block(sum);
  if (threadIdx.x == 0) partial[block] = sum;
}

// Runs one block per tensor. Static: not a template, so each translation unit needs its own copy.
static __global__ void __launch_bounds__(kTotalThreads)
    sum_blocks(const SquaresFlats flats, const double* partial, double* totals) {
  const int64_t begin = flats.first[blockIdx.x], end = flats.first[blockIdx.x + 1];
  double sum = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kTotalThreads) sum += partial[i];
  sum = sum_block(sum);
  if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

template <typename T, int N>
struct AccumulateInputs {
  Pack<float, N> into;
  Pack<T, N> x;
};

template <typename T, int N>
__global__ void __launch_bounds__(kFlatThreads) accumulate(float* into, const T* x, int64_t n) {
  for_each_pack<N>(
      n, [&](int64_t i) { return AccumulateInputs<T, N>{load<N>(into + i), load_fixed<N>(x + i)}; },
      [&](int64_t i, AccumulateInputs<T, N> in) {
#pragma unroll
        for (int k = 0; k < N; ++k) in.into.at[k] += wide(in.x.at[k]);
        store(into + i, in.into);
      });
}

template <typename To, typename From, int N>
__global__ void __launch_bounds__(kFlatThreads) cast(To* into, const From* x, int64_t n) {
  for_each_pack<N>(
      n, [&](int64_t i) { return load_fixed<N>(x + i); },
      [&](int64_t i, const Pack<From, N>& in) {
        Pack<To, N> out;
#pragma unroll
        for (int k = 0; k < N; ++k) out.at[k] = narrow<To>(wide(in.at[k]));
        store(into + i, out);
      });
}

// ---- launchers

__host__ inline int64_t square_partials(const int64_t* numel, int64_t count) {
  int64_t partials = 0;
  for (int64_t i = 0; i < count; ++i) partials += divide_up(numel[i], kSquaresBlock);
  return partials;
}

// `partial` has square_partials(numel, count) elements, `totals` count.
template <typename T, typename Launch>
__host__ void launch_sums_of_squares(const Launch& launch, const void* const* at, const int64_t* numel, int64_t count,
                                     double* partial, double* totals) {
  for (int64_t begin = 0; begin < count; begin += kSquaresFlats) {
    SquaresFlats flats{};
    flats.count = static_cast<int>(at_most(count - begin, kSquaresFlats));
    for (int i = 0; i < flats.count; ++i) {
      flats.at[i] = at[begin + i];
      flats.numel[i] = numel[begin + i];
      flats.first[i + 1] = flats.first[i] + divide_up(numel[begin + i], kSquaresBlock);
    }
    const int64_t blocks = flats.first[flats.count];
    launch(square_blocks<T>, blocks, kSquaresThreads, kScratch, flats, partial);
    launch(sum_blocks, flats.count, kTotalThreads, kScratch, flats, static_cast<const double*>(partial), totals + begin);
    partial += blocks;
  }
}

template <typename T, typename Launch>
__host__ void launch_accumulate(const Launch& launch, float* into, const T* x, int64_t n) {
  constexpr int N = kMixedPack;
  split_flat<N>(n, packs_fit<N>(into, 0) && packs_fit<N>(x, 0),
                [&](auto width, int64_t from, int64_t count, int64_t blocks) {
                  launch(accumulate<T, decltype(width)::value>, blocks, kFlatThreads, 0, into + from, x + from, count);
                });
}

template <typename To, typename From, typename Launch>
__host__ void launch_cast(const Launch& launch, To* into, const From* x, int64_t n) {
  constexpr int N = kMixedPack;
  split_flat<N>(n, packs_fit<N>(into, 0) && packs_fit<N>(x, 0),
                [&](auto width, int64_t from, int64_t count, int64_t blocks) {
                  launch(cast<To, From, decltype(width)::value>, blocks, kFlatThreads, 0, into + from, x + from, count);
                });
}

}  // namespace megazero
