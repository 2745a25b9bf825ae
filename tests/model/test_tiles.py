"""Weights in tiles, without an engine: the same values, products and gradients as whole ones."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from megazero.comm.grid import Axis
from megazero.kernels.operations import REFERENCE
from megazero.model.parameter import declaration_of
from megazero.model.tiles import Tile, cut, visit
from megazero.model.transformer import Shape, Transformer
from megazero.tools.certify.tolerances import GRADIENT_FP64, LOSS_FP64, difference
from tests.model.small import GPT, LLAMA, batch, make, step_of

SHAPES = {"gpt": replace(GPT, dropout=0.0), "llama": replace(LLAMA, dropout=0.0)}
TILE = 1000  # elements: all weights of a block are cut


def in_tiles(shape: Shape, tensor: Axis | None = None) -> Transformer:
    """The model in fp64, with its initial values."""
    model = Transformer(shape, seed=0, tensor=tensor or Axis("tensor"), sequence=False, ops=REFERENCE, tile=TILE)
    for _, members in model.units():
        for name, parameter in members:
            declaration = declaration_of(parameter)
            values = declaration.initial(0, name, 0, declaration.local_numel)
            new = nn.Parameter(values.view(declaration.local_shape))
            vars(new).update(vars(parameter))
            torch.utils.swap_tensors(parameter, new)
    return model


def put_together(model: Transformer) -> dict[str, list[nn.Parameter]]:
    """By name the parameter, or its tiles."""
    found: dict[str, list[nn.Parameter]] = {}
    for _, members in model.units():
        for name, parameter in members:
            found.setdefault(name, []).append(parameter)
    return found


@pytest.mark.parametrize("flavour", SHAPES)
def test_a_model_in_tiles_is_the_model(flavour: str) -> None:
    shape = SHAPES[flavour]
    whole, tiled = make(shape, torch.float64), in_tiles(shape)
    losses = [model.losses(*batch(shape, 3), step_of(3)).sum() for model in (whole, tiled)]
    assert difference([losses[1].item()], [losses[0].item()]) <= LOSS_FP64
    for loss in losses:
        loss.backward()
    parts = put_together(tiled)
    assert sum(len(each) > 1 for each in parts.values()) == shape.layers * (4 if flavour == "gpt" else 5)
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([part.detach() for part in parts[name]]), parameter.detach()), name
        assert parameter.grad is not None
        gradients = [part.grad for part in parts[name] if part.grad is not None]
        if not name.endswith("qkv.bias"):  # the key rows are noise
            assert difference(torch.cat(gradients), parameter.grad) <= GRADIENT_FP64, name


@pytest.mark.parametrize("rank", range(2))
def test_tiles_of_a_tensor_rank_are_rows_of_its_part(rank: int) -> None:
    axis = Axis("tensor", 2, rank)
    whole = declaration_of(make(SHAPES["gpt"], torch.float64, tensor=axis).blocks[0].mlp.up.weight)  # type: ignore
    tiles = in_tiles(SHAPES["gpt"], axis).blocks[0].mlp.up.tiles  # type: ignore
    declared = [declaration_of(tile.weight) for tile in tiles]
    assert [tile.shape for tile in declared] == [whole.shape] * len(tiles)
    assert declared[0].first_row == whole.first_row
    assert sum(tile.local_shape[0] for tile in declared) == whole.local_shape[0]
    steps = {later.first_row - tile.first_row for tile, later in pairwise(declared)}
    assert steps == {declared[0].local_shape[0]}


def test_units_are_in_the_order_of_the_forward() -> None:
    model = in_tiles(SHAPES["llama"])
    of_block = [name.removeprefix("blocks.0").rpartition(".")[0] for name in model.units_of_layers()[1]]
    assert list(dict.fromkeys(of_block)) == [
        "",
        *(f".{part}.weight" for part in ("attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down")),
    ]
    of_layers = [name for used in model.units_of_layers() for name in used]
    assert of_layers == [name for name, _ in model.units()]


class Noted:
    """Access to a tile that is noted."""

    def __init__(self, number: int, notes: list[str]):
        self.number, self.notes = number, notes

    def prefetch(self) -> None:
        self.notes.append(f"prefetch {self.number}")

    def acquire(self) -> None:
        self.notes.append(f"acquire {self.number}")

    def release(self) -> None:
        self.notes.append(f"release {self.number}")


def test_one_tile_is_used_while_the_next_comes() -> None:
    notes: list[str] = []
    tiles: list[Tile] = in_tiles(SHAPES["gpt"]).blocks[0].mlp.up.tiles[:3]  # type: ignore
    for number, tile in enumerate(tiles):
        tile.access = Noted(number, notes)
    notes.extend("use" for _ in visit(tiles))
    one, two, three = (["acquire 0", "prefetch 1"], ["acquire 1", "prefetch 2"], ["acquire 2"])
    assert notes == [*one, "use", "release 0", *two, "use", "release 1", *three, "use", "release 2"]


def test_a_weight_that_is_small_enough_stays_whole() -> None:
    weight = make(SHAPES["gpt"], torch.float64).blocks[0].mlp.up.weight  # type: ignore
    assert cut(weight, None) == [] == cut(weight, weight.numel()) and len(cut(weight, weight.numel() - 1)) == 2
