// Sums over rows, one for each column, in fp32: the gradients of vectors (norm weights, biases).
//
// Each block sums its rows in registers and writes the sums to a buffer [blocks, columns]; a second kernel adds them in
// a fixed order: no atomics, so equal bits in every run.

#pragma once

#include "common.cuh"

namespace megazero {

constexpr int kSumColumns = 32, kSumLanes = 32;

// Sums partial [vectors, blocks, columns] over the blocks: a thread adds every 32nd block, a warp the 32 sums. Writes
// the sums, or adds them to what is there.
// Static: not a template, so each translation unit needs its own copy.
static __global__ void __launch_bounds__(kSumColumns* kSumLanes)
    sum_partials(const float* __restrict__ partial, int64_t blocks, int64_t columns, float* first, float* second,
                 bool adds) {
  const int x = threadIdx.x % kSumColumns, y = threadIdx.x / kSumColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + x;
  const float* from = partial + blockIdx.y * blocks * columns + column;
  float sum = 0.0f;
  if (column < columns)
    for (int64_t block = y; block < blocks; block += kSumLanes) sum += from[block * columns];
  scratch[y * (kSumColumns + 1) + x] = sum;  // padded by a column: no bank conflicts below
  __syncthreads();
  sum = reduce_warp<Sum>(scratch[x * (kSumColumns + 1) + y]);  // here x is the lane, y the column
  const int64_t target = static_cast<int64_t>(blockIdx.x) * kSumColumns + y;
  if (x == 0 && target < columns) {
    float* out = blockIdx.y ? second : first;
    out[target] = adds ? out[target] + sum : sum;
  }
}
constexpr int kSumScratch = kSumLanes * (kSumColumns + 1) * static_cast<int>(sizeof(float));

template <typename Launch>
__host__ void launch_sum_partials(const Launch& launch, const float* partial, int64_t blocks, int64_t columns,
                                  float* first, float* second, bool adds = false) {
  launch.grid(sum_partials, divide_up<int64_t>(columns, kSumColumns), second ? 2 : 1, kSumColumns * kSumLanes,
              kSumScratch, partial, blocks, columns, first, second, adds);
}

// A block takes kTileThreads packs of columns, and every `lanes`-th group of kTileRows rows. So `lanes` blocks share
// the columns, each with its partial sums.
struct Lanes {
  int64_t rows, columns;
  uint32_t across;  // blocks side by side
  int64_t lanes;

  __host__ Lanes(int64_t rows, int64_t columns, int pack, int64_t lanes)
      : rows(rows), columns(columns), across(Tiles(rows, columns, pack).across), lanes(lanes) {}

  __host__ int64_t blocks() const { return across * lanes; }
};

constexpr int kLaneGroups = 4;  // least groups of rows per block for which writing its sums pays off

// Returns the number of lanes for a matrix, which depends on its size and the device, not on alignment.
template <typename T>
__host__ int64_t sum_lanes(int64_t rows, int64_t columns, int64_t multiprocessors) {
  const int64_t across = Tiles(rows, columns, kPack<T>).across;
  const int64_t most = divide_up(multiprocessors * kTileBlocks, across);
  return at_least(at_most(most, divide_up<int64_t>(rows, kTileRows * kLaneGroups)), 1);
}

// For every pack of this block: input = read(row, column), then add(row, column, input, sums), which adds N numbers to
// the sums of the columns. Calls `each_column(column)` first.
template <int N, typename EachColumn, typename Read, typename Add>
__device__ __forceinline__ void for_each_lane(const Lanes& at, float* partial, EachColumn each_column, Read read,
                                              Add add) {
  const int64_t lane = blockIdx.x / at.across;
  const int64_t column = (int64_t{blockIdx.x % at.across} * kTileThreads + threadIdx.x) * N;
  if (column >= at.columns) return;
  each_column(column);
  float sums[N] = {};
  for (int64_t first = lane * kTileRows; first < at.rows; first += at.lanes * kTileRows)
    for_each_row(first, at.rows, column, read,
                 [&](int64_t row, int64_t column, auto input) { add(row, column, input, sums); });
#pragma unroll
  for (int k = 0; k < N; ++k) partial[lane * at.columns + column + k] = sums[k];
}

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks) sum_rows(const T* x, float* partial, const Lanes at) {
  for_each_lane<N>(
      at, partial, [](int64_t) {},
      [&](int64_t row, int64_t column) { return load_fixed<N>(x + row * at.columns + column); },
      [&](int64_t, int64_t, Pack<T, N> pack, float* sums) {
        keep_packed(pack);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k] += wide(pack.at[k]);
      });
}

// `partial` has room for sum_lanes() rows of sums.
template <typename T, typename Launch>
__host__ void launch_sum_rows(const Launch& launch, const T* x, float* partial, float* out, int64_t rows,
                              int64_t columns, bool adds) {
  constexpr int N = kPack<T>;
  const int64_t lanes = sum_lanes<T>(rows, columns, launch.multiprocessors());
  auto start = [&](auto kernel, int pack) {
    const Lanes at(rows, columns, pack, lanes);
    launch(kernel, at.blocks(), kTileThreads, 0, x, partial, at);
  };
  if (packs_fit<N>(x, columns))
    start(sum_rows<T, N>, N);
  else
    start(sum_rows<T, 1>, 1);
  launch_sum_partials(launch, partial, lanes, columns, out, static_cast<float*>(nullptr), adds);
}

}  // namespace megazero
