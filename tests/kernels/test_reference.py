"""The specifications against their formulas and torch's own autograd."""

import pytest
import torch
import torch.nn.functional as F

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
    found = ops.layer_norm_backward(grad, x.detach(), mean, rstd, *inputs[1:])
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(found, (x.grad, weight.grad, bias.grad), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("biased", [True, False])
def test_bias_gelu_is_the_tanh_form(biased: bool) -> None:
    x, bias, grad = doubles(N, D) * 3, doubles(D, seed=1) if biased else None, doubles(N, D, seed=2)
    v = (x if bias is None else x + bias).requires_grad_()
    expected = 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)))
    expected.backward(grad)
    assert torch.allclose(ops.bias_gelu(x, bias), expected, rtol=1e-12, atol=1e-14)
    assert torch.allclose(ops.bias_gelu_backward(grad, x, bias), v.grad, rtol=1e-11, atol=1e-13)


def test_rotation_is_a_complex_product() -> None:
    x, angles = doubles(5, 2, 3, 8), doubles(5, 1, 1, 4, seed=1)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    both = torch.cat((angles, angles), -1)
    found = ops.rotate(x, both.cos(), both.sin())
    assert torch.allclose(found, torch.cat((pairs.real, pairs.imag), -1), rtol=1e-13, atol=1e-14)


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
        found = []
        for work, part, t in zip(works, parts, local, strict=True):
            losses, scales = ops.cross_entropy_merge(torch.stack(parts), part[0])
            assert torch.allclose(losses, expected, rtol=1e-12, atol=1e-12)
            found.append(ops.cross_entropy_backward_(work, scales, t, grad))
            assert found[-1].data_ptr() == work.data_ptr()  # in place: no second matrix of the vocabulary's size
        assert torch.allclose(torch.cat(found, dim=1), logits.grad, rtol=1e-10, atol=1e-13)


def test_cross_entropy_of_a_part_that_is_all_padding() -> None:
    logits, targets = doubles(5, 6), torch.tensor([0, 5, 2, 3, 1])
    expected = F.cross_entropy(logits, targets, reduction="none")
    padding = torch.full((5, 3), -torch.inf, dtype=torch.float64)
    parts = [ops.cross_entropy_parts_(logits.clone(), targets), ops.cross_entropy_parts_(padding, targets - 6)]
    losses, scales = ops.cross_entropy_merge(torch.stack(parts), parts[1][0])
    assert torch.allclose(losses, expected, rtol=1e-13)
    assert torch.equal(
        ops.cross_entropy_backward_(padding, scales, targets - 6, torch.ones(5).double()), 0 * logits[:, :3]
    )


def test_sum_of_squares_does_not_depend_on_the_cut() -> None:
    flat = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 1e-3
    whole = ops.sum_of_squares(flat)
    assert whole.dtype == torch.float64
    assert abs(whole - flat.double().square().sum()) <= 1e-14 * whole
    for shards in (2, 3, 4):
        parts = sum(ops.sum_of_squares(part) for part in flat.tensor_split(shards))
        assert parts.float().sqrt() == whole.float().sqrt()


def test_dropout_add() -> None:
    x, residual, keep = doubles(4, 3), doubles(4, 3, seed=1), torch.tensor([True, False, True])
    expected = residual + torch.where(keep, x / 0.75, 0.0)
    assert torch.allclose(ops.dropout_add(x, residual, keep, 0.25), expected, rtol=1e-15, atol=1e-15)


def test_swiglu() -> None:
    gate, up = doubles(N, D), doubles(N, D, seed=1)
    assert torch.allclose(ops.swiglu(gate, up), gate / (1 + (-gate).exp()) * up, rtol=1e-13, atol=1e-15)
