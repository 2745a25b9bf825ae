"""Failures of sharded Muon that users of other systems have reported, rebuilt: each must compute the right update."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import megazero
from megazero.optim.muon import Orthogonaliser
from megazero.tools.certify.certify import Certificate
from tests.library.odd_modules import made, of_numbers
from tests.library.running import on_ranks
from tests.optim.test_optimizers import LAYOUTS
from tests.tiny_run import TinyData
from tests.tools.certify.test_planting import SHAPE

MUON: dict[str, Any] = {"name": "muon", "lr": 0.01}
STEPS, MICRO = 3, 2


def counted(stage: int, where: str) -> list[tuple[int, int]]:
    """The shapes of the matrices that this rank orthogonalises in some steps of a module built on a device."""
    module, found, honest = made("plain"), list[tuple[int, int]](), Orthogonaliser.__call__

    def call(self: Orthogonaliser, rows: torch.Tensor, *how: Any) -> None:
        found.append((rows.shape[0] * (rows.shape[1] if rows.dim() > 2 else 1), rows.shape[-1]))
        honest(self, rows, *how)

    def fill(name: str, x: torch.Tensor) -> None:
        x.normal_(0.0, 0.1)

    if where == "meta":
        module = module.to("meta")
    with patch.object(Orthogonaliser, "__call__", call):
        sharded = megazero.shard(module, MUON, stage=stage, initial=fill if where == "meta" else None)
        for step in range(STEPS):
            for micro in range(MICRO):
                sharded.backward(of_numbers(sharded, MICRO * step + micro, sharded.rank) / MICRO)
            sharded.step()
    return found


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("stage", [0, 3])
def test_every_matrix_is_orthogonalised_once_a_step(stage: int, where: str) -> None:
    """deepspeedai/DeepSpeed#8438: no matrix is, if the model is built without values; #8441: none is in stage 0.

    Nor once for each micro-batch (#8443), nor on every rank.
    """
    matrices = Counter(
        tuple(p.shape)
        for m in made("plain").modules()
        if not isinstance(m, nn.Embedding)
        for p in m._parameters.values()
        if p is not None and p.dim() == 2
    )
    found = Counter(shape for of_rank in on_ranks(2, counted, stage, where) for shape in of_rank)
    assert found == Counter({shape: STEPS * number for shape, number in matrices.items()})


@pytest.mark.parametrize("layout", ["stage 3", "hybrid", "tensor and data"])
def test_a_mixture_with_rates_of_its_own_is_that_of_one_process(
    tiny_data: TinyData, tmp_path: Path, layout: str
) -> None:
    """pytorch/torchtitan#2494: Muon for hidden matrices and AdamW for the rest, each with its rates, on shards."""
    groups = "[{match: '*mlp*', lr_factor: 3}, {match: '*qkv*', weight_decay: 1}, {match: '*norm*', lr_factor: 2}]"
    own = ("optimizer.name=muon", "optimizer.muon.lr_factor=2", f"optimizer.groups={groups}", "precision.dtype=fp64")
    config = tiny_data.load(tmp_path, *SHAPE, *own, "model.layers=3", "batch.global=12", "batch.micro=1")
    certificate = Certificate(config, 3)
    row = certificate.row(replace(certificate.alone, **LAYOUTS[layout]))  # type: ignore[arg-type]
    assert row.fault is None, row
    alone = certificate.row(certificate.alone)
    assert alone.fault is None, alone


@pytest.mark.parametrize("tensor", [2, 4])
def test_the_update_does_not_depend_on_the_number_of_tensor_ranks(
    tiny_data: TinyData, tmp_path: Path, tensor: int
) -> None:
    """NVIDIA/Megatron-LM: parts orthogonalised by themselves, and fused heads on more ranks than there are groups."""
    own = ("optimizer.name=muon", "model.kv_heads=2", "precision.dtype=fp64", "optimizer.muon.scale=spectral")
    config = tiny_data.load(tmp_path, *SHAPE, *own, "batch.micro=1")
    certificate = Certificate(config, 3)
    row = certificate.row(replace(certificate.alone, tensor=tensor, sequence=True))
    assert row.fault is None, row
