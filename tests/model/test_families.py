"""Families of models are options: logits and all gradients equal transformers', in fp64 and fp32, in every layout."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megazero.comm.grid import Grid
from megazero.kernels.select import choose
from megazero.plan.job import Job
from megazero.plan.model import Shape
from megazero.tools.certify.rank import reduced_gradients, whole_gradients
from megazero.tools.certify.tolerances import difference
from megazero.tools.convert.proof import widened
from megazero.zero.placement import Precision
from tests.layouts import GLOBAL_BATCH, SHAPES, Rank, Trained, job_on, samples, train
from tests.model.families import FAMILIES, Family, their_model
from tests.model.small import batch, make, step_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
LAYOUTS = {
    "tensor": job_on(tensor=2),
    "sequence": job_on(tensor=4, sequence=True),
    "pipeline": job_on(pipeline=3, accumulation=4),  # stages of 2, 1 and 1 blocks
    "sharded": job_on(data=2, stage=3, accumulation=2),
}
ROWS = 2
QUICK = [("gemma3", "sequence"), ("olmo3", "tensor"), ("cohere2", "pipeline")]


def results(family: Family, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """transformers' weights (bf16 holds them) and gradients under our names, and its logits [S, B, V]."""
    with widened(family.module) if dtype == torch.float64 else contextlib.nullcontext():
        torch.manual_seed(0)
        theirs = their_model(family).eval()
        for name, parameter in theirs.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            values = torch.randn(parameter.shape, dtype=torch.float32) * 0.2 + mean - family.shape.norm_offset * mean
            parameter.data = values.bfloat16().to(dtype)
        tokens_SB, targets_SB, _ = batch(family.shape, ROWS)
        logits = theirs.to(dtype)(tokens_SB.T, use_cache=False).logits
        logits = logits.float() if dtype == torch.bfloat16 else logits
        nn.functional.cross_entropy(logits.flatten(0, 1), targets_SB.T.flatten(), reduction="sum").backward()
    weights = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    return (
        family.renamed(weights),
        logits.detach().transpose(0, 1),
        family.renamed(gradients),
    )


def ours(family: Family, weights: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Our logits [S, B, V] and gradients with these weights."""
    model = make(family.shape, dtype, ops=choose("auto", torch.device("cpu"), dtype))
    parameters = dict(model.named_parameters())
    assert weights.keys() == parameters.keys()
    tokens_SB, targets_SB, valid_SB = batch(family.shape, ROWS)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        logits = model(tokens_SB, step_of(ROWS))
    model.losses(tokens_SB, targets_SB, valid_SB, step_of(ROWS)).sum().backward()
    return logits, {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_a_set_of_options(name: str, dtype: torch.dtype) -> None:
    weights, their_logits, theirs = results(FAMILIES[name], dtype)
    logits, gradients = ours(FAMILIES[name], weights, dtype)
    assert difference(logits, their_logits) < TOLERANCE[dtype]
    assert weights.keys() == gradients.keys() == theirs.keys()
    for name_, found in gradients.items():
        assert difference(found, theirs[name_]) < 10 * TOLERANCE[dtype], name_


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_at_most_twice_as_far_from_fp64_as_transformers(name: str) -> None:
    """Logits, and all gradients together."""

    def together(gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([gradients[name].double().flatten() for name in exact_gradients])

    _, exact_logits, exact_gradients = results(FAMILIES[name], torch.float64)
    weights, their_logits, theirs = results(FAMILIES[name], torch.bfloat16)
    logits, gradients = ours(FAMILIES[name], weights, torch.bfloat16)
    exact = together(exact_gradients)
    assert (logits - exact_logits).norm() < 2 * (their_logits - exact_logits).norm()
    assert (together(gradients) - exact).norm() < 2 * (together(theirs) - exact).norm()


def after_a_step(grid: Grid, job: Job, shape: Shape, precision: Precision) -> Trained:
    """The second step, after one that has moved all norms and biases away from ones and zeros."""
    rank = Rank(grid, job, shape, precision)
    rank.engine.begin_step()
    rank.passes(0)
    rank.engine.finish_step(lr=0.1)
    initial = rank.weights()
    with reduced_gradients(rank.engine) as reduced:
        done = rank.step(1)
    gradients = {name: value.clone() for name, value in whole_gradients(reduced, done.mean)}
    return Trained([done.loss.item()], [done.grad_norm.item()], initial, gradients, rank.weights())


def give(family: Family, theirs: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model of transformers the weights that have our names."""
    sizes = [parameter.numel() for parameter in theirs.parameters()]
    places = torch.arange(sum(sizes)).split(sizes)
    named = {n: place.view_as(p) for (n, p), place in zip(theirs.named_parameters(), places, strict=True)}
    flat = torch.full([sum(sizes)], torch.nan, dtype=torch.float64)
    for name, place in family.renamed(named).items():
        flat[place.flatten()] = weights[name].flatten()
    with torch.no_grad():
        nn.utils.vector_to_parameters(flat, theirs.parameters())


def of_documents(family: Family, weights: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """transformers' loss and gradients of the second step's samples, each document apart."""
    shape = family.shape
    tokens_SB, targets_SB, valid_SB, now = samples([GLOBAL_BATCH + row for row in range(GLOBAL_BATCH)], 1, shape)
    assert now.documents is not None
    total = torch.zeros(())
    with widened(family.module):
        theirs = their_model(family).double().eval()
        give(family, theirs, weights)
        for row, lengths in enumerate(now.documents.lengths):
            each = [x[:, row].split(list(lengths)) for x in (tokens_SB, targets_SB, valid_SB)]
            for tokens, targets, valid in zip(*each, strict=True):
                logits = theirs(tokens[None], use_cache=False).logits[0]
                total = total + (nn.functional.cross_entropy(logits, targets, reduction="none") * valid).sum()
        (total / valid_SB.sum()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return float(total.detach() / valid_SB.sum()), family.renamed(gradients)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.full)
        for name in FAMILIES
        for layout in LAYOUTS
    ],
)
def test_a_family_in_a_layout(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    if LAYOUTS[layout].tensor > 2 and family.shape.qk_norm == "full":  # refused with fewer key-value heads than ranks
        family = replace(family, ours={**family.ours, "kv_heads": 4})
    monkeypatch.setitem(SHAPES, name, family.shape)
    trained = train(LAYOUTS[layout], name, Precision(torch.float64, torch.float64), after_a_step)
    loss, gradients = of_documents(family, trained.initial)
    assert abs(trained.losses[0] - loss) < TOLERANCE[torch.float64] * loss
    assert gradients.keys() == trained.gradients.keys()
    for name_, found in trained.gradients.items():
        assert difference(found, gradients[name_]) < 10 * TOLERANCE[torch.float64], name_
