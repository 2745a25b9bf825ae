// The eight norm operations on tensors: `norm` does the four forwards, `norm_backward` the four backwards.

#pragma once

#include "norm.h"
#include "tensors.h"

namespace {

template <typename T>
std::vector<float> widened(const Tensor& weight, int64_t n, double offset) {
  const T* p = input<T>(weight, n);
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = wide(p[element_at<T>(i, n)]) + static_cast<float>(offset);  // in the order of `place`
  return values;
}

// `residual`, `total`, `bias` and `mean` may be null.

void norm(const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor* bias, double eps, double offset,
          bool twice, const Tensor* total, const Tensor& y, const Tensor* mean, const Tensor& rstd) {
  const Rows rows(x);
  const int64_t all = x.numel();
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const auto weights = widened<T>(weight, rows.n, offset);
    const auto biases = bias ? widened<T>(*bias, rows.n, 0.0) : std::vector<float>();
    const Norm<T> a = {
        input<T>(x, all),
        residual ? input<T>(*residual, all) : nullptr,
        weights.data(),
        biases.data(),
        static_cast<float>(eps),
        twice,
        total ? output<T>(*total, all) : nullptr,
        output<T>(y, all),
        mean ? output<float>(*mean, rows.count) : nullptr,
        output<float>(rstd, rows.count),
        rows.n,
    };
    parallel_for(0, rows.count, rows.grain(), [&](int64_t begin, int64_t end) {
      if (mean)
        residual ? add_layer_norm_loop(a, begin, end) : layer_norm_loop(a, begin, end);
      else
        residual ? add_rms_norm_loop(a, begin, end) : rms_norm_loop(a, begin, end);
    });
  });
}

Three layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, double offset) {
  Three out = {like(x), statistic(x), statistic(x)};
  norm(x, nullptr, weight, &bias, eps, offset, false, nullptr, std::get<0>(out), &std::get<1>(out), std::get<2>(out));
  return out;
}

Four add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, double eps,
                    double offset) {
  Four out = {like(x), like(x), statistic(x), statistic(x)};
  auto& [total, y, mean, rstd] = out;
  norm(x, &residual, weight, &bias, eps, offset, false, &total, y, &mean, rstd);
  return out;
}

Two rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset, bool twice) {
  Two out = {like(x), statistic(x)};
  norm(x, nullptr, weight, nullptr, eps, offset, twice, nullptr, std::get<0>(out), nullptr, std::get<1>(out));
  return out;
}

Three add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset,
                   bool twice) {
  Three out = {like(x), like(x), statistic(x)};
  auto& [total, y, rrms] = out;
  norm(x, &residual, weight, nullptr, eps, offset, twice, &total, y, nullptr, rrms);
  return out;
}

// LayerNorm's backward with `mean`, RMSNorm's without; with `grad_total`, the backward of a norm after a residual sum.
Three norm_backward(const Tensor& grad, const Tensor* grad_total, const Tensor& x, const Tensor* mean,
                    const Tensor& rstd, const Tensor& weight, double offset) {
  const Rows rows(x);
  const int64_t all = x.numel(), n = rows.n;
  Three out = {like(x), sums_like(weight, n), sums_like(weight, mean ? n : 0)};
  auto& [dx, dweight, dbias] = out;
  std::vector<float*> sums = {output<float>(dweight, n)};
  if (mean) sums.push_back(output<float>(dbias, n));
  with_type(x.scalar_type(), [&]<typename T>(T*) {
    const auto weights = widened<T>(weight, n, offset);
    const NormBackward<T> a = {
        input<T>(grad, all),
        grad_total ? input<T>(*grad_total, all) : nullptr,
        input<T>(x, all),
        weights.data(),
        mean ? input<float>(*mean, rows.count) : nullptr,
        input<float>(rstd, rows.count),
        output<T>(dx, all),
        n,
    };
    sum_columns<T>(rows.count, n, sums, [&](int64_t begin, int64_t end, float* dw) {
      float* db = dw + n;
      if (mean)
        grad_total ? add_layer_norm_backward_loop(a, begin, end, dw, db)
                   : layer_norm_backward_loop(a, begin, end, dw, db);
      else
        grad_total ? add_rms_norm_backward_loop(a, begin, end, dw, db) : rms_norm_backward_loop(a, begin, end, dw, db);
    });
  });
  return out;
}

Three layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                          const Tensor& weight, double offset) {
  return norm_backward(grad, nullptr, x, &mean, rstd, weight, offset);
}

Three add_layer_norm_backward(const Tensor& grad, const Tensor& grad_total, const Tensor& total, const Tensor& mean,
                              const Tensor& rstd, const Tensor& weight, double offset) {
  return norm_backward(grad, &grad_total, total, &mean, rstd, weight, offset);
}

Two rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rrms, const Tensor& weight, double offset) {
  auto [dx, dweight, unused] = norm_backward(grad, nullptr, x, nullptr, rrms, weight, offset);
  return {dx, dweight};
}

Two add_rms_norm_backward(const Tensor& grad, const Tensor& grad_total, const Tensor& total, const Tensor& rrms,
                          const Tensor& weight, double offset) {
  auto [dx, dweight, unused] = norm_backward(grad, &grad_total, total, nullptr, rrms, weight, offset);
  return {dx, dweight};
}

}  // namespace
