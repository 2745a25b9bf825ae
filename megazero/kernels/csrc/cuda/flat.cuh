// Flat memory: the sum of squares in fp64, accumulation into fp32 and casts.

#pragma once

#include "common.cuh"

namespace megazero {

// Elements of one partial sum: a constant, so that the order of the additions depends on the size alone.
constexpr int64_t kSquaresBlock = 1 << 15;
constexpr int kSquaresThreads = 256;
constexpr int kSquaresGroup = 4;  // packs in flight
constexpr int kTotalThreads = 1024;

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

// One partial sum for each kSquaresBlock elements. The same elements meet in the same order when the memory is not
// aligned (ALIGNED false: they are then loaded one by one).
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kSquaresThreads) square_blocks(const T* flat, double* partial, int64_t n) {
  constexpr int N = kPack<T>;
  const int64_t block = blockIdx.x;
  const int64_t begin = block * kSquaresBlock;
  const int count = static_cast<int>(n - begin < kSquaresBlock ? n - begin : kSquaresBlock);
  double sum = 0.0;
  for (int base = threadIdx.x * N; base < count; base += kSquaresGroup * kSquaresThreads * N) {
    Pack<T, N> group[kSquaresGroup];
#pragma unroll
    for (int g = 0; g < kSquaresGroup; ++g) {
      const int at = base + g * kSquaresThreads * N;
      if (ALIGNED && at + N <= count) {
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

// Static, because it is no template and each translation unit gets its own.
static __global__ void __launch_bounds__(kTotalThreads) sum_blocks(const double* partial, double* total, int64_t n) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < n; i += kTotalThreads) sum += partial[i];
  sum = sum_block(sum);
  if (threadIdx.x == 0) *total = sum;
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

__host__ inline int64_t square_partials(int64_t n) { return at_least(divide_up(n, kSquaresBlock), 1); }

// `partial` has square_partials(n) elements.
template <typename T, typename Launch>
__host__ void launch_sum_of_squares(const Launch& launch, const T* flat, double* partial, double* total, int64_t n) {
  const int64_t blocks = divide_up(n, kSquaresBlock);
  auto start = [&](auto kernel) {
    launch(kernel, blocks, kSquaresThreads, kScratch, flat, partial, n);
  };
  if (packs_fit<kPack<T>>(flat, 0))
    start(square_blocks<T, true>);
  else
    start(square_blocks<T, false>);
  launch(sum_blocks, 1, kTotalThreads, kScratch, static_cast<const double*>(partial), total, blocks);
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
