// Fused operations on the CPU. Schemas: megazero/kernels/schema.py; specification: reference.py.
//
// Bound to torch through its stable ABI (no ATen or c10 headers: seconds to compile, and one binary serves several
// torch versions) and run on torch's own threads. The arithmetic is in cpu/*.h; this file turns tensors into pointers
// and divides the rows among the threads.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/activation.h"
#include "cpu/cross_entropy.h"
#include "cpu/dropout.h"
#include "cpu/flat.h"
#include "cpu/norm_binding.h"
#include "cpu/quantize.h"
#include "cpu/rotary.h"
#include "cpu/tensors.h"

namespace {

// Activations.

Tensor bias_gelu(const Tensor& x, const std::optional<Tensor>& bias) {
  const Rows rows(x);
  Tensor y = like(x);
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const T *px = input<T>(x, x.numel()), *pb = bias ? input<T>(*bias, rows.n) : nullptr;
    T* py = output<T>(y, x.numel());
    parallel_for(0, rows.count, rows.grain(), [&](int64_t begin, int64_t end) {
      const int64_t at = begin * rows.n;
      gelu_loop(px + at, pb, py + at, end - begin, rows.n);
    });
  });
  return y;
}

Two bias_gelu_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias) {
  const Rows rows(x);
  Two out = {like(x), sums_like(x, bias ? rows.n : 0)};
  auto& [dx, dbias] = out;
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const T *pg = input<T>(grad, x.numel()), *px = input<T>(x, x.numel());
    const T* pb = bias ? input<T>(*bias, rows.n) : nullptr;
    T* pd = output<T>(dx, x.numel());
    const auto work = [&](int64_t begin, int64_t end, float* sums) {
      const int64_t at = begin * rows.n;
      gelu_backward_loop(pg + at, px + at, pb, pd + at, end - begin, rows.n, sums);
    };
    if (bias)
      sum_columns<T>(rows.count, rows.n, {output<float>(dbias, rows.n)}, work);
    else
      parallel_for(0, rows.count, rows.grain(), [&](int64_t begin, int64_t end) { work(begin, end, nullptr); });
  });
  return out;
}

void sum_rows_(const Tensor& into, const Tensor& x, bool add) {
  const Rows rows(x);
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const T* px = input<T>(x, x.numel());
    const auto work = [&](int64_t begin, int64_t end, float* sums) {
      sum_rows_loop(px + begin * rows.n, end - begin, rows.n, sums);
    };
    sum_columns<T>(rows.count, rows.n, {output<float>(into, rows.n)}, work, add);
  });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  Tensor y = like(gate);
  const int64_t n = gate.numel();
  with_type(gate.scalar_type(), [&]<typename T>(T*) {
    const T *pg = input<T>(gate, n), *pu = input<T>(up, n);
    T* py = output<T>(y, n);
    parallel_for(0, n, kGrain, [&](int64_t b, int64_t e) { swiglu_loop(pg + b, pu + b, py + b, e - b); });
  });
  return y;
}

Two swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  Two out = {like(gate), like(gate)};
  const int64_t n = gate.numel();
  with_type(gate.scalar_type(), [&]<typename T>(T*) {
    const T *pd = input<T>(grad, n), *pg = input<T>(gate, n), *pu = input<T>(up, n);
    T *dgate = output<T>(std::get<0>(out), n), *dup = output<T>(std::get<1>(out), n);
    parallel_for(0, n, kGrain, [&](int64_t b, int64_t e) {
      swiglu_backward_loop(pd + b, pg + b, pu + b, dgate + b, dup + b, e - b);
    });
  });
  return out;
}

// Dropout. Rows are (position, sample) pairs, samples fastest.

Tensor dropout(const Tensor& x, const Tensor* residual, const Tensor& sample_ids, const Tensor& positions, int64_t key,
               double drop) {
  STD_TORCH_CHECK(x.dim() == 3, "expected [S, B, D]");
  STD_TORCH_CHECK(key >= 0 && key <= 0xFFFFFFFF, "expected a key of 32 bits");
  STD_TORCH_CHECK(drop >= 0 && drop < 1, "expected 0 <= drop < 1");
  const Rows rows(x);
  const int64_t batch = x.size(1);
  const int64_t *ids = input<int64_t>(sample_ids, batch), *at = input<int64_t>(positions, x.size(0));
  const Mask mask(key, drop);
  Tensor y = like(x);
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const T *px = input<T>(x, x.numel()), *pr = residual ? input<T>(*residual, x.numel()) : nullptr;
    T* py = output<T>(y, x.numel());
    parallel_for(0, rows.count, rows.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const uint32_t row = mask.row(ids[r % batch], at[r / batch]);
        const int64_t first = r * rows.n;
        if (pr)
          dropout_add_loop(mask, row, px + first, pr + first, py + first, rows.n);
        else
          dropout_loop(mask, row, px + first, py + first, rows.n);
      }
    });
  });
  return y;
}

Tensor dropout_add(const Tensor& x, const Tensor& residual, const Tensor& sample_ids, const Tensor& positions,
                   int64_t key, double drop) {
  return dropout(x, &residual, sample_ids, positions, key, drop);
}

Tensor dropout_backward(const Tensor& grad, const Tensor& sample_ids, const Tensor& positions, int64_t key,
                        double drop) {
  return dropout(grad, nullptr, sample_ids, positions, key, drop);
}

// Rotary positions.

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  STD_TORCH_CHECK(x.dim() == 4 && (x.stride(3) == 1 || x.size(3) == 1), "expected [S, B, H, d], d contiguous");
  const int64_t length = x.size(0), batch = x.size(1), heads = x.size(2), d = x.size(3);
  STD_TORCH_CHECK(d % 2 == 0, "expected an even number of channels");
  const int64_t each = cos.size(1) == 1 ? 1 : batch, s0 = x.stride(0), s1 = x.stride(1), s2 = x.stride(2);
  Tensor y = like(x);
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    STD_TORCH_CHECK(cos.scalar_type() == kDtype<T>, "expected tensors of one dtype");
    const T* px = static_cast<const T*>(x.const_data_ptr());
    const T *pc = input<T>(cos, length * each * d), *ps = input<T>(sin, length * each * d);
    T* py = output<T>(y, x.numel());
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(heads * d, 1));
    parallel_for(0, length * batch, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t s = r / batch, b = r % batch, angle = (s * each + (each == 1 ? 0 : b)) * d;
        rotary_loop(px + s * s0 + b * s1, s2, pc + angle, ps + angle, inverse ? -1.0f : 1.0f, py + r * heads * d, heads,
                    d / 2);
      }
    });
  });
  return y;
}

// The loss.

Tensor cross_entropy_parts_(const Tensor& logits, const Tensor& targets) {
  STD_TORCH_CHECK(logits.dim() == 2, "expected [N, V]");
  const int64_t rows = logits.size(0), n = logits.size(1);
  Tensor parts = torch::stable::new_empty(logits, {3, rows}, ScalarType::Float);
  float *maxima = output<float>(parts, 3 * rows), *sums = maxima + rows, *picked = sums + rows;
  const int64_t* at = input<int64_t>(targets, rows);
  with_type(logits.scalar_type(), [&]<typename T>(T*) {
    const T* p = input<T>(logits, rows * n);
    parallel_for(0, rows, Rows(logits).grain(), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        parts_loop(p + r * n, n, maxima + r, sums + r);
        picked[r] = at[r] >= 0 && at[r] < n ? wide(p[r * n + at[r]]) : -std::numeric_limits<float>::infinity();
      }
    });
  });
  return parts;
}

void cross_entropy_backward_(Tensor logits, const Tensor& maxima, const Tensor& log_sums, const Tensor& targets,
                             const Tensor& grad) {
  STD_TORCH_CHECK(logits.dim() == 2, "expected [N, V]");
  const int64_t rows = logits.size(0), n = logits.size(1);
  const float *sums = input<float>(log_sums, rows), *g = input<float>(grad, rows);
  const int64_t* at = input<int64_t>(targets, rows);
  with_type(logits.scalar_type(), [&]<typename T>(T*) {
    T* p = output<T>(logits, rows * n);
    parallel_for(0, rows, Rows(logits).grain(), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) cross_entropy_backward_loop(p + r * n, n, sums[r], at[r], g[r]);
    });
  });
}

// Flat memory.

void adamw_(Tensor master, const Tensor& grad, Tensor first, Tensor second, Tensor published, Tensor step,
            const Tensor& divide_by, const Tensor& skip, double lr, double beta1, double beta2, double eps,
            double weight_decay) {
  if (*input<float>(skip, 1) != 0.0f) return;
  const int64_t n = master.numel();
  float *p = output<float>(master, n), *m = output<float>(first, n), *v = output<float>(second, n);
  STD_TORCH_CHECK(published.scalar_type() != ScalarType::Float, "expected 16-bit parameters");
  STD_TORCH_CHECK(grad.scalar_type() == ScalarType::Float || grad.scalar_type() == published.scalar_type(),
                  "expected gradients in fp32 or as the parameters");
  input<float>(step, 1);
  const double updates = *input<float>(step, 1) + 1.0;
  const Adam a = {
      *input<float>(divide_by, 1),
      static_cast<float>(1 - lr * weight_decay),
      static_cast<float>(1 - beta1),
      static_cast<float>(beta2),
      static_cast<float>(1 - beta2),
      static_cast<float>(std::sqrt(1 - std::pow(beta2, updates))),
      static_cast<float>(eps),
      static_cast<float>(lr / (1 - std::pow(beta1, updates))),
  };
  const auto update = [&]<typename G, typename P>(const G* g, P* low) {
    parallel_for(0, n, kGrain, [&](int64_t b, int64_t e) {
      adamw_loop(a, p + b, g + b, m + b, v + b, low + b, e - b);
    });
  };
  with_type(published.scalar_type(), [&]<typename P>(P*) {
    if constexpr (!std::is_same_v<P, float>) {
      P* low = output<P>(published, n);
      if (grad.scalar_type() == ScalarType::Float)
        update(input<float>(grad, n), low);
      else
        update(input<P>(grad, n), low);
    }
  });
  *output<float>(step, 1) += 1.0f;
}

Tensor sums_of_squares(std::vector<Tensor> flats) {
  STD_TORCH_CHECK(!flats.empty(), "expected at least one tensor");
  const int64_t count = static_cast<int64_t>(flats.size());
  std::vector<int64_t> first(count + 1, 0);  // first block of each tensor; last entry: number of blocks
  for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + (flats[i].numel() + kBlock - 1) / kBlock;
  std::vector<double> partial(first[count]);
  with_type(flats[0].scalar_type(), [&]<typename T>(T*) {
    std::vector<const T*> at(count);
    for (int64_t i = 0; i < count; ++i) at[i] = input<T>(flats[i], flats[i].numel());
    parallel_for(0, first[count], 1, [&](int64_t begin, int64_t end) {
      int64_t i = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
      for (int64_t b = begin; b < end; ++b) {
        while (b >= first[i + 1]) ++i;
        const int64_t from = (b - first[i]) * kBlock;
        partial[b] = squares(at[i] + from, std::min(kBlock, flats[i].numel() - from));
      }
    });
  });
  Tensor totals = torch::stable::new_empty(flats[0], {count}, ScalarType::Double);
  double* total = output<double>(totals, count);
  for (int64_t i = 0; i < count; ++i) {
    total[i] = 0.0;
    for (int64_t b = first[i]; b < first[i + 1]; ++b) total[i] += partial[b];
  }
  return totals;
}

void accumulate_(Tensor into, const Tensor& x) {
  const int64_t n = into.numel();
  float* to = output<float>(into, n);
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const T* from = input<T>(x, n);
    parallel_for(0, n, kGrain, [&](int64_t b, int64_t e) { accumulate(to + b, from + b, e - b); });
  });
}

void cast_(Tensor into, const Tensor& x) {
  const int64_t n = into.numel();
  with_type(into.scalar_type(), [&]<typename To>(To*) {
    with_type(x.scalar_type(), [&]<typename From>(From*) {
      To* to = output<To>(into, n);
      const From* from = input<From>(x, n);
      parallel_for(0, n, kGrain, [&](int64_t b, int64_t e) { convert(to + b, from + b, e - b); });
    });
  });
}

// Quantised values: codes, then scales (base/quantized.py).

int64_t quantized_codes(const Tensor& codes, int64_t n, int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, "expected 8 or 4 bits");
  STD_TORCH_CHECK(n % 16 == 0, "expected a multiple of 16 values");
  const int64_t scales = n * bits / 8;
  STD_TORCH_CHECK(codes.numel() >= scales + 4 * ((n + kQuantBlock - 1) / kQuantBlock), "too few bytes for the codes");
  return scales;
}

void quantize_(Tensor codes, const Tensor& x, int64_t bits) {
  const int64_t n = x.numel(), behind = quantized_codes(codes, n, bits), blocks = (n + kQuantBlock - 1) / kQuantBlock;
  uint8_t* to = output<uint8_t>(codes, codes.numel());
  float* scales = reinterpret_cast<float*>(to + behind);
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const T* from = input<T>(x, n);
    parallel_for(0, blocks, kGrain / kQuantBlock, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = b * kQuantBlock, count = std::min(kQuantBlock, n - at);
        quantize_block(from + at, count, static_cast<int>(bits), to + at * bits / 8, scales + b);
      }
    });
  });
}

void dequantize_(Tensor into, const Tensor& codes, int64_t bits, bool add) {
  const int64_t n = into.numel(), behind = quantized_codes(codes, n, bits);
  const int64_t blocks = (n + kQuantBlock - 1) / kQuantBlock;
  const uint8_t* from = input<uint8_t>(codes, codes.numel());
  const float* scales = reinterpret_cast<const float*>(from + behind);
  with_type(into.scalar_type(), [&]<typename T>(T*) {
    T* to = output<T>(into, n);
    parallel_for(0, blocks, kGrain / kQuantBlock, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = b * kQuantBlock, count = std::min(kQuantBlock, n - at);
        const auto decode = [&](auto f) { f(from + at * bits / 8, scales[b], static_cast<int>(bits), to + at, count); };
        add ? decode([](auto... a) { add_dequantized_block(a...); }) : decode([](auto... a) { dequantize_block(a...); });
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megazero, CPU, m) {
#define IMPLEMENT(NAME) m.impl(#NAME, TORCH_BOX(&NAME))
  IMPLEMENT(layer_norm);
  IMPLEMENT(layer_norm_backward);
  IMPLEMENT(add_layer_norm);
  IMPLEMENT(add_layer_norm_backward);
  IMPLEMENT(rms_norm);
  IMPLEMENT(rms_norm_backward);
  IMPLEMENT(add_rms_norm);
  IMPLEMENT(add_rms_norm_backward);
  IMPLEMENT(bias_gelu);
  IMPLEMENT(bias_gelu_backward);
  IMPLEMENT(sum_rows_);
  IMPLEMENT(swiglu);
  IMPLEMENT(swiglu_backward);
  IMPLEMENT(dropout_add);
  IMPLEMENT(dropout_backward);
  IMPLEMENT(rotary);
  IMPLEMENT(cross_entropy_parts_);
  IMPLEMENT(cross_entropy_backward_);
  IMPLEMENT(adamw_);
  IMPLEMENT(sums_of_squares);
  IMPLEMENT(accumulate_);
  IMPLEMENT(cast_);
  IMPLEMENT(quantize_);
  IMPLEMENT(dequantize_);
#undef IMPLEMENT
}
