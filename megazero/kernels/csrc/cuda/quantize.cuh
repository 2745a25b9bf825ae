// Quantisation to integers of 8 or 4 bits in blocks that share a scale, and back; layout: base/quantized.py and
// csrc/cpu/quantize.h. A warp processes a block. A lane takes the same positions of the block's two halves, because
// their 4-bit codes share bytes.

#pragma once

#include "common.cuh"

namespace megazero {

constexpr int kQuantBlock = 256;
constexpr int kQuantThreads = 256;
constexpr float kQuantLeast = 1e-35f;    // a block whose largest value is below becomes zeros
constexpr float kQuantShift = 12582912;  // 1.5 x 2^23: adding it to a small number rounds to an integer, ties to even

struct QuantBlock {
  int64_t number, first;
  int half;  // half of its values: 128, or fewer in the last block

  __device__ __forceinline__ explicit QuantBlock(int64_t n)
      : number(int64_t{blockIdx.x} * (kQuantThreads / kWarp) + threadIdx.x / kWarp), first(number * kQuantBlock), half(0) {
    const int64_t left = n - first;
    half = static_cast<int>(left < 0 ? 0 : left < kQuantBlock ? left : kQuantBlock) / 2;
  }
};

// Returns the magnitude of x, infinity for a NaN.
__device__ __forceinline__ float magnitude(float x) {
  const float size = fabsf(x);
  return size <= 3.402823466e38f ? size : INFINITY;
}

__device__ __forceinline__ int quant_code(float x, float inverse) {
  return static_cast<int>(__fadd_rn(__fmul_rn(x, inverse), kQuantShift) - kQuantShift);
}

template <typename T, int N>
__global__ void __launch_bounds__(kQuantThreads)
    quantize(const T* x, int64_t n, int bits, uint8_t* codes, float* scales) {
  const QuantBlock block(n);
  if (block.half == 0) return;  // the whole warp
  const T *low = x + block.first, *high = low + block.half;
  const int lane = threadIdx.x % kWarp;
  float most = 0.0f;
  for (int at = lane * N; at < block.half; at += kWarp * N) {
    const Pack<T, N> a = load<N>(low + at), b = load<N>(high + at);
#pragma unroll
    for (int k = 0; k < N; ++k) most = fmaxf(most, fmaxf(magnitude(wide(a.at[k])), magnitude(wide(b.at[k]))));
  }
  most = reduce_warp<Maximum>(most);
  const float limit = static_cast<float>((1 << (bits - 1)) - 1);
  const bool finite = most <= 3.402823466e38f, some = finite && most >= kQuantLeast;
  const float inverse = some ? __fdiv_rn(limit, most) : 0.0f;
  if (lane == 0) scales[block.number] = some ? __fdiv_rn(most, limit) : finite ? 0.0f : NAN;
  uint8_t* to = codes + block.first * bits / 8;
  for (int at = lane * N; at < block.half; at += kWarp * N) {
    const Pack<T, N> a = load<N>(low + at), b = load<N>(high + at);
    Pack<uint8_t, N> first, second;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int one = finite ? quant_code(wide(a.at[k]), inverse) : 0, other = finite ? quant_code(wide(b.at[k]), inverse) : 0;
      first.at[k] = static_cast<uint8_t>(bits == 8 ? one : ((one + 8) | (other + 8) << 4));
      second.at[k] = static_cast<uint8_t>(other);
    }
    store(to + at, first);
    if (bits == 8) store(to + block.half + at, second);
  }
}

template <typename T, int N, bool ADD>
__global__ void __launch_bounds__(kQuantThreads)
    dequantize(const uint8_t* codes, const float* scales, int bits, T* into, int64_t n) {
  const QuantBlock block(n);
  if (block.half == 0) return;
  const float scale = scales[block.number];
  const uint8_t* from = codes + block.first * bits / 8;
  T *low = into + block.first, *high = low + block.half;
  for (int at = threadIdx.x % kWarp * N; at < block.half; at += kWarp * N) {
    const Pack<uint8_t, N> first = load<N>(from + at);
    Pack<uint8_t, N> second = first;
    if (bits == 8) second = load<N>(from + block.half + at);
    Pack<T, N> a, b;
    if (ADD) a = load<N>(low + at), b = load<N>(high + at);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int one = bits == 8 ? static_cast<int8_t>(first.at[k]) : (first.at[k] & 15) - 8;
      const int other = bits == 8 ? static_cast<int8_t>(second.at[k]) : (first.at[k] >> 4) - 8;
      const float x = __fmul_rn(static_cast<float>(one), scale), y = __fmul_rn(static_cast<float>(other), scale);
      a.at[k] = narrow<T>(ADD ? __fadd_rn(wide(a.at[k]), x) : x);
      b.at[k] = narrow<T>(ADD ? __fadd_rn(wide(b.at[k]), y) : y);
    }
    store(low + at, a);
    store(high + at, b);
  }
}

// ---- launchers

__host__ inline int64_t quant_grid(int64_t n) {
  return divide_up<int64_t>(divide_up<int64_t>(n, kQuantBlock), kQuantThreads / kWarp);
}

// Uses packs of 4 if values and codes are aligned for them, otherwise packs of 1.
template <typename T, typename Start>
__host__ void with_quant_pack(const T* values, const uint8_t* codes, Start start) {
  if (packs_fit<4>(values, 0) && packs_fit<4>(codes, 0))
    start(Width<4>{});
  else
    start(Width<1>{});
}

// `codes` has n * bits / 8 bytes of codes, followed by the scales.
template <typename T, typename Launch>
__host__ void launch_quantize(const Launch& launch, const T* x, int64_t n, int bits, uint8_t* codes) {
  float* scales = reinterpret_cast<float*>(codes + n * bits / 8);
  with_quant_pack(x, codes, [&](auto width) {
    launch(quantize<T, decltype(width)::value>, quant_grid(n), kQuantThreads, 0, x, n, bits, codes, scales);
  });
}

template <typename T, typename Launch>
__host__ void launch_dequantize(const Launch& launch, const uint8_t* codes, int bits, bool add, T* into, int64_t n) {
  const float* scales = reinterpret_cast<const float*>(codes + n * bits / 8);
  with_quant_pack<T>(into, codes, [&](auto width) {
    constexpr int N = decltype(width)::value;
    launch(add ? dequantize<T, N, true> : dequantize<T, N, false>, quant_grid(n), kQuantThreads, 0, codes, scales, bits,
           into, n);
  });
}

}  // namespace megazero
