// Checks tensors and returns pointers in this library's number types.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>
#include <vector>

#include "common.h"

using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using torch::stable::Tensor;

namespace {

// Calls f with a null pointer to the number type of `dtype`.
template <typename F>
void with_type(ScalarType dtype, F f) {
  switch (dtype) {
    case ScalarType::Float:
      return f(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<Half*>(nullptr));
    default:
      STD_TORCH_CHECK(false, "expected fp32, bf16 or fp16");
  }
}

template <typename T>
constexpr ScalarType kDtype = ScalarType::Float;
template <>
constexpr ScalarType kDtype<double> = ScalarType::Double;
template <>
constexpr ScalarType kDtype<int64_t> = ScalarType::Long;
template <>
constexpr ScalarType kDtype<uint8_t> = ScalarType::Byte;
template <>
constexpr ScalarType kDtype<BFloat16> = ScalarType::BFloat16;
template <>
constexpr ScalarType kDtype<Half> = ScalarType::Half;

template <typename T>
const T* input(const Tensor& t, int64_t numel) {
  STD_TORCH_CHECK(t.scalar_type() == kDtype<T>, "expected tensors of one dtype, and statistics and scalars in fp32");
  STD_TORCH_CHECK(t.is_contiguous(), "expected a contiguous tensor");
  STD_TORCH_CHECK(t.numel() == numel, "sizes differ");
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* output(const Tensor& t, int64_t numel) {
  return const_cast<T*>(input<T>(t, numel));
}

// Returns an uninitialised tensor of x's shape, contiguous whatever the strides of x.
Tensor like(const Tensor& x) { return torch::stable::new_empty(x, x.sizes()); }

Tensor statistic(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 1, "expected rows, got a scalar");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = 1;
  return torch::stable::new_empty(x, {sizes.data(), sizes.size()}, ScalarType::Float);
}

// Returns an uninitialised fp32 vector of n numbers.
Tensor sums_like(const Tensor& x, int64_t n) { return torch::stable::new_empty(x, {&n, 1}, ScalarType::Float); }

struct Rows {
  int64_t count, n;
  explicit Rows(const Tensor& x) : count(0), n(0) {
    STD_TORCH_CHECK(x.dim() >= 1, "expected rows, got a scalar");
    n = x.size(-1);
    count = n ? x.numel() / n : 0;
  }
  int64_t grain() const { return std::max<int64_t>(1, kGrain / std::max<int64_t>(n, 1)); }
};

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

}  // namespace
