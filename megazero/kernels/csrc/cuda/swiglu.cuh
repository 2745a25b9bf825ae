// silu(gate) * up (Shazeer 2020) and its backward: flat, because elements share nothing.

#pragma once

#include "common.cuh"

namespace megazero {

template <typename T, int N>
struct SwigluInputs {
  Pack<T, N> gate, up;
};

template <typename T, int N>
struct SwigluGradients {
  Pack<T, N> grad, gate, up;
};

template <typename T, int N>
__global__ void __launch_bounds__(kFlatThreads) swiglu_forward(const T* gate, const T* up, T* y, int64_t n) {
  for_each_pack<N>(
      n, [&](int64_t i) { return SwigluInputs<T, N>{load_fixed<N>(gate + i), load_fixed<N>(up + i)}; },
      [&](int64_t i, SwigluInputs<T, N> in) {
        keep_packed(in.gate);
        keep_packed(in.up);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float g = wide(in.gate.at[k]);
          in.up.at[k] = narrow<T>(__fdividef(g, 1.0f + power_of_2(-kLog2E * g)) * wide(in.up.at[k]));
        }
        store(y + i, in.up);
      });
}

// d silu(g) = s (1 + g (1 - s)) with s = sigmoid(g) and 1 - s = e^-g s. g is clamped to +-80 there, because e^-g would
// overflow; the slope is 0 below, up to rounding. Adding g - g turns NaN and infinities into NaN.
template <typename T, int N>
__global__ void __launch_bounds__(kFlatThreads)
    swiglu_backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  for_each_pack<N>(
      n,
      [&](int64_t i) {
        return SwigluGradients<T, N>{load_fixed<N>(grad + i), load_fixed<N>(gate + i), load_fixed<N>(up + i)};
      },
      [&](int64_t i, SwigluGradients<T, N> in) {
        keep_packed(in.grad);
        keep_packed(in.gate);
        keep_packed(in.up);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float grad = wide(in.grad.at[k]), g = wide(in.gate.at[k]), held = fminf(fmaxf(g, -80.0f), 80.0f);
          const float e = power_of_2(-kLog2E * held), s = __fdividef(1.0f, 1.0f + e);
          in.gate.at[k] = narrow<T>(grad * wide(in.up.at[k]) * (s * (1.0f + held * (e * s)) + (g - g)));
          in.up.at[k] = narrow<T>(grad * __fdividef(g, 1.0f + power_of_2(-kLog2E * g)));
        }
        store(dgate + i, in.gate);
        store(dup + i, in.up);
      });
}

// ---- launchers

template <typename T, typename Launch>
__host__ void launch_swiglu(const Launch& launch, const T* gate, const T* up, T* y, int64_t n) {
  constexpr int N = kPack<T>;
  split_flat<N>(n, packs_fit<N>(gate, 0) && packs_fit<N>(up, 0) && packs_fit<N>(y, 0),
                [&](auto width, int64_t from, int64_t count, int64_t blocks) {
                  launch(swiglu_forward<T, decltype(width)::value>, blocks, kFlatThreads, 0, gate + from, up + from,
                         y + from, count);
                });
}

template <typename T, typename Launch>
__host__ void launch_swiglu_backward(const Launch& launch, const T* grad, const T* gate, const T* up, T* dgate, T* dup,
                                     int64_t n) {
  constexpr int N = kPack<T>;
  const bool aligned = packs_fit<N>(grad, 0) && packs_fit<N>(gate, 0) && packs_fit<N>(up, 0) && packs_fit<N>(dgate, 0) &&
                       packs_fit<N>(dup, 0);
  split_flat<N>(n, aligned, [&](auto width, int64_t from, int64_t count, int64_t blocks) {
    launch(swiglu_backward<T, decltype(width)::value>, blocks, kFlatThreads, 0, grad + from, gate + from, up + from,
           dgate + from, dup + from, count);
  });
}

}  // namespace megazero
