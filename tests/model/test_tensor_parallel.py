"""What tensor parallelism sends and what it holds, against the published formulas."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.grid import Grid
from tests.model.small import GPT, LLAMA, batch, make, step_of
from tests.ranks import run_ranks

B = 3


def traffic(grid: Grid, shape, sequence: bool) -> dict[str, int]:
    """Elements sent by one micro-batch, forward and backward, by purpose."""
    model = make(shape, torch.float32, tensor=grid["tensor"], sequence=sequence)
    offset = grid["tensor"].rank * shape.seq_len // grid["tensor"].size if sequence else 0
    losses = model.losses(*batch(shape, B), replace(step_of(B), sequence_offset=offset))
    losses.sum().backward()
    sent = grid.comm.ledger.traffic_as_dict()["tensor"]
    return {purpose: row["elements"] for purpose, row in sent.items()}


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("shape", [GPT, replace(LLAMA, heads=8, kv_heads=4)], ids=["gpt", "llama"])
def test_traffic_is_the_papers(shape, t: int):
    """8 b s h (t - 1) / t elements per layer and micro-batch (Narayanan et al. 2021, section 3.2).

    Sequence parallelism sends as much, as reduce-scatters and all-gathers, and gathers the inputs of the column weights
    once more in backward: 2 b s h (t - 1) / t (Korthikanti et al. 2022, section 4.2.2). The embedding's sum and the
    head's add half a layer; each row of logits costs three numbers.
    """
    bsh = B * shape.seq_len * shape.hidden * (t - 1) // t
    loss = 3 * B * shape.seq_len * (t - 1)
    layer = shape.layers * 8 * bsh
    for found in run_ranks(t, traffic, shape, False, tensor=t):
        assert found["block forward"] + found["block backward"] == layer
        assert found["block forward"] == found["block backward"]
        assert found == {
            "embedding forward": 2 * bsh,
            "block forward": layer // 2,
            "loss": loss,
            "head backward": 2 * bsh,
            "block backward": layer // 2,
        }
    for found in run_ranks(t, traffic, shape, True, tensor=t):
        assert found == {
            "embedding forward": bsh,
            "block forward": layer // 2,
            "head forward": bsh,
            "loss": loss,
            "head again": bsh,
            "head backward": bsh,
            "block again": layer // 4,
            "block backward": layer // 2,
            "embedding backward": bsh,
        }


class Largest(TorchDispatchMode):
    """The most elements of any tensor of numbers that an operation gives (outboxes are bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return result


def largest_tensor(grid: Grid, shape) -> int:
    model = make(shape, torch.float32, tensor=grid["tensor"])
    with Largest() as largest:
        model.losses(*batch(shape, B), step_of(B)).sum().backward()
    return largest.numel


def test_no_rank_has_the_logits_of_the_whole_vocabulary():
    shape = replace(GPT, layers=1, vocab=10_001)
    tokens = B * shape.seq_len
    for t in (1, 2, 4):
        rows = -(-shape.vocab // t)
        for found in run_ranks(t, largest_tensor, shape, tensor=t):
            # the weight's gradient, or this rank's part of the logits, is the largest there is
            assert found == max(tokens * rows, rows * shape.hidden)
