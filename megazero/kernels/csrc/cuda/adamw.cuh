// AdamW on flat memory in one pass: unscales and clips the gradient, updates the master and both moments, writes the
// rounded master to `published` (Kingma and Ba 2015; Loshchilov and Hutter 2019).
//
// The arithmetic is that of torch's fused AdamW on a CPU, operation by operation, for equal bits (torch's AdamW on a
// GPU computes partly in fp64). Multiply-adds are fused only where written: the compiler does not fuse the intrinsics.
// `skip`, `divide_by` and `step` are read on the device, so the host never waits. A kernel with one active thread runs
// first: it counts the update and stores the values that all elements share, so that no thread of the main pass reads
// memory that another thread writes.

#pragma once

#include "common.cuh"

namespace megazero {

struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
};

// The values that all elements of one update share.
struct Adam {
  float go;  // 0: change nothing
  float unscale, decay, first_weight, second_decay, second_weight, root_correction, eps, step_size;
};

// Static: not a template, so each translation unit needs its own copy.
static __global__ void adamw_prepare(float* step, const float* divide_by, const float* skip, const AdamSettings s,
                                     Adam* common) {
  if (threadIdx.x != 0) return;
  const bool go = *skip == 0.0f;
  const float updates = *step + 1.0f;
  if (go) *step = updates;
  common->go = go ? 1.0f : 0.0f;
  common->unscale = *divide_by;
  common->decay = static_cast<float>(1.0 - s.lr * s.weight_decay);
  common->first_weight = static_cast<float>(1.0 - s.beta1);
  common->second_decay = static_cast<float>(s.beta2);
  common->second_weight = static_cast<float>(1.0 - s.beta2);
  common->root_correction = static_cast<float>(sqrt(1.0 - pow(s.beta2, static_cast<double>(updates))));
  common->eps = static_cast<float>(s.eps);
  common->step_size = static_cast<float>(s.lr / (1.0 - pow(s.beta1, static_cast<double>(updates))));
}

template <typename G, int N>
struct AdamInputs {
  Pack<float, N> master, first, second;
  Pack<G, N> grad;
};

// Moves 30 bytes per element with fp32 gradients, 28 with 16-bit ones: reads and writes the master and both moments,
// reads the gradient, writes the 16-bit parameter.
template <typename G, typename P, int N>
__global__ void __launch_bounds__(kFlatThreads, 2)  // without the bound of 2 the compiler spills on sm_120
    adamw_update(const Adam* common, float* master, const G* grad, float* first, float* second, P* published,
                 int64_t n) {
  const Adam a = *common;
  for_each_pack<N>(
      n,
      [&](int64_t i) {
        return AdamInputs<G, N>{load<N>(master + i), load<N>(first + i), load<N>(second + i), load_fixed<N>(grad + i)};
      },
      [&](int64_t i, AdamInputs<G, N> in) {
        if (a.go == 0.0f) return;
        Pack<P, N> low;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float g = __fdiv_rn(wide(in.grad.at[k]), a.unscale), before = in.first.at[k];
          const float m = __fmaf_rn(a.first_weight, __fsub_rn(g, before), before);
          const float v = __fmaf_rn(__fmul_rn(a.second_weight, g), g, __fmul_rn(in.second.at[k], a.second_decay));
          const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), a.root_correction), a.eps);
          const float change = __fdiv_rn(__fmul_rn(a.step_size, m), root);
          in.master.at[k] = __fsub_rn(__fmul_rn(in.master.at[k], a.decay), change);
          in.first.at[k] = m;
          in.second.at[k] = v;
          low.at[k] = narrow<P>(in.master.at[k]);
        }
        store(first + i, in.first);
        store(second + i, in.second);
        store(master + i, in.master);
        store(published + i, low);
      });
}

// ---- launcher; `common` is in device memory

template <typename G, typename P, typename Launch>
__host__ void launch_adamw(const Launch& launch, float* master, const G* grad, float* first, float* second,
                           P* published, float* step, const float* divide_by, const float* skip,
                           const AdamSettings& settings, Adam* common, int64_t n) {
  constexpr int N = kMixedPack;
  launch(adamw_prepare, 1, kWarp, 0, step, divide_by, skip, settings, common);
  const bool aligned = packs_fit<N>(master, 0) && packs_fit<N>(grad, 0) && packs_fit<N>(first, 0) &&
                       packs_fit<N>(second, 0) && packs_fit<N>(published, 0);
  split_flat<N>(n, aligned, [&](auto width, int64_t from, int64_t count, int64_t blocks) {
    launch(adamw_update<G, P, decltype(width)::value>, blocks, kFlatThreads, 0, static_cast<const Adam*>(common),
           master + from, grad + from, first + from, second + from, published + from, count);
  });
}

}  // namespace megazero
