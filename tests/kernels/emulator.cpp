// The launchers of csrc/cuda/*.cuh over emulated blocks, as C functions for ctypes: each returns 0, or 1 with a message.

#include "block.h"

#include <string>

#include "adamw.cuh"
#include "columns.cuh"
#include "cross_entropy.cuh"
#include "dropout.cuh"
#include "flat.cuh"
#include "gelu.cuh"
#include "norm.cuh"
#include "norm_backward.cuh"
#include "quantize.cuh"
#include "rotary.cuh"
#include "swiglu.cuh"

using namespace megazero;

namespace {

std::string message;

// Calls body(T{}) with the element type of a number: 0 fp32, 1 bf16, 2 fp16.
template <typename Body>
void for_type(int64_t type, Body body) {
  switch (type) {
    case 0:
      return body(float{});
    case 1:
      return body(__nv_bfloat16{});
    case 2:
      return body(__half{});
    default:
      throw std::runtime_error("no such type");
  }
}

template <typename Body>
int caught(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    message = error.what();
    return 1;
  }
}

// A pointer that becomes one to whatever is asked for.
struct Memory {
  void* at;
  template <typename T>
  operator T*() const {
    return static_cast<T*>(at);
  }
};

const emulator::Launch launch;

// Kernels with one mistake each, for the emulator's own tests.
void barrier_in_a_branch(float*) { threadIdx.x < 16 ? __syncthreads() : static_cast<void>(reduce_warp<Sum>(1.0f)); }
void lane_that_left(float*) {
  if (threadIdx.x == 5) return;
  reduce_warp<Sum>(1.0f);
}
void missing_barrier(float* out) {
  scratch[threadIdx.x] = 1.0f;
  out[threadIdx.x] = scratch[(threadIdx.x + 1) % blockDim.x];
}
void too_much_shared_memory(float*) { scratch[kScratch / sizeof(float)] = 1.0f; }

}  // namespace

extern "C" {

const char* last_error() { return message.c_str(); }

int configure(int64_t multiprocessors, int64_t descending, int64_t first_block, int64_t end_block) {
  emulator::settings = {multiprocessors, first_block, end_block, descending != 0};
  return 0;
}

// Starts one of the kernels with a mistake.
int mistake(int64_t which, Memory out) {
  void (*const kernels[])(float*) = {barrier_in_a_branch, lane_that_left, missing_barrier, too_much_shared_memory};
  return caught([&] { launch(kernels[which], 1, 2 * kWarp, kScratch, static_cast<float*>(out)); });
}

int norm(int64_t type, int64_t rms, Memory x, Memory residual, Memory weight, Memory bias, Memory total, Memory y,
         Memory mean, Memory rstd, int64_t rows, int64_t columns, double eps, double offset, int64_t twice) {
  return caught([&] {
    for_type(type, [&](auto t) {
      using T = decltype(t);
      const NormForward<T> a{x,    residual, weight,  bias,
                             total, y,       mean,    rstd,
                             rows,  columns, static_cast<float>(eps), static_cast<float>(offset),
                             twice != 0};
      rms ? launch_norm_forward<T, true>(launch, a) : launch_norm_forward<T, false>(launch, a);
    });
  });
}

int64_t norm_blocks(int64_t type, int64_t rows, int64_t columns) {
  int64_t blocks = 0;
  for_type(type, [&](auto t) {
    blocks = norm_backward_blocks<decltype(t)>(rows, columns, emulator::settings.multiprocessors);
  });
  return blocks;
}

int norm_backward(int64_t type, int64_t rms, Memory grad, Memory grad_total, Memory x, Memory mean, Memory rstd,
                  Memory weight, Memory dx, Memory partial, Memory dweight, Memory dbias, int64_t rows,
                  int64_t columns, double offset) {
  return caught([&] {
    for_type(type, [&](auto t) {
      using T = decltype(t);
      const NormBackward<T> a{grad, grad_total, x,    mean,    rstd,
                              weight, dx,     partial, rows, columns, static_cast<float>(offset)};
      rms ? launch_norm_backward<T, true>(launch, a, dweight, dbias)
          : launch_norm_backward<T, false>(launch, a, dweight, dbias);
    });
  });
}

int bias_gelu(int64_t type, Memory x, Memory bias, Memory y, int64_t rows, int64_t columns) {
  return caught([&] {
    for_type(type, [&](auto t) { launch_bias_gelu<decltype(t)>(launch, x, bias, y, rows, columns); });
  });
}

int64_t sum_lanes(int64_t type, int64_t rows, int64_t columns) {
  int64_t lanes = 0;
  for_type(type, [&](auto t) {
    lanes = megazero::sum_lanes<decltype(t)>(rows, columns, emulator::settings.multiprocessors);
  });
  return lanes;
}

int bias_gelu_backward(int64_t type, Memory grad, Memory x, Memory bias, Memory dx, Memory partial, Memory dbias,
                       int64_t rows, int64_t columns) {
  return caught([&] {
    for_type(type, [&](auto t) {
      launch_bias_gelu_backward<decltype(t)>(launch, grad, x, bias, dx, partial, dbias, rows, columns);
    });
  });
}

int sum_rows_(int64_t type, Memory x, Memory partial, Memory out, int64_t rows, int64_t columns, int64_t add) {
  return caught([&] {
    for_type(type, [&](auto t) { launch_sum_rows<decltype(t)>(launch, x, partial, out, rows, columns, add != 0); });
  });
}

int swiglu(int64_t type, Memory gate, Memory up, Memory y, int64_t n) {
  return caught([&] {
    for_type(type, [&](auto t) { launch_swiglu<decltype(t)>(launch, gate, up, y, n); });
  });
}

int swiglu_backward(int64_t type, Memory grad, Memory gate, Memory up, Memory dgate, Memory dup, int64_t n) {
  return caught([&] {
    for_type(type, [&](auto t) { launch_swiglu_backward<decltype(t)>(launch, grad, gate, up, dgate, dup, n); });
  });
}

int dropout_add(int64_t type, Memory x, Memory residual, Memory y, Memory sample_ids, Memory positions, int64_t key,
                double drop, int64_t rows, int64_t batch, int64_t columns) {
  return caught([&] {
    const Mask mask(sample_ids, positions, batch, static_cast<uint32_t>(key), drop);
    for_type(type, [&](auto t) { launch_dropout_add<decltype(t)>(launch, x, residual, y, mask, rows, columns); });
  });
}

int dropout_backward(int64_t type, Memory grad, Memory dx, Memory sample_ids, Memory positions, int64_t key,
                     double drop, int64_t rows, int64_t batch, int64_t columns) {
  return caught([&] {
    const Mask mask(sample_ids, positions, batch, static_cast<uint32_t>(key), drop);
    for_type(type, [&](auto t) { launch_dropout_backward<decltype(t)>(launch, grad, dx, mask, rows, columns); });
  });
}

int rotary(int64_t type, Memory x, Memory cosines, Memory sines, Memory y, int64_t sequence, int64_t batch,
           int64_t heads, int64_t half, int64_t stride_s, int64_t stride_b, int64_t stride_h, int64_t angle_stride,
           int64_t angle_batch_stride, int64_t inverse) {
  return caught([&] {
    const RotaryShape shape{sequence,     batch, heads, half, {stride_s, stride_b, stride_h}, angle_stride,
                            angle_batch_stride};
    for_type(type, [&](auto t) { launch_rotary<decltype(t)>(launch, x, cosines, sines, y, shape, inverse != 0); });
  });
}

int cross_entropy_parts(int64_t type, Memory logits, Memory targets, Memory parts, int64_t rows, int64_t columns) {
  return caught([&] {
    for_type(type, [&](auto t) {
      launch_cross_entropy_parts<decltype(t)>(launch, logits, targets, parts, rows, columns);
    });
  });
}

int cross_entropy_backward(int64_t type, Memory logits, Memory log_sums, Memory targets, Memory grad, int64_t rows,
                           int64_t columns) {
  return caught([&] {
    for_type(type, [&](auto t) {
      launch_cross_entropy_backward<decltype(t)>(launch, logits, log_sums, targets, grad, rows, columns);
    });
  });
}

int adamw(int64_t grad_type, int64_t type, Memory master, Memory grad, Memory first, Memory second, Memory published,
          Memory step, Memory divide_by, Memory skip, Memory common, double lr, double beta1, double beta2, double eps,
          double weight_decay, int64_t n) {
  return caught([&] {
    const AdamSettings settings{lr, beta1, beta2, eps, weight_decay};
    for_type(type, [&](auto p) {
      using P = decltype(p);
      auto update = [&](auto g) {
        launch_adamw<decltype(g), P>(launch, master, grad, first, second, published, step, divide_by, skip, settings,
                                     common, n);
      };
      grad_type == 0 ? update(float{}) : update(P{});
    });
  });
}

int sums_of_squares(int64_t type, Memory at, Memory numel, int64_t count, Memory partial, Memory totals) {
  return caught([&] {
    for_type(type, [&](auto t) { launch_sums_of_squares<decltype(t)>(launch, at, numel, count, partial, totals); });
  });
}

int accumulate_flat(int64_t type, Memory into, Memory x, int64_t n) {
  return caught([&] { for_type(type, [&](auto t) { launch_accumulate<decltype(t)>(launch, into, x, n); }); });
}

int cast_flat(int64_t to, int64_t from, Memory into, Memory x, int64_t n) {
  return caught([&] {
    for_type(to, [&](auto a) {
      for_type(from, [&](auto b) { launch_cast<decltype(a), decltype(b)>(launch, into, x, n); });
    });
  });
}

int quantize_flat(int64_t type, Memory codes, Memory x, int64_t n, int64_t bits) {
  return caught([&] {
    for_type(type, [&](auto t) { launch_quantize<decltype(t)>(launch, x, n, static_cast<int>(bits), codes); });
  });
}

int dequantize_flat(int64_t type, Memory into, Memory codes, int64_t n, int64_t bits, int64_t add) {
  return caught([&] {
    for_type(type, [&](auto t) {
      launch_dequantize<decltype(t)>(launch, codes, static_cast<int>(bits), add != 0, into, n);
    });
  });
}
}
