"""Attention: inside documents against the masked specification, what it builds, and rotary angles computed once."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.model.attention import Attention
from megazero.model.documents import Documents
from megazero.model.transformer import Shape
from megazero.plan.model import Kind
from megazero.tools.certify.tolerances import GRADIENT_FP32, GRADIENT_FP64, difference
from tests.model.small import GPT, LLAMA, batch, make, step_of

CPU = torch.device("cpu")
Lengths = tuple[tuple[int, ...], ...]
WINDOWS: dict[str, Lengths] = {
    "uneven": ((5, 1, 10), (16,), (7, 9)),
    "tiny": ((1,) * 16, (2,) * 8, (1, 3) * 4),
    "whole": ((16,), (16,), (16,)),
}


def positions_of(lengths: Lengths) -> Tensor:
    """Positions [S, B] that restart with each document."""
    return torch.stack([torch.cat([torch.arange(n) for n in of]) for of in lengths], dim=1)


def specified(attention: Attention, qkv: Tensor, lengths: Lengths) -> Tensor:
    """Attention with a mask: softmax over all scores, of which those of other documents and later tokens are none."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in attention._heads(qkv, positions_of(lengths)))
    k, v = (x.repeat_interleave(attention.queries_per_group, dim=1) for x in (k, v))
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(of)), torch.tensor(of)) for of in lengths])
    sees = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    scores = (q @ k.mT / attention.head_dim**0.5).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def projection(attention: Attention, length: int, rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(length, rows, len(attention.qkv.weight), generator=generator).to(dtype).requires_grad_()


def results(compute, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of an uneven sum of it."""
    y = compute(qkv)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    (grad,) = torch.autograd.grad((y * weights).sum(), qkv)
    return y.detach(), grad


SHAPES = {"gpt": GPT, "llama": LLAMA, "gpt-rotary": replace(GPT, position="rotary")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_documents_are_the_masked_specification(shape: str, window: str, dtype: torch.dtype) -> None:
    attention, lengths = make(SHAPES[shape], dtype).blocks[0].attention, WINDOWS[window]
    step = step_of(len(lengths)).within_documents(positions_of(lengths), lengths)
    qkv = projection(attention, 16, len(lengths), dtype)
    found = results(lambda x: attention.core(x, step), qkv)
    expected = results(lambda x: specified(attention, x, lengths), qkv)
    tolerance = GRADIENT_FP64 if dtype == torch.float64 else GRADIENT_FP32
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) <= tolerance


def stand_in(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None, scale: float) -> Tensor:
    """torch's kernel, computed document by document."""
    sizes = bounds.diff().tolist()
    assert bounds.dtype == torch.int32 and longest == max(sizes) and sum(sizes) == len(q) == len(k)
    found = []
    for part in zip(*(x.split(sizes) for x in (q, k, v)), strict=True):
        places = torch.arange(len(part[0]))
        behind = places[:, None] - places
        sees = (behind >= 0) & (behind < (window or len(places)))
        options = {"attn_mask": sees, "enable_gqa": q.shape[1] != k.shape[1], "scale": scale}
        found.append(F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), **options).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("documents", [False, True])
def test_variable_lengths_get_windows(documents: bool) -> None:
    """As on a GPU, also where each sample is one document."""
    attention = make(replace(LLAMA, kinds=(Kind(5),), attention_scale=0.7), torch.float64).blocks[0].attention
    lengths, step = WINDOWS["uneven"], step_of(len(WINDOWS["uneven"]))
    if documents:
        step = step.within_documents(positions_of(lengths), lengths)
    qkv = projection(attention, 16, len(lengths), torch.float64)
    expected = results(lambda x: attention.core(x, step), qkv)
    attention.variable_length = stand_in
    for one, other in zip(results(lambda x: attention.core(x, step), qkv), expected, strict=True):
        assert difference(one, other) <= GRADIENT_FP64


@pytest.mark.parametrize("shape", SHAPES)
def test_variable_lengths_get_documents_one_after_the_other(shape: str) -> None:
    """The way of a GPU: torch's kernel has a stand-in here."""
    attention, lengths = make(SHAPES[shape], torch.float64).blocks[0].attention, WINDOWS["uneven"]
    step = step_of(len(lengths)).within_documents(positions_of(lengths), lengths)
    qkv = projection(attention, 16, len(lengths), torch.float64)
    expected = results(lambda x: attention.core(x, step), qkv)
    attention.variable_length = stand_in
    for one, other in zip(results(lambda x: attention.core(x, step), qkv), expected, strict=True):
        assert difference(one, other) <= GRADIENT_FP64


def test_repeated_keys_are_grouped_queries() -> None:
    attention = make(LLAMA, torch.float64).blocks[0].attention
    qkv = projection(attention, 16, 2, torch.float64)
    expected = results(lambda x: attention.core(x, step_of(2)), qkv)
    attention.repeats = True
    for one, other in zip(results(lambda x: attention.core(x, step_of(2)), qkv), expected, strict=True):
        assert difference(one, other) <= GRADIENT_FP64


class Seen(TorchDispatchMode):
    """The most elements of a tensor, and how often each operation was called."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.calls = 0, list[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append(function.name())
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.numel())
        return result


def deep(shape: Shape, length: int) -> Shape:
    return replace(shape, seq_len=length, hidden=8, heads=1, kv_heads=1, ffn=8, vocab=8)


def seen(shape: Shape, lengths: tuple[int, ...] | None) -> Seen:
    model, step = make(shape, torch.float32), step_of(1)
    if lengths is not None:
        step = step.within_documents(positions_of((lengths,)), (lengths,))
    with Seen() as counted:
        model.losses(*batch(shape, 1), step).sum().backward()
    return counted


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_nothing_is_as_large_as_a_mask(shape: Shape) -> None:
    """Of 512 tokens it would have 512^2 elements; what there is grows as the sequence."""
    most = [seen(deep(shape, length), (length // 2, length // 2)).most for length in (256, 512)]
    assert most[1] == 2 * most[0] < 512 * 512 / 4


def test_documents_of_one_length_are_one_call() -> None:
    def calls(lengths: tuple[int, ...]) -> int:
        names = seen(replace(deep(GPT, 512), layers=1), lengths).calls
        return sum("attention" in name and "backward" not in name for name in names)

    assert calls((4,) * 128) == calls((512,)) == 1 and calls((4, 4, 8) * 32) == 2


def test_angles_are_computed_once() -> None:
    """Not in each layer, nor for each micro-batch."""
    model = make(deep(replace(LLAMA, layers=4), 32), torch.float32)
    with Seen() as counted:
        for lengths in (None, (32,), (20, 12)):
            step = step_of(1)
            if lengths is not None:
                step = step.within_documents(positions_of((lengths,)), (lengths,))
            model.losses(*batch(model.shape, 1), step).sum().backward()
    assert counted.calls.count("aten::cos") == counted.calls.count("aten::sin") == 1


def test_angles_of_documents_are_put_in_place_once_a_micro_batch() -> None:
    rotary = make(LLAMA, torch.float64).rotaries[0]
    assert rotary is not None
    like = torch.zeros(16, 2, 1, 12, dtype=torch.float64)
    positions = positions_of(((5, 11), (16,)))
    cos, sin = rotary.angles(positions, like)
    assert rotary.angles(positions, like)[0] is cos
    for plain, placed in zip(rotary.angles(None, like), (cos, sin), strict=True):
        assert placed.shape == (16, 2, 1, 12) and torch.equal(placed[:, 1], plain[:, 0])
        assert torch.equal(placed[5:, 0], plain[:11, 0])
    other = positions_of(((16,), (16,)))
    assert torch.equal(rotary.angles(other, like)[0], rotary.angles(None, like)[0].expand(-1, 2, -1, -1))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=4))
def test_every_token_has_one_place(drawn: list[list[int]]) -> None:
    """Whatever the documents: applied to the tokens' numbers, position by position and document by document."""
    longest = max(sum(of) for of in drawn)
    lengths = tuple(tuple([*of, longest - sum(of)] if longest > sum(of) else of) for of in drawn)
    documents = Documents(lengths, CPU)
    tokens = torch.arange(longest * len(lengths)).view(longest, len(lengths))
    firsts = {int(tokens[s, b]) for b, of in enumerate(lengths) for s in accumulate((0, *of[:-1]))}

    def check(x_LND: Tensor) -> Tensor:
        assert set(x_LND[0, :, 0].tolist()) <= firsts
        assert torch.equal(x_LND.diff(dim=0), torch.full_like(x_LND[1:], len(lengths)))
        return -x_LND

    assert torch.equal(documents.attend(check, tokens[..., None].double()).squeeze(-1), -tokens.double())
    assert sum(length * count for length, count in documents.groups) == tokens.numel()
    assert len(documents.groups) <= (2 * tokens.numel()) ** 0.5
    assert documents.bounds.tolist() == [0, *accumulate(n for of in lengths for n in of)]
