// Fused operations on NVIDIA GPUs: bindings only. Specification: megazero/kernels/reference.py; schemas: schema.py.
//
// Bound to torch through its stable ABI: no ATen or c10 headers, one binary for several torch versions. The kernels are
// in csrc/cuda/*.cuh, without torch.

#include <tuple>
#include <vector>

#include "cuda/adamw.cuh"
#include "cuda/binding.cuh"
#include "cuda/columns.cuh"
#include "cuda/cross_entropy.cuh"
#include "cuda/dropout.cuh"
#include "cuda/flat.cuh"
#include "cuda/gelu.cuh"
#include "cuda/norm.cuh"
#include "cuda/norm_backward.cuh"
#include "cuda/quantize.cuh"
#include "cuda/rotary.cuh"
#include "cuda/swiglu.cuh"

namespace megazero::bindings {
namespace {

using torch::stable::empty_like;

// Returns an uninitialised fp32 tensor with one number per row: [..., 1].
Tensor statistic(const Tensor& x) {
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = 1;
  return torch::stable::new_empty(x, {shape.data(), shape.size()}, ScalarType::Float);
}

struct Normed {
  Tensor total, y, mean, rstd;
};

// `total` is x itself if there is no residual, `mean` is x itself for RMSNorm.
template <bool RMS>
Normed norm(const Launch& launch, const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight,
            const std::optional<Tensor>& bias, double eps, double offset, bool twice) {
  const Rows shape(launch, x, "x");
  Normed out{residual ? empty_like(x) : x, empty_like(x), RMS ? x : statistic(x), statistic(x)};
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    NormForward<T> a{};
    a.x = launch.read<T>(x, x.numel(), "x");
    a.residual = launch.read<T>(residual, x.numel(), "residual");
    a.weight = launch.read<T>(weight, shape.columns, "weight");
    a.bias = launch.read<T>(bias, shape.columns, "bias");
    a.total = residual ? launch.write<T>(out.total, x.numel(), "total") : nullptr;
    a.y = launch.write<T>(out.y, x.numel(), "y");
    a.mean = RMS ? nullptr : launch.write<float>(out.mean, shape.rows, "mean");
    a.rstd = launch.write<float>(out.rstd, shape.rows, "rstd");
    a.rows = shape.rows;
    a.columns = shape.columns;
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(offset);
    a.twice = twice;
    launch_norm_forward<T, RMS>(launch, a);
  });
  return out;
}

struct NormGradients {
  Tensor dx, dweight, dbias;
};

template <bool RMS>
NormGradients norm_gradients(const Launch& launch, const Tensor& grad, const std::optional<Tensor>& grad_total,
                             const Tensor& x, const std::optional<Tensor>& mean, const Tensor& rstd,
                             const Tensor& weight, double offset) {
  const Rows shape(launch, x, "x");
  const int64_t n = shape.columns;
  NormGradients out{empty_like(x), make<float>(x, {n}), RMS ? weight : make<float>(x, {n})};
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    const int64_t blocks = norm_backward_blocks<T>(shape.rows, shape.columns, launch.multiprocessors());
    Tensor partial = make<float>(x, {RMS ? 1 : 2, blocks, shape.columns});
    NormBackward<T> a{};
    a.grad = launch.read<T>(grad, x.numel(), "grad");
    a.grad_total = launch.read<T>(grad_total, x.numel(), "grad_total");
    a.x = launch.read<T>(x, x.numel(), "x");
    a.mean = launch.read<float>(mean, shape.rows, "mean");
    a.rstd = launch.read<float>(rstd, shape.rows, "rstd");
    a.weight = launch.read<T>(weight, shape.columns, "weight");
    a.dx = launch.write<T>(out.dx, x.numel(), "dx");
    a.partial = launch.write<float>(partial, partial.numel(), "partial");
    a.rows = shape.rows;
    a.columns = shape.columns;
    a.offset = static_cast<float>(offset);
    float* dweight = launch.write<float>(out.dweight, n, "dweight");
    float* dbias = RMS ? nullptr : launch.write<float>(out.dbias, n, "dbias");
    launch_norm_backward<T, RMS>(launch, a, dweight, dbias);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                                              double offset) {
  const Normed n = norm<false>(Launch("layer_norm", x), x, std::nullopt, weight, bias, eps, offset, false);
  return {n.y, n.mean, n.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& mean,
                                                       const Tensor& rstd, const Tensor& weight, double offset) {
  const NormGradients n =
      norm_gradients<false>(Launch("layer_norm_backward", x), grad, std::nullopt, x, mean, rstd, weight, offset);
  return {n.dx, n.dweight, n.dbias};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset, bool twice) {
  const Normed n = norm<true>(Launch("rms_norm", x), x, std::nullopt, weight, std::nullopt, eps, offset, twice);
  return {n.y, n.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rrms,
                                             const Tensor& weight, double offset) {
  const NormGradients n =
      norm_gradients<true>(Launch("rms_norm_backward", x), grad, std::nullopt, x, std::nullopt, rrms, weight, offset);
  return {n.dx, n.dweight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                          const Tensor& bias, double eps, double offset) {
  const Normed n = norm<false>(Launch("add_layer_norm", x), x, residual, weight, bias, eps, offset, false);
  return {n.total, n.y, n.mean, n.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_backward(const Tensor& grad, const Tensor& grad_total,
                                                           const Tensor& total, const Tensor& mean, const Tensor& rstd,
                                                           const Tensor& weight, double offset) {
  const NormGradients n = norm_gradients<false>(Launch("add_layer_norm_backward", total), grad, grad_total, total, mean,
                                                rstd, weight, offset);
  return {n.dx, n.dweight, n.dbias};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                double eps, double offset, bool twice) {
  const Normed n = norm<true>(Launch("add_rms_norm", x), x, residual, weight, std::nullopt, eps, offset, twice);
  return {n.total, n.y, n.rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const Tensor& grad_total, const Tensor& total,
                                                 const Tensor& rrms, const Tensor& weight, double offset) {
  const NormGradients n = norm_gradients<true>(Launch("add_rms_norm_backward", total), grad, grad_total, total,
                                               std::nullopt, rrms, weight, offset);
  return {n.dx, n.dweight};
}

Tensor bias_gelu(const Tensor& x, const std::optional<Tensor>& bias) {
  const Launch launch("bias_gelu", x);
  const Rows shape(launch, x, "x");
  Tensor y = empty_like(x);
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    const T *from = launch.read<T>(x, x.numel(), "x"), *shift = launch.read<T>(bias, shape.columns, "bias");
    T* to = launch.write<T>(y, x.numel(), "y");
    launch_bias_gelu(launch, from, shift, to, shape.rows, shape.columns);
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias) {
  const Launch launch("bias_gelu_backward", x);
  const Rows shape(launch, x, "x");
  const int64_t n = bias ? shape.columns : 0;
  Tensor dx = empty_like(x), dbias = make<float>(x, {n});
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    const int64_t lanes = bias ? sum_lanes<T>(shape.rows, n, launch.multiprocessors()) : 0;
    Tensor partial = make<float>(x, {lanes, n});
    const T *g = launch.read<T>(grad, x.numel(), "grad"), *from = launch.read<T>(x, x.numel(), "x");
    const T* shift = launch.read<T>(bias, shape.columns, "bias");
    T* to = launch.write<T>(dx, x.numel(), "dx");
    float* sums = launch.write<float>(partial, lanes * n, "partial");
    launch_bias_gelu_backward(launch, g, from, shift, to, sums, launch.write<float>(dbias, n, "dbias"), shape.rows,
                              shape.columns);
  });
  return {dx, dbias};
}

void sum_rows_(const Tensor& into, const Tensor& x, bool add) {
  const Launch launch("sum_rows_", x);
  const Rows shape(launch, x, "x");
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    const int64_t lanes = sum_lanes<T>(shape.rows, shape.columns, launch.multiprocessors());
    Tensor partial = make<float>(x, {lanes, shape.columns});
    launch_sum_rows(launch, launch.read<T>(x, x.numel(), "x"), launch.write<float>(partial, partial.numel(), "partial"),
                    launch.write<float>(into, shape.columns, "into"), shape.rows, shape.columns, add);
  });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const Launch launch("swiglu", gate);
  Tensor y = empty_like(gate);
  const int64_t n = gate.numel();
  for_type_of(launch, gate, "gate", [&](auto type) {
    using T = decltype(type);
    launch_swiglu(launch, launch.read<T>(gate, n, "gate"), launch.read<T>(up, n, "up"), launch.write<T>(y, n, "y"), n);
  });
  return y;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const Launch launch("swiglu_backward", gate);
  Tensor dgate = empty_like(gate), dup = empty_like(up);
  const int64_t n = gate.numel();
  for_type_of(launch, gate, "gate", [&](auto type) {
    using T = decltype(type);
    launch_swiglu_backward(launch, launch.read<T>(grad, n, "grad"), launch.read<T>(gate, n, "gate"),
                           launch.read<T>(up, n, "up"), launch.write<T>(dgate, n, "dgate"),
                           launch.write<T>(dup, n, "dup"), n);
  });
  return {dgate, dup};
}

Mask mask_of(const Launch& launch, const Tensor& x, const Tensor& sample_ids, const Tensor& positions, int64_t key,
             double drop) {
  launch.expect(x.dim() == 3, "x", "is not [S, B, D]");
  launch.expect(key >= 0 && key < int64_t{1} << 32, "key", "is not an unsigned 32-bit word");
  launch.expect(drop >= 0.0 && drop < 1.0, "drop", "is not in [0, 1)");
  launch.expect(x.size(0) * x.size(1) <= UINT32_MAX, "x", "has too many rows");
  return Mask(launch.read<int64_t>(sample_ids, x.size(1), "sample_ids"),
              launch.read<int64_t>(positions, x.size(0), "positions"), x.size(1), static_cast<uint32_t>(key), drop);
}

Tensor dropout_add(const Tensor& x, const Tensor& residual, const Tensor& sample_ids, const Tensor& positions,
                   int64_t key, double drop) {
  const Launch launch("dropout_add", x);
  const Mask mask = mask_of(launch, x, sample_ids, positions, key, drop);
  const Rows shape(launch, x, "x");
  Tensor y = empty_like(x);
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    launch_dropout_add(launch, launch.read<T>(x, x.numel(), "x"), launch.read<T>(residual, x.numel(), "residual"),
                       launch.write<T>(y, x.numel(), "y"), mask, shape.rows, shape.columns);
  });
  return y;
}

Tensor dropout_backward(const Tensor& grad, const Tensor& sample_ids, const Tensor& positions, int64_t key,
                        double drop) {
  const Launch launch("dropout_backward", grad);
  const Mask mask = mask_of(launch, grad, sample_ids, positions, key, drop);
  const Rows shape(launch, grad, "grad");
  Tensor dx = empty_like(grad);
  for_type_of(launch, grad, "grad", [&](auto type) {
    using T = decltype(type);
    launch_dropout_backward(launch, launch.read<T>(grad, grad.numel(), "grad"), launch.write<T>(dx, grad.numel(), "dx"),
                            mask, shape.rows, shape.columns);
  });
  return dx;
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  const Launch launch("rotary", x);
  launch.expect(x.dim() == 4 && x.stride(3) == 1 && x.size(3) % 2 == 0, "x",
                "is not [S, B, H, d] with d even and contiguous");
  launch.expect(cos.dim() == 4 && cos.size(0) == x.size(0) && (cos.size(1) == x.size(1) || cos.size(1) == 1) &&
                    cos.size(2) == 1 && cos.size(3) == x.size(3),
                "cos", "is not [S, B or 1, 1, d]");
  Tensor y = make<float>(x, {0});
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    y = make<T>(x, {x.size(0), x.size(1), x.size(2), x.size(3)});
    const int64_t batches = cos.size(1);
    const RotaryShape shape{x.size(0),
                            x.size(1),
                            x.size(2),
                            x.size(3) / 2,
                            {x.stride(0), x.stride(1), x.stride(2)},
                            batches * x.size(3),
                            batches == 1 ? 0 : x.size(3)};
    launch_rotary(launch, static_cast<const T*>(x.const_data_ptr()), launch.read<T>(cos, cos.numel(), "cos"),
                  launch.read<T>(sin, cos.numel(), "sin"), launch.write<T>(y, x.numel(), "y"), shape, inverse);
  });
  return y;
}

Tensor cross_entropy_parts_(Tensor logits, const Tensor& targets) {
  const Launch launch("cross_entropy_parts_", logits);
  launch.expect(logits.dim() == 2, "logits", "is not [N, V]");
  const Rows shape(launch, logits, "logits");
  Tensor parts = make<float>(logits, {3, shape.rows});
  for_type_of(launch, logits, "logits", [&](auto type) {
    using T = decltype(type);
    launch_cross_entropy_parts(launch, launch.read<T>(logits, logits.numel(), "logits"),
                               launch.read<int64_t>(targets, shape.rows, "targets"),
                               launch.write<float>(parts, 3 * shape.rows, "parts"), shape.rows, shape.columns);
  });
  return parts;
}

void cross_entropy_backward_(Tensor logits, const Tensor& maxima, const Tensor& log_sums, const Tensor& targets,
                             const Tensor& grad) {
  const Launch launch("cross_entropy_backward_", logits);
  launch.expect(logits.dim() == 2, "logits", "is not [N, V]");
  const Rows shape(launch, logits, "logits");
  launch.read<float>(maxima, shape.rows, "maxima");  // only checked: the reference needs it, these kernels do not
  for_type_of(launch, logits, "logits", [&](auto type) {
    using T = decltype(type);
    launch_cross_entropy_backward(launch, launch.write<T>(logits, logits.numel(), "logits"),
                                  launch.read<float>(log_sums, shape.rows, "log_sums"),
                                  launch.read<int64_t>(targets, shape.rows, "targets"),
                                  launch.read<float>(grad, shape.rows, "grad"), shape.rows, shape.columns);
  });
}

void adamw_(Tensor master, const Tensor& grad, Tensor first, Tensor second, Tensor published, Tensor step,
            const Tensor& divide_by, const Tensor& skip, double lr, double beta1, double beta2, double eps,
            double weight_decay) {
  const Launch launch("adamw_", master);
  const int64_t n = master.numel();
  Tensor common = make<float>(master, {static_cast<int64_t>(sizeof(Adam) / sizeof(float))});
  auto update = [&](auto gradient, auto low) {
    using G = decltype(gradient);
    using P = decltype(low);
    launch_adamw(launch, launch.write<float>(master, n, "master"), launch.read<G>(grad, n, "grad"),
                 launch.write<float>(first, n, "first"), launch.write<float>(second, n, "second"),
                 launch.write<P>(published, n, "published"), launch.write<float>(step, 1, "step"),
                 launch.read<float>(divide_by, 1, "divide_by"), launch.read<float>(skip, 1, "skip"),
                 AdamSettings{lr, beta1, beta2, eps, weight_decay},
                 reinterpret_cast<Adam*>(launch.write<float>(common, common.numel(), "common")), n);
  };
  for_type_of(launch, published, "published", [&](auto low) {
    if (grad.scalar_type() == ScalarType::Float)
      update(float{}, low);
    else
      update(low, low);
  });
}

Tensor sums_of_squares(std::vector<Tensor> flats) {
  STD_TORCH_CHECK(!flats.empty(), "megazero::sums_of_squares: expected at least one tensor");
  const Launch launch("sums_of_squares", flats[0]);
  const int64_t count = static_cast<int64_t>(flats.size());
  std::vector<const void*> at;
  std::vector<int64_t> numel;
  for (const Tensor& flat : flats) numel.push_back(flat.numel());
  const int64_t partials = square_partials(numel.data(), count);
  Tensor partial = make<double>(flats[0], {partials}), totals = make<double>(flats[0], {count});
  for_type_of(launch, flats[0], "flats", [&](auto type) {
    using T = decltype(type);
    for (const Tensor& flat : flats) at.push_back(launch.read<T>(flat, flat.numel(), "flats"));
    launch_sums_of_squares<T>(launch, at.data(), numel.data(), count,
                              launch.write<double>(partial, partials, "partial"),
                              launch.write<double>(totals, count, "totals"));
  });
  return totals;
}

void accumulate_(Tensor into, const Tensor& x) {
  const Launch launch("accumulate_", into);
  const int64_t n = into.numel();
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    launch_accumulate(launch, launch.write<float>(into, n, "into"), launch.read<T>(x, n, "x"), n);
  });
}

void cast_(Tensor into, const Tensor& x) {
  const Launch launch("cast_", into);
  const int64_t n = into.numel();
  for_type_of(launch, into, "into", [&](auto to) {
    for_type_of(launch, x, "x", [&](auto from) {
      using To = decltype(to);
      using From = decltype(from);
      launch_cast(launch, launch.write<To>(into, n, "into"), launch.read<From>(x, n, "x"), n);
    });
  });
}

void expect_codes(const Launch& launch, const Tensor& codes, int64_t n, int64_t bits) {
  launch.expect(bits == 8 || bits == 4, "bits", "are neither 8 nor 4");
  launch.expect(n % 16 == 0, "x", "has no multiple of 16 values");
  const int64_t blocks = divide_up<int64_t>(n, kQuantBlock);
  launch.expect(codes.numel() >= n * bits / 8 + 4 * blocks, "codes", "has too few bytes");
}

void quantize_(Tensor codes, const Tensor& x, int64_t bits) {
  const Launch launch("quantize_", codes);
  const int64_t n = x.numel();
  expect_codes(launch, codes, n, bits);
  for_type_of(launch, x, "x", [&](auto type) {
    using T = decltype(type);
    uint8_t* to = launch.write<uint8_t>(codes, codes.numel(), "codes");
    launch_quantize(launch, launch.read<T>(x, n, "x"), n, static_cast<int>(bits), to);
  });
}

void dequantize_(Tensor into, const Tensor& codes, int64_t bits, bool add) {
  const Launch launch("dequantize_", into);
  const int64_t n = into.numel();
  expect_codes(launch, codes, n, bits);
  for_type_of(launch, into, "into", [&](auto type) {
    using T = decltype(type);
    const uint8_t* from = launch.read<uint8_t>(codes, codes.numel(), "codes");
    launch_dequantize(launch, from, static_cast<int>(bits), add, launch.write<T>(into, n, "into"), n);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megazero, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("sum_rows_", TORCH_BOX(&sum_rows_));
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  m.impl("dropout_add", TORCH_BOX(&dropout_add));
  m.impl("dropout_backward", TORCH_BOX(&dropout_backward));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("cross_entropy_parts_", TORCH_BOX(&cross_entropy_parts_));
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
  m.impl("adamw_", TORCH_BOX(&adamw_));
  m.impl("sums_of_squares", TORCH_BOX(&sums_of_squares));
  m.impl("accumulate_", TORCH_BOX(&accumulate_));
  m.impl("cast_", TORCH_BOX(&cast_));
  m.impl("quantize_", TORCH_BOX(&quantize_));
  m.impl("dequantize_", TORCH_BOX(&dequantize_));
}

}  // namespace megazero::bindings
