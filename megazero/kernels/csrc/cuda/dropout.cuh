// residual + x * keep / (1 - drop), and its backward; the mask equals that of kernels/counter.py, bit for bit.
//
// The mask is not stored: `keep` is a hash of (key, sample, position, channel), two rounds of a mixer per row and one
// per channel. These are about ten integer instructions per element, hidden behind the memory traffic.

#pragma once

#include "common.cuh"

namespace megazero {

// The mixer of C. Wellons, "Prospecting for Hash Functions" (2018); see counter.mix_word.
__host__ __device__ __forceinline__ uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

constexpr uint32_t kGolden = 0x9e3779b9u;

// The arguments of the mask that all elements share: see counter.keep_mask.
struct Mask {
  const int64_t* sample_ids;  // [B]
  const int64_t* positions;   // [S]
  uint32_t batch;             // B
  uint32_t first, second;     // both keys
  int32_t threshold;          // keep if the hash, as a signed word, is at least this
  float scale;                // 1 / (1 - drop)

  __host__ Mask(const int64_t* sample_ids, const int64_t* positions, int64_t batch, uint32_t key, double drop)
      : sample_ids(sample_ids), positions(positions), batch(static_cast<uint32_t>(batch)), first(key) {
    // counter.derive_key(key, 1), which mixes in two halves of each word.
    second = 0;
    for (uint32_t half : {key, 0u, 1u, 0u}) second = mix(second ^ half) + kGolden;
    const int64_t shifted = std::llrint(drop * 4294967296.0) - 2147483648ll;  // ties to even, as Python rounds
    threshold = static_cast<int32_t>(shifted < 2147483647ll ? shifted : 2147483647ll);
    scale = static_cast<float>(1.0 / (1.0 - drop));
  }

  // Returns the word of row s * B + b, from which the hashes of its channels start. Fewer than 2^32 rows: one division
  // of 32 bits takes a quarter of the instructions of one of 64.
  __device__ __forceinline__ uint32_t row_word(int64_t row) const {
    const uint32_t number = static_cast<uint32_t>(row), s = number / batch;
    const int64_t id = sample_ids[number - s * batch], position = positions[s];
    const uint64_t folded = static_cast<uint64_t>(id) ^ static_cast<uint64_t>(id >> 32) * kGolden;
    return mix(mix(static_cast<uint32_t>(folded) + first) ^ static_cast<uint32_t>(position));
  }

  // Returns the factor of an element. Dropped elements are multiplied by 0, so that NaN and infinities stay visible.
  __device__ __forceinline__ float factor(uint32_t row_word, uint32_t channel) const {
    const uint32_t word = mix((row_word + channel * kGolden) ^ second);
    return static_cast<int32_t>(word) >= threshold ? scale : 0.0f;
  }
};

template <typename T, int N>
struct DropoutInputs {
  Pack<T, N> x, residual;
  uint32_t word;
};

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    dropout_add_forward(const T* x, const T* residual, T* y, const Mask mask, const Tiles tiles) {
  for_each_tile<N>(
      tiles, [](int64_t) {},
      [&](int64_t row, int64_t column) {
        const int64_t at = row * tiles.columns + column;
        return DropoutInputs<T, N>{load_fixed<N>(x + at), load_fixed<N>(residual + at), mask.row_word(row)};
      },
      [&](int64_t row, int64_t column, DropoutInputs<T, N> in) {
        keep_packed(in.x);
        keep_packed(in.residual);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float factor = mask.factor(in.word, static_cast<uint32_t>(column) + k);
          in.x.at[k] = narrow<T>(wide(in.residual.at[k]) + wide(in.x.at[k]) * factor);
        }
        store(y + row * tiles.columns + column, in.x);
      });
}

template <typename T, int N>
struct DropoutGradient {
  Pack<T, N> grad;
  uint32_t word;
};

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    dropout_backward(const T* grad, T* dx, const Mask mask, const Tiles tiles) {
  for_each_tile<N>(
      tiles, [](int64_t) {},
      [&](int64_t row, int64_t column) {
        return DropoutGradient<T, N>{load_fixed<N>(grad + row * tiles.columns + column), mask.row_word(row)};
      },
      [&](int64_t row, int64_t column, DropoutGradient<T, N> in) {
        keep_packed(in.grad);
#pragma unroll
        for (int k = 0; k < N; ++k)
          in.grad.at[k] =
              narrow<T>(wide(in.grad.at[k]) * mask.factor(in.word, static_cast<uint32_t>(column) + k));
        store(dx + row * tiles.columns + column, in.grad);
      });
}

// ---- launchers: x [S, B, D] is rows of D

template <typename T, typename Launch>
__host__ void launch_dropout_add(const Launch& launch, const T* x, const T* residual, T* y, const Mask& mask,
                                 int64_t rows, int64_t columns) {
  constexpr int N = kPack<T>;
  auto start = [&](auto kernel, int pack) {
    const Tiles tiles(rows, columns, pack);
    launch(kernel, tiles.blocks(), kTileThreads, 0, x, residual, y, mask, tiles);
  };
  if (packs_fit<N>(x, columns) && packs_fit<N>(residual, columns) && packs_fit<N>(y, columns))
    start(dropout_add_forward<T, N>, N);
  else
    start(dropout_add_forward<T, 1>, 1);
}

template <typename T, typename Launch>
__host__ void launch_dropout_backward(const Launch& launch, const T* grad, T* dx, const Mask& mask, int64_t rows,
                                      int64_t columns) {
  constexpr int N = kPack<T>;
  auto start = [&](auto kernel, int pack) {
    const Tiles tiles(rows, columns, pack);
    launch(kernel, tiles.blocks(), kTileThreads, 0, grad, dx, mask, tiles);
  };
  if (packs_fit<N>(grad, columns) && packs_fit<N>(dx, columns))
    start(dropout_backward<T, N>, N);
  else
    start(dropout_backward<T, 1>, 1);
}

}  // namespace megazero
