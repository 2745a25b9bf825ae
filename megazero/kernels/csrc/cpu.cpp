// Fused operations on the CPU. Specification: megazero/kernels/reference.py.
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
#include <cmath>
#include <cstdint>

using torch::stable::Tensor;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define EXACT __attribute__((optimize("fp-contract=off")))  // no multiply-add but those that are written
#else
#define EXACT
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

// 16-bit floats as their bits. Rounding is to nearest, ties to even, as torch rounds; a NaN stays one.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

INLINE float wide(float x) { return x; }
INLINE float wide(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
INLINE float wide(Half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }

template <typename T>
INLINE T narrow(float x);
template <>
INLINE BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded)};
}
template <>
INLINE Half narrow<Half>(float x) {
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}

// What all elements of one update have in common.
struct Adam {
  float unscale, decay, first_weight, second_decay, second_weight, root_correction, eps, step_size;
};

// The arithmetic of torch's fused AdamW, operation by operation, so that it gives the same bits: fused multiply-adds are
// where torch has them and nowhere else. 30 bytes an element with fp32 gradients: parameter and both moments are read and
// written, the gradient is read, the 16-bit parameter is written.
template <typename G, typename P>
INLINE void adamw_loop(const Adam& a, float* __restrict master, const G* __restrict grad, float* __restrict first,
                       float* __restrict second, P* __restrict published, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = wide(grad[i]) / a.unscale;
    const float m = __builtin_fmaf(a.first_weight, g - first[i], first[i]);
    const float v = __builtin_fmaf(a.second_weight * g, g, second[i] * a.second_decay);
    const float p = master[i] * a.decay - a.step_size * m / (std::sqrt(v) / a.root_correction + a.eps);
    first[i] = m;
    second[i] = v;
    master[i] = p;
    published[i] = narrow<P>(p);
  }
}

#define ADAMW(NAME, G, P)                                                                                         \
  EXACT FOR_EVERY_CPU void NAME(const Adam& a, float* __restrict master, const G* __restrict grad,                \
                                float* __restrict first, float* __restrict second, P* __restrict published,       \
                                int64_t n) {                                                                      \
    adamw_loop(a, master, grad, first, second, published, n);                                                     \
  }
ADAMW(adamw_float_bfloat16, float, BFloat16)
ADAMW(adamw_bfloat16, BFloat16, BFloat16)
ADAMW(adamw_float_half, float, Half)
ADAMW(adamw_half, Half, Half)

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

float scalar(const Tensor& t) {
  STD_TORCH_CHECK(t.numel() == 1, "expected one element");
  return *input(t);
}

float* updated(const Tensor& t, int64_t n) {
  STD_TORCH_CHECK(t.numel() == n, "sizes differ");
  return const_cast<float*>(input(t));
}

// See reference.adamw_. `skip` and `scale` are fp32 tensors of one element; `step` counts updates.
void adamw_(Tensor master, Tensor grad, Tensor first, Tensor second, Tensor published, Tensor step, Tensor divide_by,
            Tensor skip, double lr, double beta1, double beta2, double eps, double weight_decay) {
  using torch::headeronly::ScalarType;
  if (scalar(skip) != 0.0f) return;
  const int64_t n = master.numel();
  float *p = updated(master, n), *m = updated(first, n), *v = updated(second, n), *count = updated(step, 1);
  const ScalarType from = grad.scalar_type(), to = published.scalar_type();
  STD_TORCH_CHECK(grad.numel() == n && published.numel() == n, "sizes differ");
  STD_TORCH_CHECK(grad.is_contiguous() && published.is_contiguous(), "expected contiguous tensors");
  STD_TORCH_CHECK(to == ScalarType::BFloat16 || to == ScalarType::Half, "expected 16-bit parameters");
  STD_TORCH_CHECK(from == ScalarType::Float || from == to, "expected gradients in fp32 or as the parameters");
  *count += 1.0f;
  const double updates = *count;
  const Adam a = {
      scalar(divide_by),
      static_cast<float>(1 - lr * weight_decay),
      static_cast<float>(1 - beta1),
      static_cast<float>(beta2),
      static_cast<float>(1 - beta2),
      static_cast<float>(std::sqrt(1 - std::pow(beta2, updates))),
      static_cast<float>(eps),
      static_cast<float>(lr / (1 - std::pow(beta1, updates))),
  };
  const void* g = grad.const_data_ptr();
  void* low = published.mutable_data_ptr();
  torch::stable::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t k = end - begin;
    if (to == ScalarType::BFloat16) {
      BFloat16* out = static_cast<BFloat16*>(low) + begin;
      if (from == ScalarType::Float)
        adamw_float_bfloat16(a, p + begin, static_cast<const float*>(g) + begin, m + begin, v + begin, out, k);
      else
        adamw_bfloat16(a, p + begin, static_cast<const BFloat16*>(g) + begin, m + begin, v + begin, out, k);
    } else {
      Half* out = static_cast<Half*>(low) + begin;
      if (from == ScalarType::Float)
        adamw_float_half(a, p + begin, static_cast<const float*>(g) + begin, m + begin, v + begin, out, k);
      else
        adamw_half(a, p + begin, static_cast<const Half*>(g) + begin, m + begin, v + begin, out, k);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megazero_cpu, m) {
  m.def("bias_gelu(Tensor x, Tensor bias) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> Tensor");
  m.def("block_squares(Tensor flat, Tensor(a!) partial) -> ()");
  m.def(
      "adamw_(Tensor(a!) master, Tensor grad, Tensor(b!) first, Tensor(c!) second, Tensor(d!) published, "
      "Tensor(e!) step, Tensor divide_by, Tensor skip, float lr, float beta1, float beta2, float eps, "
      "float weight_decay) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megazero_cpu, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("block_squares", TORCH_BOX(&block_squares));
  m.impl("adamw_", TORCH_BOX(&adamw_));
}
