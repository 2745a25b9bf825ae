// Connects torch's stable ABI to the launchers: checks tensors, gets their pointers, the stream and the device.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>

#include "common.cuh"

// Weak, so that a torch without CUDA, which lacks the symbol, can load the library too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace megazero {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
constexpr ScalarType kTypeOf = ScalarType::Undefined;
template <>
constexpr ScalarType kTypeOf<float> = ScalarType::Float;
template <>
constexpr ScalarType kTypeOf<double> = ScalarType::Double;
template <>
constexpr ScalarType kTypeOf<__nv_bfloat16> = ScalarType::BFloat16;
template <>
constexpr ScalarType kTypeOf<__half> = ScalarType::Half;
template <>
constexpr ScalarType kTypeOf<int64_t> = ScalarType::Long;
template <>
constexpr ScalarType kTypeOf<uint8_t> = ScalarType::Byte;

// Starts kernels on the current stream of the device of `like`; makes it the current device for its own lifetime.
class Launch {
 public:
  Launch(const char* operation, const Tensor& like)
      : operation_(operation), device_(like.get_device_index()), guard_(device_), stream_(nullptr), multiprocessors_(0) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, operation, ": this torch has no CUDA");
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream) == AOTI_TORCH_SUCCESS, operation,
                    ": no current stream");
    stream_ = static_cast<cudaStream_t>(stream);
    check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_));
  }

  int64_t multiprocessors() const { return multiprocessors_; }

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared, Arguments... arguments) const {
    grid(kernel, blocks, 1, threads, shared, arguments...);
  }

  template <typename... Parameters, typename... Arguments>
  void grid(void (*kernel)(Parameters...), int64_t x, int y, int threads, int shared, Arguments... arguments) const {
    if (x == 0) return;
    expect(x <= INT32_MAX, "the tensor", "is too large: its blocks are more than a grid may have");
    kernel<<<dim3(static_cast<unsigned>(x), y), threads, shared, stream_>>>(arguments...);
    check(cudaGetLastError());
  }

  // Returns the elements of `t`. Checks that it is contiguous, has `numel` elements of type T, and is on the device.
  template <typename T>
  const T* read(const Tensor& t, int64_t numel, const char* name) const {
    expect(t.scalar_type() == kTypeOf<T>, name, "has another dtype than expected");
    expect(t.is_contiguous(), name, "is not contiguous");
    expect(t.numel() == numel, name, "has another number of elements than expected");
    expect(t.is_cuda() && t.get_device_index() == device_, name, "is on another device");
    return static_cast<const T*>(t.const_data_ptr());
  }
  template <typename T>
  const T* read(const std::optional<Tensor>& t, int64_t numel, const char* name) const {
    return t.has_value() ? read<T>(*t, numel, name) : nullptr;
  }
  template <typename T>
  T* write(const Tensor& t, int64_t numel, const char* name) const {
    read<T>(t, numel, name);
    return static_cast<T*>(t.mutable_data_ptr());
  }

  void expect(bool condition, const char* name, const char* complaint) const {
    STD_TORCH_CHECK(condition, "megazero::", operation_, ": ", name, " ", complaint);
  }

 private:
  void check(cudaError_t error) const {
    STD_TORCH_CHECK(error == cudaSuccess, "megazero::", operation_, ": ", cudaGetErrorString(error));
  }

  const char* operation_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
  int multiprocessors_;
};

// Calls body(T{}) with the element type of `t`.
template <typename Body>
void for_type_of(const Launch& launch, const Tensor& t, const char* name, Body body) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::BFloat16:
      return body(__nv_bfloat16{});
    case ScalarType::Half:
      return body(__half{});
    default:
      launch.expect(false, name, "is neither fp32 nor bf16 nor fp16");
  }
}

// Returns an uninitialised contiguous tensor on the device of `like`.
template <typename T>
Tensor make(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, kTypeOf<T>);
}

// A tensor seen as a matrix whose columns are its last dimension.
struct Rows {
  int64_t rows, columns;

  Rows(const Launch& launch, const Tensor& t, const char* name)
      : rows(0), columns(t.dim() ? t.size(t.dim() - 1) : 0) {
    launch.expect(columns > 0, name, "has no columns");
    rows = t.numel() / columns;
  }
};

}  // namespace megazero
