"""The specifications against their formulas and torch's own autograd."""

import pytest
import torch
import torch.nn.functional as F

from megazero.kernels import counter
from megazero.kernels import reference as ops

N, D = 7, 12


def doubles(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_and_its_gradients() -> None:
    x, weight, grad = doubles(N, D).requires_grad_(), doubles(D, seed=1).requires_grad_(), doubles(N, D, seed=2)
    expected = F.rms_norm(x, [D], weight, 1e-6)
    expected.backward(grad)
    y, rrms = ops.rms_norm(x.detach(), weight.detach(), 1e-6)
    grad_x, grad_weight = ops.rms_norm_backward(grad, x.detach(), rrms, weight.detach())
    assert torch.allclose(y, expected, rtol=1e-13, atol=1e-13)
    assert torch.allclose(grad_x, x.grad, rtol=1e-12, atol=1e-13)
    assert torch.allclose(grad_weight, weight.grad, rtol=1e-12, atol=1e-13)


def test_layer_norm_and_its_gradients() -> None:
    x, weight, bias = doubles(N, D).requires_grad_(), doubles(D, seed=1).requires_grad_(), doubles(D, seed=2)
    grad = doubles(N, D, seed=3)
    bias.requires_grad_()
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * weight + bias
    expected.backward(grad)
    inputs = (x.detach(), weight.detach(), bias.detach())
    y, mean, rstd = ops.layer_norm(*inputs, 1e-5)
    found = ops.layer_norm_backward(grad, x.detach(), mean, rstd, inputs[1])
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(found, (x.grad, weight.grad, bias.grad), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norms_that_add(norm: str) -> None:
    """Against the sum and the norm one after the other, with the sum used elsewhere too."""
    x, residual = doubles(N, D).requires_grad_(), doubles(N, D, seed=1).requires_grad_()
    weights = [doubles(D, seed=2).requires_grad_(), doubles(D, seed=3).requires_grad_()]
    weights = weights if norm == "layer_norm" else weights[:1]
    grad, grad_total = doubles(N, D, seed=4), doubles(N, D, seed=5)
    total = x + residual
    apply = {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm}[norm]
    expected = apply(total, [D], *weights, eps=1e-5)
    torch.autograd.backward((expected, total), (grad, grad_total))
    plain = [weight.detach() for weight in weights]
    found, y, *statistics = getattr(ops, f"add_{norm}")(x.detach(), residual.detach(), *plain, 1e-5)
    assert torch.equal(found, total) and torch.allclose(y, expected, rtol=1e-13, atol=1e-13)
    gradients = getattr(ops, f"add_{norm}_backward")(grad, grad_total, found, *statistics, plain[0])
    for mine, theirs in zip(gradients, (x.grad, *(weight.grad for weight in weights)), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bits_are_wide(dtype: torch.dtype) -> None:
    """To fp32's accuracy, not to that of what they are the statistics of."""
    x, weight = doubles(N, 1000).to(dtype) + 3, doubles(1000, seed=1).to(dtype)
    y, mean, rstd = ops.layer_norm(x, weight, weight, 1e-5)
    assert (y.dtype, mean.dtype, rstd.dtype) == (dtype, torch.float32, torch.float32)
    assert torch.allclose(mean.double(), x.double().mean(-1, keepdim=True), rtol=1e-6)
    assert torch.allclose(rstd.double(), (x.double().var(-1, keepdim=True, correction=0) + 1e-5).rsqrt(), rtol=1e-5)


@pytest.mark.parametrize("biased", [True, False])
def test_bias_gelu_and_its_gradient(biased: bool) -> None:
    x, bias, grad = doubles(N, D) * 3, doubles(D, seed=1) if biased else None, doubles(N, D, seed=2)
    v = (x if bias is None else x + bias).requires_grad_()
    expected = 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)))
    expected.backward(grad)
    assert torch.allclose(ops.bias_gelu(x, bias), expected, rtol=1e-12, atol=1e-14)
    grad_x, grad_bias = ops.bias_gelu_backward(grad, x, bias)
    assert torch.allclose(grad_x, v.grad, rtol=1e-11, atol=1e-13)
    assert torch.allclose(grad_bias, v.grad.sum(0), rtol=1e-11, atol=1e-13) if biased else grad_bias.shape == (0,)


def test_rotation_is_a_complex_product() -> None:
    """And the inverse, its backward, is the product with the conjugate."""
    x, angles = doubles(5, 2, 3, 8), doubles(5, 1, 1, 4, seed=1)
    both = torch.cat((angles, angles), -1)
    for inverse, sign in ((False, 1), (True, -1)):
        pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), sign * angles)
        found = ops.rotary(x, both.cos(), both.sin(), inverse)
        assert torch.allclose(found, torch.cat((pairs.real, pairs.imag), -1), rtol=1e-13, atol=1e-14)
    x.requires_grad_()
    ops.rotary(x, both.cos(), both.sin(), False).backward(grad := doubles(5, 2, 3, 8, seed=2))
    assert torch.allclose(ops.rotary(grad, both.cos(), both.sin(), True), x.grad, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("rows", [1, 40, 300])  # 300 rows of 1,000 do not fit one slice
@pytest.mark.parametrize("scale", [1.0, 1e4])  # exponentials of 1e4 would overflow
def test_cross_entropy_and_its_gradient(rows: int, scale: float) -> None:
    logits = (doubles(rows, 1000) * scale).requires_grad_()
    targets = torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(1))
    grad = doubles(rows, seed=2)
    expected = F.cross_entropy(logits, targets, reduction="none")
    expected.backward(grad)
    for cuts in ([1000], [400, 600], [1, 998, 1]):
        works = [part.contiguous() for part in logits.detach().clone().split(cuts, dim=1)]
        local = [targets - sum(cuts[:i]) for i in range(len(cuts))]
        parts = [ops.cross_entropy_parts_(work, t) for work, t in zip(works, local, strict=True)]
        for work, part, t in zip(works, parts, local, strict=True):
            losses, log_sums = ops.cross_entropy_merge(torch.stack(parts))
            assert torch.allclose(losses, expected, rtol=1e-12, atol=1e-12)
            ops.cross_entropy_backward_(work, part[0], log_sums, t, grad)
        assert torch.allclose(torch.cat(works, dim=1), logits.grad, rtol=1e-10, atol=1e-13)


def test_cross_entropy_of_a_part_that_is_all_padding() -> None:
    logits, targets = doubles(5, 6), torch.tensor([0, 5, 2, 3, 1])
    expected = F.cross_entropy(logits, targets, reduction="none")
    padding = torch.full((5, 3), -torch.inf, dtype=torch.float64)
    parts = [ops.cross_entropy_parts_(logits.clone(), targets), ops.cross_entropy_parts_(padding, targets - 6)]
    losses, log_sums = ops.cross_entropy_merge(torch.stack(parts))
    assert torch.allclose(losses, expected, rtol=1e-13)
    ops.cross_entropy_backward_(padding, parts[1][0], log_sums, targets - 6, torch.ones(5).double())
    assert not padding.any()


def test_sums_of_squares_do_not_depend_on_the_cut() -> None:
    flat = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 1e-3
    (whole,) = ops.sums_of_squares([flat])
    assert whole.dtype == torch.float64
    assert abs(whole - flat.double().square().sum()) <= 1e-14 * whole
    for shards in (2, 3, 4):
        parts = ops.sums_of_squares(flat.tensor_split(shards)).sum()
        assert parts.float().sqrt() == whole.float().sqrt()


def test_dropout_add_and_its_gradients() -> None:
    x, residual = doubles(4, 3, D).requires_grad_(), doubles(4, 3, D, seed=1).requires_grad_()
    grad = doubles(4, 3, D, seed=3)
    where = (torch.tensor([5, 0, 1 << 40]), torch.arange(9, 13), 0xFEDCBA98, 0.25)
    keep = counter.keep_mask(where[2], where[0], where[1], torch.arange(D), 0.25)
    expected = residual + torch.where(keep, x / 0.75, 0.0)
    expected.backward(grad)
    found = ops.dropout_add(x.detach(), residual.detach(), *where)
    assert 0.6 < keep.float().mean() < 0.9
    assert torch.allclose(found, expected, rtol=1e-15, atol=1e-15)
    assert torch.allclose(ops.dropout_backward(grad, *where), x.grad, rtol=1e-15, atol=1e-15)


def test_swiglu_and_its_gradients() -> None:
    gate, up = doubles(N, D).requires_grad_(), doubles(N, D, seed=1).requires_grad_()
    grad = doubles(N, D, seed=2)
    expected = gate / (1 + (-gate).exp()) * up
    expected.backward(grad)
    assert torch.allclose(ops.swiglu(gate.detach(), up.detach()), expected, rtol=1e-13, atol=1e-15)
    for mine, theirs in zip(ops.swiglu_backward(grad, gate.detach(), up.detach()), (gate.grad, up.grad), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-14)


def test_adamw_is_torch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    masters, gradients, first, second = torch.randn(4, 300, generator=generator, dtype=torch.float64).unbind()
    second = second.square()
    published, step = torch.empty(300, dtype=torch.bfloat16), torch.tensor(7.0)
    parameter = torch.nn.Parameter(masters.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.state[parameter] = {"step": step.clone(), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    parameter.grad = gradients / 4
    optimizer.step()
    go = (torch.tensor(4.0), torch.tensor(0.0))
    ops.adamw_(masters, gradients, first, second, published, step, *go, 1e-3, 0.9, 0.95, 1e-8, 0.1)
    assert torch.allclose(masters, parameter, rtol=1e-13) and step == 8
    assert torch.equal(published, masters.bfloat16())


def test_flat_operations() -> None:
    into, x = doubles(D).float(), doubles(D, seed=1)
    expected, narrow = into + x.bfloat16(), torch.empty(D, dtype=torch.bfloat16)
    ops.accumulate_(into, x.bfloat16())
    ops.cast_(narrow, x)
    assert torch.equal(into, expected) and torch.equal(narrow, x.bfloat16())
