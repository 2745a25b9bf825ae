"""Every option of the model against the certificate's plain model: token losses and all gradients, in one process and
on tensor ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Grid
from megazero.config.schema import Config, resolved
from megazero.kernels.select import choose
from megazero.model.parameter import declaration_of
from megazero.plan.model import Kind, Rope, Shape
from megazero.tools.certify.plain_model import Text, losses
from megazero.tools.certify.tolerances import difference
from tests.layouts import model_options
from tests.model.small import GPT, LLAMA, batch, make, step_of
from tests.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
YARN = Rope(kind="yarn", factor=4.0, original=8, beta_fast=1.5, beta_slow=0.1)
LONG = Rope(kind="longrope", factor=2.0, original=8, short=(1.0,) * 6, long=(1.0, 1.5, 2.0, 2.5, 3.0, 4.0))


def llama(**options: Any) -> Shape:
    return replace(LLAMA, **options)


def ropes(*ropes: Rope | None) -> Shape:
    return llama(kinds=tuple(Kind(rope=rope) for rope in ropes))


CASES = {
    "gpt": GPT,
    "llama": LLAMA,
    "head-dim": llama(head_size=20),
    "one-key": llama(kv_heads=1, qk_norm="head"),
    "biases": llama(biases=frozenset(("qkv", "out", "mlp"))),
    "qkv-bias": llama(biases=frozenset(("qkv",))),
    "no-bias": replace(GPT, biases=frozenset(("norm",))),
    "post": llama(norm_place="post"),
    "sandwich": replace(GPT, norm_place="sandwich"),
    "parallel": replace(GPT, residual="parallel"),
    "parallel-shared": llama(residual="parallel_shared"),
    "qk-norm": llama(qk_norm="head"),
    "qk-norm-after": llama(qk_norm="head", qk_norm_at="after"),
    "window": llama(kinds=(Kind(5), Kind())),
    "window-gpt": replace(GPT, kinds=(Kind(1), Kind(7))),
    "no-positions": ropes(Rope(), None),
    "two-thetas": ropes(Rope(100.0), Rope(10000.0)),
    "share": ropes(Rope(share=0.5)),
    "linear": ropes(Rope(kind="linear", factor=4.0)),
    "ntk": ropes(Rope(kind="ntk", alpha=8.0)),
    "llama3": ropes(Rope(kind="llama3", factor=8.0, original=8, theta=100.0)),
    "yarn": ropes(YARN),
    "yarn-not-truncated": ropes(replace(YARN, truncate=False, mscale=0.7, mscale_all=0.4)),
    "yarn-factor": ropes(replace(YARN, attention_factor=1.3)),
    "longrope": ropes(LONG),
    "longrope-short": ropes(replace(LONG, original=64)),
    "attention-scale": llama(attention_scale=0.3),
    "scales": llama(embedding_scale=6.9, residual_scale=0.22, logit_scale=0.125),
    "attention-cap": llama(attention_cap=2.0),
    "logit-cap": llama(logit_cap=1.5, logit_scale=3.0),
    "norm-offset": llama(norm_offset=1, qk_norm="head"),
    "norm-offset-gpt": replace(GPT, norm_offset=1),
    "norm-cast": llama(norm_cast="after"),
    "norm-bias": replace(GPT, biases=frozenset(("qkv", "out", "mlp"))),
    "gelu-erf": replace(GPT, activation="gelu_erf"),
    "relu2": replace(GPT, activation="relu2", biases=frozenset(("norm",))),
    "geglu": llama(activation="geglu"),
    "qk-norm-full": llama(qk_norm="full"),
    "qk-norm-full-after": llama(qk_norm="full", qk_norm_at="after", norm_offset=1),
    "query-scale": llama(query_scale=(0.3, 4)),
    "z-loss": llama(z_loss=0.01, logit_cap=3.0),
    "capped-window": llama(attention_cap=2.0, kinds=(Kind(4), Kind())),
}


def texts(shape: Shape, rows: int, lengths: tuple[int, ...] | None) -> tuple[Text, Any]:
    """Samples for the plain model, and the context for ours."""
    tokens, targets, valid = (each.T for each in batch(shape, rows))
    step, length = step_of(rows), shape.seq_len
    of = torch.zeros(length, dtype=torch.long)
    if lengths is not None:
        of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = torch.cat([torch.arange(each) for each in lengths])
        step = step.within_documents(positions[:, None].expand(-1, rows), (lengths,) * rows)
    else:
        positions = torch.arange(length)
    sees = (of[:, None] == of).tril().expand(rows, -1, -1)
    return Text(torch.arange(rows), tokens, targets, valid, positions.expand(rows, -1), sees), step


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Random values for every parameter, also for norms and biases, whose initial values would hide a mistake."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, parameter in model.named_parameters():
        shape = declaration_of(parameter).shape
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[name] = 1 + 0.3 * values if name.endswith("norm.weight") else 0.2 * values
    return found


def expected(shape: Shape, weights: dict[str, Tensor], text: Text) -> tuple[Tensor, dict[str, Tensor]]:
    own = {name: value.clone().requires_grad_() for name, value in weights.items()}
    m = resolved(Config.model_validate({"model": model_options(shape)})).model
    found = losses(own, m, text, lambda x, layer, site: x) * text.valid
    found.sum().backward()
    return found.detach().T, {name: value.grad for name, value in own.items() if value.grad is not None}


def part(value: Tensor, like: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    declaration = declaration_of(parameter)
    if not declaration.split:
        return value
    return value[declaration.first_row : declaration.first_row + len(like)]


def compare(shape: Shape, dtype: torch.dtype, grid: Grid | None, lengths: tuple[int, ...] | None, kernels: str) -> None:
    how = {} if grid is None else {"tensor": grid["tensor"]}
    model = make(shape, dtype, ops=choose(kernels, torch.device("cpu"), dtype), **how)
    weights = weights_of(model)
    text, step = texts(shape, 3, lengths)
    theirs, gradients = expected(shape, weights, text)
    assert weights.keys() == gradients.keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part(weights[name], parameter, parameter))
    found = model.losses(text.tokens.T, text.targets.T, text.valid.T, step)
    found.sum().backward()
    assert difference(found.detach(), theirs) < TOLERANCE[dtype]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        mine = parameter.grad
        if grid is not None and declaration_of(parameter).partial:
            mine = all_reduce(mine.clone(), grid["tensor"], "test")
        assert difference(mine, part(gradients[name], mine, parameter)) < TOLERANCE[dtype], name


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_plain_model_s(case: str) -> None:
    for lengths in (None, (3, 9, 4)):
        compare(CASES[case], torch.float64, None, lengths, "reference")
    compare(CASES[case], torch.float32, None, None, "auto")


def on_ranks(grid: Grid, cases: dict[str, Shape]) -> None:
    for case, shape in cases.items():
        try:
            compare(replace(shape, vocab=96), torch.float64, grid, (3, 9, 4), "reference")
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_tensor_ranks_give_the_plain_model_s() -> None:
    run_ranks(2, on_ranks, CASES, tensor=2)


def test_four_ranks_share_key_value_heads() -> None:
    """In parts that begin and end inside heads."""
    shapes = {(1, 12): 4, (2, 10): 4, (2, 6): 8, (1, 14): 4}
    cases = {
        str(each): llama(kv_heads=each[0], head_size=each[1], heads=heads, biases=frozenset(("qkv", "mlp")))
        for each, heads in shapes.items()
    }
    run_ranks(4, on_ranks, cases, tensor=4)
