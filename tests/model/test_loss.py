"""The loss in chunks of tokens: what the unchunked one computes, with the logits of one chunk in memory."""

from dataclasses import replace

import pytest
import torch

from megazero.comm.grid import Grid
from tests.model.small import GPT, LLAMA, batch, make, step_of
from tests.model.test_model import difference, gradients
from tests.ranks import run_ranks

B, TOKENS = 3, 3 * GPT.seq_len
FP64 = 1e-13  # the same sums of at most TOKENS numbers, in other pieces


def trained(shape, chunk: int, dtype: torch.dtype = torch.float64, **how):
    """Losses, and gradients by name, with some tokens that do not count."""
    model = make(shape, dtype, loss_chunk=chunk, **how)
    tokens, targets, valid = batch(shape, B)
    valid[2:9, 1], targets[2:5, 1] = False, -100
    losses = model.losses(tokens, targets, valid, step_of(B))
    weights = torch.linspace(0.5, 2, losses.numel(), dtype=losses.dtype).view_as(losses)
    (losses * weights).sum().backward()
    return losses.detach(), gradients(model), model


@pytest.mark.parametrize("chunk", [1, 7, TOKENS // 2, TOKENS - 1, TOKENS, 10 * TOKENS])
@pytest.mark.parametrize("shape", [GPT, LLAMA, replace(GPT, tie_embeddings=False)], ids=["tied", "llama", "untied"])
def test_chunks_compute_what_the_whole_computes(shape, chunk: int) -> None:
    losses, whole, _ = trained(shape, 0)
    chunked, own, model = trained(shape, chunk)
    assert difference(chunked, losses) <= FP64 and not chunked[2:9, 1].any()
    for name, gradient in own.items():
        assert difference(gradient, whole[name]) <= FP64, name
    if chunk >= TOKENS:
        assert torch.equal(chunked, losses)
    with torch.no_grad():
        tokens, targets, valid = batch(shape, B)
        assert difference(model.losses(tokens, targets, valid, step_of(B))[9:], losses[9:]) <= FP64


def of_rank(grid: Grid, shape, sequence: bool, chunk: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = make(shape, torch.float64, tensor=grid["tensor"], sequence=sequence, loss_chunk=chunk)
    offset = grid["tensor"].rank * shape.seq_len // grid["tensor"].size if sequence else 0
    losses = model.losses(*batch(shape, B), replace(step_of(B), sequence_offset=offset))
    losses.sum().backward()
    sent = grid.comm.ledger.traffic_as_dict()["tensor"]
    return losses.detach(), gradients(model) | {"sent": torch.tensor([row["elements"] for row in sent.values()])}


@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_over_tensor_ranks(sequence: bool) -> None:
    """Padding rows of the vocabulary included; not one element more is sent."""
    shape = replace(GPT, vocab=61)
    expected = run_ranks(2, of_rank, shape, sequence, 0, tensor=2)
    for (losses, own), (whole, theirs) in zip(
        run_ranks(2, of_rank, shape, sequence, 10, tensor=2), expected, strict=True
    ):
        assert difference(losses, whole) <= FP64
        for name, gradient in own.items():
            assert difference(gradient, theirs[name]) <= FP64, name


def test_logits_with_a_cap_have_gradients() -> None:
    model = make(replace(LLAMA, logit_cap=1.5, logit_scale=3.0), torch.float64)
    tokens, targets, valid = batch(LLAMA, B)
    model.losses(tokens, targets, valid, step_of(B)).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    torch.nn.functional.cross_entropy(
        model(tokens, step_of(B)).flatten(0, 1), targets.flatten(), reduction="none"
    ).masked_fill(~valid.flatten(), 0.0).sum().backward()
    for name, gradient in gradients(model).items():
        assert difference(gradient, expected[name]) <= FP64, name
