// Shared by all kernels: element types, 16-byte packs, reductions, the tiling of rows.
//
// The kernels do not depend on torch, nor their launchers on streams: a launcher picks grid, block and variant and
// gives them to a `Launch`, which starts the kernel on a GPU (csrc/cuda.cu) or in a block emulator (the tests). Both
// run the same code except for the launch itself.
//
// Shapes, as in the Python files: N rows, D hidden, F feed-forward, V vocabulary. Indices of elements are 64 bits wide.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>

namespace megazero {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kVectorBytes = 16;  // the widest access of one thread on every architecture

// Elements of T in one 16-byte access.
template <typename T>
constexpr int kPack = kVectorBytes / static_cast<int>(sizeof(T));

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

// Returns the lowest finite number of T.
template <typename T>
__device__ __forceinline__ float lowest() {
  return -3.402823466e38f;
}
template <>
__device__ __forceinline__ float lowest<__nv_bfloat16>() {
  return -3.389531390e38f;
}
template <>
__device__ __forceinline__ float lowest<__half>() {
  return -65504.0f;
}

// N adjacent elements, loaded and stored together. Aligned to 16 bytes at most: a wider pack takes several accesses.
template <typename T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Pack {
  T at[N];
};

// Aborts the tests' emulator at a misaligned pack, which is an error on a GPU too; a CPU allows most of them.
template <typename P>
__device__ __forceinline__ void check_alignment([[maybe_unused]] const void* at) {
#ifndef __CUDA_ARCH__
  if (reinterpret_cast<uintptr_t>(at) % alignof(P) != 0) std::abort();
#endif
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  check_alignment<Pack<T, N>>(from);
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

// Loads a pack from memory that the kernel does not write: the compiler may move such loads before any store.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_fixed(const T* from) {
#ifdef __CUDA_ARCH__
  constexpr int kBytes = static_cast<int>(sizeof(Pack<T, N>));
  Pack<T, N> pack;
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(&pack)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  } else if constexpr (kBytes == 8) {
    reinterpret_cast<uint2&>(pack) = __ldg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (kBytes == 4) {
    reinterpret_cast<unsigned&>(pack) = __ldg(reinterpret_cast<const unsigned*>(from));
  } else {
    static_assert(kBytes == 2);
    reinterpret_cast<unsigned short&>(pack) = __ldg(reinterpret_cast<const unsigned short*>(from));
  }
  return pack;
#else
  return load<N>(from);
#endif
}

// Stores a pack with one instruction per 16 bytes. If the elements are computed one by one, the compiler splits the
// copy of a struct into 4-byte stores at a stride of 16; it does not split an intrinsic of a vector type.
template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
#ifdef __CUDA_ARCH__
  constexpr int kBytes = static_cast<int>(sizeof(Pack<T, N>));
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      __stwb(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(&pack)[i]);
  } else if constexpr (kBytes == 8) {
    __stwb(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(pack));
  } else {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
  }
#else
  check_alignment<Pack<T, N>>(to);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
#endif
}

// Keeps a 16-bit pack in its own width: values computed from it before this call are computed again after it. Otherwise
// the compiler widens the pack once, early, and holds it in twice as many registers.
template <typename T, int N>
__device__ __forceinline__ void keep_packed(Pack<T, N>& pack) {
#ifdef __CUDA_ARCH__
  constexpr int kWords = static_cast<int>(sizeof(Pack<T, N>)) / 4;
  if constexpr (sizeof(T) == 2 && kWords > 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(&pack)[i]));
  }
#endif
}

// Returns whether rows of `columns` elements that start at `pointer` may be read in packs of N elements.
template <int N, typename T>
__host__ inline bool packs_fit(const T* pointer, int64_t columns) {
  return columns % N == 0 && reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T, N>) == 0;
}

template <typename I>
__host__ __device__ constexpr I divide_up(I a, I b) {
  return (a + b - 1) / b;
}

__host__ inline int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }
__host__ inline int64_t at_least(int64_t value, int64_t limit) { return value > limit ? value : limit; }

// Returns 2^x to 2 ulp; results below 2^-126 become 0. Takes one instruction; exp2f takes four.
__device__ __forceinline__ float power_of_2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

constexpr float kLog2E = 1.44269504088896341f;

// Returns e^x for x <= 0 of moderate size, as in a softmax: the relative error is about |x| 2^-24.
__device__ __forceinline__ float exponential(float x) { return power_of_2(x * kLog2E); }

struct Sum {
  static constexpr float kNeutral = 0.0f;
  __device__ __forceinline__ static float join(float a, float b) { return a + b; }
};
struct Maximum {  // ignores a NaN next to a number
  static constexpr float kNeutral = -INFINITY;
  __device__ __forceinline__ static float join(float a, float b) { return fmaxf(a, b); }
};

template <typename Join>
__device__ __forceinline__ float reduce_warp(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) x = Join::join(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

// Shared memory of a block, sized by the launcher: kScratch bytes, except where a launch states another size.
extern __shared__ __align__(16) float scratch[];
constexpr int kScratchSlots = 2;  // see Team
constexpr int kScratch = kScratchSlots * 2 * kWarp * static_cast<int>(sizeof(float));

// Reduces over the threads of one block, which work on one row, in a fixed order; every thread gets the result.
//
// A reduction takes one barrier. It writes to the slot that the previous one did not use. A thread that still reads the
// previous slot has not reached this barrier, so no thread can be two reductions ahead and overwrite that slot.
class Team {
 public:
  __device__ __forceinline__ Team() : slot_(0) {}

  template <typename Join>
  __device__ __forceinline__ float reduce(float x) {
    float unused = 0.0f;
    reduce_two<Join, false>(x, unused);
    return x;
  }

  // Computes two sums with one barrier.
  __device__ __forceinline__ void sum(float& a, float& b) { reduce_two<Sum, true>(a, b); }

 private:
  template <typename Join, bool BOTH>
  __device__ __forceinline__ void reduce_two(float& a, float& b) {
    a = reduce_warp<Join>(a);
    if (BOTH) b = reduce_warp<Join>(b);
    if (blockDim.x == kWarp) return;
    float* own = scratch + slot_ * 2 * kWarp;
    slot_ ^= 1;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    if (lane == 0) {
      own[warp] = a;
      if (BOTH) own[kWarp + warp] = b;
    }
    __syncthreads();
    a = reduce_warp<Join>(lane < warps ? own[lane] : Join::kNeutral);
    if (BOTH) b = reduce_warp<Join>(lane < warps ? own[kWarp + lane] : Join::kNeutral);
  }

  int slot_;
};

// Returns the number of threads, in whole warps, for a row of `packs` packs if each thread holds `each` packs.
__host__ inline int row_threads(int64_t packs, int each) {
  return static_cast<int>(divide_up<int64_t>(divide_up<int64_t>(packs, each), kWarp) * kWarp);
}

// Elementwise kernels over rows that share something by column (a bias) or by row (a key): a block takes a tile of
// kTileThreads packs of columns and kTileRows rows, so that the shared part is loaded once and several independent
// loads are in flight.
constexpr int kTileThreads = 256;
constexpr int kTileRows = 4;
constexpr int kTileBlocks = 3;  // per multiprocessor: at most 80 registers per thread

struct Tiles {
  int64_t rows, columns;
  uint32_t across;  // tiles side by side; 32 bits, as the index of a block: a division of 64 bits takes 70 instructions

  __host__ Tiles(int64_t rows, int64_t columns, int pack)
      : rows(rows), columns(columns),
        across(static_cast<uint32_t>(at_least(divide_up<int64_t>(columns, int64_t{pack} * kTileThreads), 1))) {}

  __host__ int64_t blocks() const { return across * divide_up<int64_t>(rows, kTileRows); }

  __device__ __forceinline__ int64_t first_row(uint32_t tile) const { return int64_t{tile / across} * kTileRows; }
  __device__ __forceinline__ int64_t column(uint32_t tile, int thread, int pack) const {
    return (int64_t{tile % across} * kTileThreads + thread) * pack;
  }
};

// For the kTileRows rows from `first` that exist: input = read(row, column), then write(row, column, input). All reads
// come before the writes, so that they are in flight together.
template <typename Read, typename Write>
__device__ __forceinline__ void for_each_row(int64_t first, int64_t rows, int64_t column, Read read, Write write) {
  decltype(read(first, column)) inputs[kTileRows];
#pragma unroll
  for (int i = 0; i < kTileRows; ++i)
    if (first + i < rows) inputs[i] = read(first + i, column);
#pragma unroll
  for (int i = 0; i < kTileRows; ++i)
    if (first + i < rows) write(first + i, column, inputs[i]);
}

// For every pack of this block's tile: input = read(row, column), then write(row, column, input). Calls
// `each_column(column)` first.
template <int N, typename EachColumn, typename Read, typename Write>
__device__ __forceinline__ void for_each_tile(const Tiles& tiles, EachColumn each_column, Read read, Write write) {
  const int64_t column = tiles.column(blockIdx.x, threadIdx.x, N), first = tiles.first_row(blockIdx.x);
  if (column >= tiles.columns) return;
  each_column(column);
  for_each_row(first, tiles.rows, column, read, write);
}

// Flat elementwise kernels: every thread handles kFlatPacks packs, a block's width apart.
constexpr int kFlatThreads = 256;
constexpr int kFlatPacks = 2;

// For every pack of this block's share of n elements (a multiple of N): write(i, read(i)) with i its first element.
template <int N, typename Read, typename Write>
__device__ __forceinline__ void for_each_pack(int64_t n, Read read, Write write) {
  const int64_t packs = n / N, base = int64_t{blockIdx.x} * kFlatThreads * kFlatPacks + threadIdx.x;
  decltype(read(base)) inputs[kFlatPacks];
#pragma unroll
  for (int k = 0; k < kFlatPacks; ++k)
    if (base + k * kFlatThreads < packs) inputs[k] = read((base + k * kFlatThreads) * N);
#pragma unroll
  for (int k = 0; k < kFlatPacks; ++k)
    if (base + k * kFlatThreads < packs) write((base + k * kFlatThreads) * N, inputs[k]);
}

// Elements of a pack in kernels that mix fp32 and 16-bit types: 16 bytes of fp32, 8 of 16-bit.
constexpr int kMixedPack = 4;

template <int N>
struct Width {
  static constexpr int value = N;
};

// Calls start(width, first element, elements, blocks) for all whole packs of N, if the pointers are aligned, and for
// the remaining elements with packs of one.
template <int N, typename Start>
__host__ void split_flat(int64_t n, bool aligned, Start start) {
  constexpr int64_t kWidth = int64_t{kFlatThreads} * kFlatPacks;
  const int64_t whole = aligned ? n / N * N : 0, rest = n - whole;
  if (whole) start(Width<N>{}, int64_t{0}, whole, divide_up(whole / N, kWidth));
  if (rest) start(Width<1>{}, whole, rest, divide_up(rest, kWidth));
}

}  // namespace megazero
