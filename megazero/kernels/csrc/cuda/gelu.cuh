// gelu(x + bias) and its backward, in the tanh form (Hendrycks and Gimpel 2016).
//
// gelu(x) = x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3), because 1 + tanh(u) = 2 sigmoid(2u): one exponential
// and one fast division. In 16 bits the memory traffic leaves time for about 30 instructions per element.

#pragma once

#include "columns.cuh"

namespace megazero {

constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;

// Needs no clamps: beyond the range of the exponential the quotient is x, -0, or NaN for -inf, as in torch.
__device__ __forceinline__ float gelu(float x) {
  return __fdividef(x, 1.0f + power_of_2(-2.0f * kSqrt2OverPi * kLog2E * x * (1.0f + kCubic * x * x)));
}

// Returns d gelu / dv = s + x s (1 - s) 2u' with s = sigmoid(2u). x is v clamped to +-30, beyond which the slope is 0
// or 1 and the factors would overflow; adding v - v turns NaN and infinities into NaN. 1 - s is computed as e^-2u s,
// because a large x would amplify the error of the subtraction.
__device__ __forceinline__ float gelu_slope(float v) {
  const float x = fminf(fmaxf(v, -30.0f), 30.0f), square = x * x, odd = v - v;
  const float z = 2.0f * kSqrt2OverPi * x * (1.0f + kCubic * square);
  const float e = power_of_2(-kLog2E * fmaxf(z, -80.0f));  // keeps e finite; e s is 1 there
  const float s = __fdividef(1.0f, 1.0f + e);
  return s + x * s * (e * s) * (2.0f * kSqrt2OverPi * (1.0f + 3.0f * kCubic * square)) + odd;
}

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_gelu_forward(const T* x, const T* bias, T* y, const Tiles tiles) {
  Pack<T, N> shift;
  for_each_tile<N>(
      tiles, [&](int64_t column) { if (bias) shift = load_fixed<N>(bias + column); },
      [&](int64_t row, int64_t column) { return load_fixed<N>(x + row * tiles.columns + column); },
      [&](int64_t row, int64_t column, Pack<T, N> pack) {
        keep_packed(pack);
        keep_packed(shift);
#pragma unroll
        for (int k = 0; k < N; ++k)
          pack.at[k] = narrow<T>(gelu(wide(pack.at[k]) + (bias ? wide(shift.at[k]) : 0.0f)));
        store(y + row * tiles.columns + column, pack);
      });
}

template <typename T, int N>
struct GeluInputs {
  Pack<T, N> grad, x;
};

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    gelu_backward(const T* grad, const T* x, T* dx, const Tiles tiles) {
  for_each_tile<N>(
      tiles, [](int64_t) {},
      [&](int64_t row, int64_t column) {
        const int64_t at = row * tiles.columns + column;
        return GeluInputs<T, N>{load_fixed<N>(grad + at), load_fixed<N>(x + at)};
      },
      [&](int64_t row, int64_t column, GeluInputs<T, N> in) {
        keep_packed(in.grad);
        keep_packed(in.x);
#pragma unroll
        for (int k = 0; k < N; ++k) in.x.at[k] = narrow<T>(wide(in.grad.at[k]) * gelu_slope(wide(in.x.at[k])));
        store(dx + row * tiles.columns + column, in.x);
      });
}

// With a bias, whose gradient is the sum of dx over the rows: it takes no further pass over dx.
template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_gelu_backward(const T* grad, const T* x, const T* bias, T* dx, float* partial, const Lanes lanes) {
  Pack<T, N> shift;
  for_each_lane<N>(
      lanes, partial, [&](int64_t column) { shift = load_fixed<N>(bias + column); },
      [&](int64_t row, int64_t column) {
        const int64_t at = row * lanes.columns + column;
        return GeluInputs<T, N>{load_fixed<N>(grad + at), load_fixed<N>(x + at)};
      },
      [&](int64_t row, int64_t column, GeluInputs<T, N> in, float* sums) {
        keep_packed(in.grad);
        keep_packed(in.x);
        keep_packed(shift);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float d = wide(in.grad.at[k]) * gelu_slope(wide(in.x.at[k]) + wide(shift.at[k]));
          sums[k] += d;
          in.x.at[k] = narrow<T>(d);
        }
        store(dx + row * lanes.columns + column, in.x);
      });
}

// ---- launchers

template <typename T, typename Launch>
__host__ void launch_bias_gelu(const Launch& launch, const T* x, const T* bias, T* y, int64_t rows, int64_t columns) {
  constexpr int N = kPack<T>;
  auto start = [&](auto kernel, int pack) {
    const Tiles tiles(rows, columns, pack);
    launch(kernel, tiles.blocks(), kTileThreads, 0, x, bias, y, tiles);
  };
  if (packs_fit<N>(x, columns) && packs_fit<N>(bias, columns) && packs_fit<N>(y, columns))
    start(bias_gelu_forward<T, N>, N);
  else
    start(bias_gelu_forward<T, 1>, 1);
}

// `bias`, `partial` and `dbias` are null, or `partial` has room for sum_lanes() rows of sums.
template <typename T, typename Launch>
__host__ void launch_bias_gelu_backward(const Launch& launch, const T* grad, const T* x, const T* bias, T* dx,
                                        float* partial, float* dbias, int64_t rows, int64_t columns) {
  constexpr int N = kPack<T>;
  const bool fit = packs_fit<N>(grad, columns) && packs_fit<N>(x, columns) && packs_fit<N>(bias, columns) &&
                   packs_fit<N>(dx, columns);
  const int pack = fit ? N : 1;
  if (!bias) {
    const Tiles tiles(rows, columns, pack);
    launch(fit ? gelu_backward<T, N> : gelu_backward<T, 1>, tiles.blocks(), kTileThreads, 0, grad, x, dx, tiles);
    return;
  }
  const Lanes lanes(rows, columns, pack, sum_lanes<T>(rows, columns, launch.multiprocessors()));
  launch(fit ? bias_gelu_backward<T, N> : bias_gelu_backward<T, 1>, lanes.blocks(), kTileThreads, 0, grad, x, bias, dx,
         partial, lanes);
  launch_sum_partials(launch, partial, lanes.lanes, columns, dbias, static_cast<float*>(nullptr));
}

}  // namespace megazero
