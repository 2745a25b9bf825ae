// Rotary positions in the half-split form (Su et al. 2021): channels i and i + d/2 are rotated as a pair.
//
// A block processes the heads of one (position, sample), which share cosines and sines. x may be a strided view (a part
// of the fused query-key-value product), so that no copy is needed; the result is contiguous.

#pragma once

#include "common.cuh"

namespace megazero {

struct RotaryShape {
  int64_t sequence, batch, heads, half;           // x [S, B, H, 2 half]
  int64_t x_strides[3];                           // of S, B, H, in elements
  int64_t angle_stride, angle_batch_stride;       // of S and B of the cosines and sines; 0 where B is 1
};

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    rotary_turn(const T* x, const T* cosines, const T* sines, T* y, const RotaryShape shape, float direction) {
  const int packs = static_cast<int>(shape.half / N), items = static_cast<int>(shape.heads) * packs;
  const uint32_t row = blockIdx.x, batch = static_cast<uint32_t>(shape.batch);  // fewer blocks than 2^31
  const int64_t s = row / batch, b = row % batch;
  const T* from = x + s * shape.x_strides[0] + b * shape.x_strides[1];
  const int64_t angle = s * shape.angle_stride + b * shape.angle_batch_stride;
  T* to = y + int64_t{row} * shape.heads * 2 * shape.half;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int head = item / packs, column = item % packs * N;
    const T* first = from + head * shape.x_strides[2] + column;
    Pack<T, N> a = load_fixed<N>(first), b = load_fixed<N>(first + shape.half);
    const Pack<T, N> c = load_fixed<N>(cosines + angle + column), d = load_fixed<N>(sines + angle + column);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float u = wide(a.at[k]), v = wide(b.at[k]), cosine = wide(c.at[k]), sine = direction * wide(d.at[k]);
      a.at[k] = narrow<T>(u * cosine - v * sine);
      b.at[k] = narrow<T>(v * cosine + u * sine);
    }
    T* target = to + head * 2 * shape.half + column;
    store(target, a);
    store(target + shape.half, b);
  }
}

// ---- launcher

template <typename T, typename Launch>
__host__ void launch_rotary(const Launch& launch, const T* x, const T* cosines, const T* sines, T* y,
                            const RotaryShape& shape, bool inverse) {
  constexpr int N = kPack<T>;
  bool fit = packs_fit<N>(x, shape.half) && packs_fit<N>(cosines, shape.angle_stride) &&
             packs_fit<N>(sines, shape.angle_batch_stride) && packs_fit<N>(y, shape.half);
  for (int64_t stride : shape.x_strides) fit = fit && stride % N == 0;
  auto start = [&](auto kernel, int pack) {
    const int64_t items = shape.heads * (shape.half / pack);
    const int threads = static_cast<int>(at_most(row_threads(items, 1), kTileThreads));
    launch(kernel, shape.sequence * shape.batch, threads, 0, x, cosines, sines, y, shape,
           inverse ? -1.0f : 1.0f);
  };
  if (fit)
    start(rotary_turn<T, N>, N);
  else
    start(rotary_turn<T, 1>, 1);
}

}  // namespace megazero
