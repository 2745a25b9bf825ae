// The backward of LayerNorm and RMSNorm; see norm.cuh.
//
// With z = (x - mean) rstd and h = grad weight, dx = rstd (h - mean(h) - z mean(h z)). RMSNorm has mean 0 and no term
// mean(h). Ba et al. 2016, Zhang and Sennrich 2019.

#pragma once

#include "columns.cuh"
#include "norm.cuh"

namespace megazero {

template <typename T>
struct NormBackward {
  const T* grad;
  const T* grad_total;  // added to dx; or null
  const T* x;
  const float* mean;  // null for RMSNorm
  const float* rstd;
  const T* weight;
  T* dx;
  float* partial;  // [2 or 1, blocks, columns]: sums of dweight, then of dbias
  int64_t rows, columns;
  float offset;  // of the weight
};

// Computes dx and the block's sums of dweight and dbias. AHEAD reads the next row while this one is reduced, and keeps
// the weights in registers. The widest rows leave no registers for that: without AHEAD the second pass reads x and grad
// again, from the level-1 cache.
template <typename T, bool RMS, int PACKS, bool AHEAD>
__global__ void __launch_bounds__(kNormThreads, 1) norm_backward(const NormBackward<T> a) {
  constexpr int N = kPack<T>;
  using Row = RowPacks<T, PACKS>;
  const int columns = static_cast<int>(a.columns);
  float dweight[PACKS][N] = {}, dbias[PACKS][N] = {};
  Row x, grad, next_x, next_grad, weight;
  float mean = 0.0f, rstd = 0.0f, next_mean = 0.0f, next_rstd = 0.0f;
  if (AHEAD) {
    weight.read(a.weight, columns);
    if (blockIdx.x < a.rows) {
      next_x.read(a.x + blockIdx.x * a.columns, columns);
      next_grad.read(a.grad + blockIdx.x * a.columns, columns);
      next_rstd = a.rstd[blockIdx.x];
      if (!RMS) next_mean = a.mean[blockIdx.x];
    }
  }
  Team team;
  const float inverse = 1.0f / static_cast<float>(a.columns);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns, next = row + gridDim.x;
    if (AHEAD) {
      x = next_x;
      grad = next_grad;
      rstd = next_rstd;
      mean = next_mean;
      if (next < a.rows) {
        next_x.read(a.x + next * a.columns, columns);
        next_grad.read(a.grad + next * a.columns, columns);
        next_rstd = a.rstd[next];
        if (!RMS) next_mean = a.mean[next];
      }
    } else {
      rstd = a.rstd[row];
      if (!RMS) mean = a.mean[row];
    }
    if (AHEAD) {
      x.keep_packed();
      grad.keep_packed();
      weight.keep_packed();
    }
    float along = 0.0f, level = 0.0f;  // mean(h z), mean(h)
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      if (Row::column(p) >= columns) continue;
      const Pack<T, N> x_pack = AHEAD ? x.at[p] : load<N>(a.x + start + Row::column(p));
      const Pack<T, N> grad_pack = AHEAD ? grad.at[p] : load<N>(a.grad + start + Row::column(p));
      const Pack<T, N> scale = AHEAD ? weight.at[p] : load<N>(a.weight + Row::column(p));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float g = wide(grad_pack.at[k]), z = (wide(x_pack.at[k]) - mean) * rstd, h = g * (wide(scale.at[k]) + a.offset);
        along += h * z;
        dweight[p][k] += g * z;
        if (!RMS) {
          level += h;
          dbias[p][k] += g;
        }
      }
    }
    if (RMS)
      along = team.reduce<Sum>(along) * inverse;
    else
      team.sum(along, level);
    if (!RMS) along *= inverse, level *= inverse;
    if (AHEAD) {
      x.keep_packed();
      grad.keep_packed();
      weight.keep_packed();
    }
#pragma unroll(AHEAD ? PACKS : 1)
    for (int p = 0; p < PACKS; ++p) {
      const int column = Row::column(p);
      if (column >= columns) continue;
      const Pack<T, N> x_pack = AHEAD ? x.at[p] : load<N>(a.x + start + column);
      const Pack<T, N> grad_pack = AHEAD ? grad.at[p] : load<N>(a.grad + start + column);
      const Pack<T, N> scale = AHEAD ? weight.at[p] : load<N>(a.weight + column);
      Pack<T, N> dx, other;
      if (a.grad_total) other = load_fixed<N>(a.grad_total + start + column);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float z = (wide(x_pack.at[k]) - mean) * rstd;
        const float h = wide(grad_pack.at[k]) * (wide(scale.at[k]) + a.offset);
        const float d = (h - level - z * along) * rstd;
        dx.at[k] = narrow<T>(a.grad_total ? d + wide(other.at[k]) : d);
      }
      store(a.dx + start + column, dx);
    }
  }
  const int64_t blocks = gridDim.x;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int column = Row::column(p);
    if (column >= columns) continue;
    Pack<float, N> sums;
#pragma unroll
    for (int k = 0; k < N; ++k) sums.at[k] = dweight[p][k];
    store(a.partial + blockIdx.x * a.columns + column, sums);
    if constexpr (!RMS) {
#pragma unroll
      for (int k = 0; k < N; ++k) sums.at[k] = dbias[p][k];
      store(a.partial + (blocks + blockIdx.x) * a.columns + column, sums);
    }
  }
}

// norm_backward for any number of columns and any alignment. Keeps the block's sums in its part of the buffer; each
// thread adds only to its own columns.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kNormThreads, 1) norm_backward_any(const NormBackward<T> a) {
  const int64_t blocks = gridDim.x;
  float* dweight = a.partial + blockIdx.x * a.columns;
  float* dbias = a.partial + (blocks + blockIdx.x) * a.columns;
  for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x) {
    dweight[c] = 0.0f;
    if (!RMS) dbias[c] = 0.0f;
  }
  Team team;
  const float inverse = 1.0f / static_cast<float>(a.columns);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    const float mean = RMS ? 0.0f : a.mean[row], rstd = a.rstd[row];
    float along = 0.0f, level = 0.0f;
    for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x) {
      const float h = wide(a.grad[start + c]) * (wide(a.weight[c]) + a.offset);
      along += h * (wide(a.x[start + c]) - mean) * rstd;
      if (!RMS) level += h;
    }
    team.sum(along, level);
    along *= inverse, level *= inverse;
    for (int64_t c = threadIdx.x; c < a.columns; c += blockDim.x) {
      const float g = wide(a.grad[start + c]), z = (wide(a.x[start + c]) - mean) * rstd;
      const float d = (g * (wide(a.weight[c]) + a.offset) - level - z * along) * rstd;
      a.dx[start + c] = narrow<T>(a.grad_total ? d + wide(a.grad_total[start + c]) : d);
      dweight[c] += g * z;
      if (!RMS) dbias[c] += g;
    }
  }
}

// ---- launcher

constexpr int kNormRowsEach = 16;  // least number of rows per block for which writing its sums pays off

// The kernel for a row's length and alignment.
enum class Backward { kTwoPacks, kFourPacks, kAny };

struct BackwardPlan {
  Backward kind;
  int threads;
  int64_t blocks;
};

template <typename T>
__host__ BackwardPlan plan_norm_backward(int64_t rows, int64_t columns, bool fit, int64_t multiprocessors) {
  const int64_t packs = columns / kPack<T>;
  fit = fit && columns % kPack<T> == 0;
  BackwardPlan plan{Backward::kAny, any_threads(columns), 0};
  if (fit && packs <= 2 * kNormThreads)
    plan = {Backward::kTwoPacks, row_threads(packs, 2), 0};
  else if (fit && packs <= kNormPacks * kNormThreads)
    plan = {Backward::kFourPacks, row_threads(packs, kNormPacks), 0};
  const int64_t most = multiprocessors * (kNormResident / plan.threads);
  plan.blocks = at_least(at_most(most, at_least(divide_up<int64_t>(rows, kNormRowsEach), multiprocessors)), 1);
  plan.blocks = at_least(at_most(plan.blocks, rows), 1);
  return plan;
}

// Returns the number of blocks of the buffer `partial` that the backward of `rows` rows needs, whatever the alignment.
template <typename T>
__host__ int64_t norm_backward_blocks(int64_t rows, int64_t columns, int64_t multiprocessors) {
  return at_least(plan_norm_backward<T>(rows, columns, true, multiprocessors).blocks,
                  plan_norm_backward<T>(rows, columns, false, multiprocessors).blocks);
}

template <typename T, bool RMS, typename Launch>
__host__ void launch_norm_backward(const Launch& launch, const NormBackward<T>& a, float* dweight, float* dbias) {
  constexpr int N = kPack<T>;
  const bool fit = packs_fit<N>(a.grad, a.columns) && packs_fit<N>(a.grad_total, a.columns) &&
                   packs_fit<N>(a.x, a.columns) && packs_fit<N>(a.weight, a.columns) && packs_fit<N>(a.dx, a.columns);
  const BackwardPlan plan = plan_norm_backward<T>(a.rows, a.columns, fit, launch.multiprocessors());
  if (plan.kind == Backward::kTwoPacks)
    launch(norm_backward<T, RMS, 2, true>, plan.blocks, plan.threads, kScratch, a);
  else if (plan.kind == Backward::kFourPacks)
    launch(norm_backward<T, RMS, kNormPacks, false>, plan.blocks, plan.threads, kScratch, a);
  else
    launch(norm_backward_any<T, RMS>, plan.blocks, plan.threads, kScratch, a);
  launch_sum_partials(launch, a.partial, plan.blocks, a.columns, dweight, RMS ? nullptr : dbias);
}

}  // namespace megazero
