// Fused operations on the CPU, fp32. Specification: megazero/kernels/reference.py.
//
// Bound to torch through its stable ABI (no ATen or c10 headers: seconds to compile, and one binary serves several
// torch versions) and run on torch's own threads. Each loop is compiled for AVX-512, AVX2 and plain x86-64 (or whatever
// the machine is) and the best is picked when the library is loaded.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdint>

using torch::stable::Tensor;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t kGrain = 1 << 15;   // elements that are worth a thread
constexpr int64_t kBlock = 1 << 16;   // elements of one partial sum: fixed, so sums do not depend on the thread count
constexpr int kLanes = 32;            // independent accumulators of a partial sum

constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;

// e^x for |x| <= 87 to about 1 ulp: 2^n p(r) with x = n ln 2 + r, |r| <= ln(2) / 2. The degree-6 polynomial is the
// Taylor series with its last coefficients fitted to the interval; ln 2 is split in two so that r is exact.
INLINE float exponential(float x) {
  const float n = __builtin_rintf(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return p * power;
}

// z held within +-87, where e^-z and the sigmoid 1 / (1 + e^-z) are still normal numbers. NaN stays NaN.
INLINE float held(float z) {
  z = z < -87.0f ? -87.0f : z;
  return z > 87.0f ? 87.0f : z;
}

// The tanh form of GELU is x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3), because 1 + tanh(u) = 2 sigmoid(2u).
FOR_EVERY_CPU void gelu_row(const float* __restrict x, const float* __restrict bias, float* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i] + bias[i];
    y[i] = v / (1.0f + exponential(-held(2.0f * kSqrt2OverPi * v * (1.0f + kCubic * v * v))));
  }
}

// dy/dx = s + x s (1 - s) 2u' with s = sigmoid(2u) and u' = sqrt(2/pi) (1 + 3 0.044715 x^2). 1 - s is taken as e^-2u s:
// the subtraction would leave an error that a large x multiplies.
FOR_EVERY_CPU void gelu_backward_row(const float* __restrict grad, const float* __restrict x,
                                     const float* __restrict bias, float* __restrict dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float v = x[i] + bias[i];
    v = v < -30.0f ? -30.0f : v;  // beyond, the derivative is 0 or 1, and its factors would overflow
    v = v > 30.0f ? 30.0f : v;
    const float square = v * v;
    const float e = exponential(-held(2.0f * kSqrt2OverPi * v * (1.0f + kCubic * square)));
    const float s = 1.0f / (1.0f + e);
    const float slope = 2.0f * kSqrt2OverPi * (1.0f + 3.0f * kCubic * square);
    dx[i] = grad[i] * (s + v * s * (e * s) * slope);
  }
}

FOR_EVERY_CPU double squares(const float* __restrict x, int64_t n) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double v = x[i + lane];
      sums[lane] += v * v;
    }
  }
  double total = 0.0;
  for (; i < n; ++i) total += static_cast<double>(x[i]) * x[i];
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  return total;
}

const float* input(const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == torch::headeronly::ScalarType::Float, "expected fp32");
  STD_TORCH_CHECK(t.is_contiguous(), "expected a contiguous tensor");
  return static_cast<const float*>(t.const_data_ptr());
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  const int64_t columns = x.size(-1);
  STD_TORCH_CHECK(bias.numel() == columns, "bias and last dimension differ");
  Tensor y = torch::stable::empty_like(x);
  const float *px = input(x), *pb = input(bias);
  float* py = static_cast<float*>(y.mutable_data_ptr());
  const int64_t rows = columns ? x.numel() / columns : 0;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(columns, 1)),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t r = begin; r < end; ++r)
                                  gelu_row(px + r * columns, pb, py + r * columns, columns);
                              });
  return y;
}

Tensor bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const int64_t columns = x.size(-1);
  STD_TORCH_CHECK(bias.numel() == columns && grad.numel() == x.numel(), "sizes differ");
  Tensor dx = torch::stable::empty_like(x);
  const float *pg = input(grad), *px = input(x), *pb = input(bias);
  float* pd = static_cast<float*>(dx.mutable_data_ptr());
  const int64_t rows = columns ? x.numel() / columns : 0;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(columns, 1)),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t r = begin; r < end; ++r)
                                  gelu_backward_row(pg + r * columns, px + r * columns, pb, pd + r * columns, columns);
                              });
  return dx;
}

// One fp64 partial sum for each kBlock elements.
void block_squares(const Tensor& flat, Tensor& partial) {
  const int64_t n = flat.numel();
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  STD_TORCH_CHECK(partial.numel() == blocks && partial.scalar_type() == torch::headeronly::ScalarType::Double,
                  "expected one fp64 element per block");
  const float* p = input(flat);
  double* out = static_cast<double*>(partial.mutable_data_ptr());
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) out[b] = squares(p + b * kBlock, std::min(kBlock, n - b * kBlock));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megazero_cpu, m) {
  m.def("bias_gelu(Tensor x, Tensor bias) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> Tensor");
  m.def("block_squares(Tensor flat, Tensor(a!) partial) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megazero_cpu, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("block_squares", TORCH_BOX(&block_squares));
}
