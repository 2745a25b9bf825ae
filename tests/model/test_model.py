"""What the model promises to those who run it: units, layout, masks of documents, dropout by name."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.comm.grid import Axis
from megazero.kernels.operations import REFERENCE
from megazero.kernels.select import choose
from megazero.model import rotary
from megazero.model.batch_context import BatchContext
from megazero.model.dropout import Dropout
from megazero.model.parameter import declaration_of, declarations_by_name, declare
from megazero.model.transformer import Transformer
from megazero.tools.certify.tolerances import LOSS_FP64, difference
from tests.model.small import GPT, LLAMA, batch, make, step_of

ROWS = 3


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("shape", [GPT, LLAMA, replace(GPT, tie_embeddings=False)])
def test_units_hold_every_parameter_once(shape) -> None:
    model = make(shape, torch.float32)
    names = [name for _, members in model.units() for name, _ in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    units = [name for name, _ in model.units()]
    blocks = [f"blocks.{i}" for i in range(shape.layers)]
    tied = ["tied"] if shape.tie_embeddings else []
    assert units == [*tied, "embedding", *blocks, "head"]


@pytest.mark.parametrize("rows", [97, 96, 4])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_over_the_tensor_axis_are_intervals_of_one_parameter(rows: int, size: int) -> None:
    """Initial values do not depend on the grid, and padding rows are zero."""
    whole = declaration_of(declare((rows, 5), std=0.02, mean=1.0)).initial(3, "w", 0, rows * 5)
    shards = [declaration_of(declare((rows, 5), std=0.02, mean=1.0, axis=Axis("tensor", size, r))) for r in range(size)]
    values = torch.cat([shard.initial(3, "w", 0, math.prod(shard.local_shape)) for shard in shards])
    assert torch.equal(values[: rows * 5], whole)
    assert not values[rows * 5 :].any()
    middle = shards[0].initial(3, "w", 2, math.prod(shards[0].local_shape) - 1)
    assert torch.equal(middle, values[: math.prod(shards[0].local_shape)][2:-1])


def test_only_matrices_and_the_token_embedding_decay() -> None:
    for shape in (GPT, LLAMA):
        for name, declaration in declarations_by_name(make(shape, torch.float32).named_parameters()).items():
            assert declaration.decay == (len(declaration.shape) == 2 and "positions" not in name), name


def test_initial_weights_have_the_published_scales() -> None:
    model = make(replace(GPT, hidden=128, vocab=1000), torch.float64)
    weights = dict(model.named_parameters())
    for name, expected in (
        ("embedding.tokens.weight", 0.02),
        ("blocks.1.mlp.up.weight", 0.02),
        ("blocks.1.mlp.down.weight", 0.02 / (2 * GPT.layers) ** 0.5),
        ("blocks.0.attention.out.weight", 0.02 / (2 * GPT.layers) ** 0.5),
    ):
        assert abs(weights[name].std().item() / expected - 1) < 0.03
    assert torch.all(weights["head.norm.weight"] == 1)
    assert not weights["blocks.0.mlp.up_bias"].any()


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_losses_are_those_of_each_sample_alone(shape) -> None:
    model = make(replace(shape, dropout=0.2), torch.float64)
    tokens, targets, valid = batch(shape, ROWS)
    together = model.losses(tokens, targets, valid, step_of(ROWS)).detach()
    for row in range(ROWS):
        alone = BatchContext(0, torch.tensor([row]))
        column = slice(row, row + 1)
        losses = model.losses(tokens[:, column], targets[:, column], valid[:, column], alone).detach()
        assert difference(losses, together[:, column]) <= LOSS_FP64


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_documents_in_a_window_are_as_if_alone(shape) -> None:
    """Attention, positions and loss stop at document ends."""
    model = make(shape, torch.float64)
    lengths = (5, 1, 10)
    tokens, targets, valid = batch(shape, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[:, None]
    packed = model.losses(tokens, targets, valid, step_of(1).within_documents(positions, (lengths,))).detach()
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        alone = model.losses(tokens[part], targets[part], valid[part], step_of(1)).detach()
        assert difference(packed[part], alone) <= LOSS_FP64
        start += n
    plain = model.losses(tokens, targets, valid, step_of(1)).detach()
    assert difference(plain[5:], packed[5:]) > 1e-4  # without the mask the documents do see one another


def test_invalid_targets_do_not_count() -> None:
    model = make(GPT, torch.float64)
    tokens, targets, valid = batch(GPT, 2)
    valid[3:7, 0] = False
    losses = model.losses(tokens, targets, valid, step_of(2))
    assert not losses[3:7, 0].any()
    assert torch.all(losses[valid] > 0)
    losses.sum().backward()
    first = gradients(model)
    targets[3:7, 0] = -100  # anything may stand there
    model.losses(tokens, targets, valid, step_of(2)).sum().backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, first[name]), name


def test_dropout_is_off_in_evaluation_and_differs_by_step_layer_and_site() -> None:
    shape = replace(GPT, dropout=0.3)
    model, plain = make(shape, torch.float64), make(GPT, torch.float64)
    tokens, _, _ = batch(shape, ROWS)
    with torch.no_grad():
        assert torch.equal(model(tokens, replace(step_of(ROWS), training=False)), plain(tokens, step_of(ROWS)))
        first = model(tokens, step_of(ROWS))
        assert torch.equal(first, model(tokens, step_of(ROWS)))
        assert not torch.equal(first, model(tokens, replace(step_of(ROWS), step=1)))
    x = torch.ones(4, ROWS, shape.hidden)
    block = model.blocks[0]
    sites = [block.attention_dropout, block.mlp_dropout, model.blocks[1].mlp_dropout, model.embedding.dropout]
    masks = [site(x, step_of(ROWS)) for site in sites]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_dropout_gradient_uses_the_forward_mask() -> None:
    model = make(replace(GPT, dropout=0.5), torch.float64)
    x = torch.randn(4, 2, 6, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(4, 2, 6, dtype=torch.float64, requires_grad=True)
    site = model.blocks[0].mlp_dropout
    assert torch.autograd.gradcheck(lambda a: site(a, step_of(2)), (x,))
    assert torch.equal(site.added(x, residual, step_of(2)), residual + site(x, step_of(2)))
    assert torch.equal(site.masked(x, step_of(2)), site(x, step_of(2)))


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_micro_batches_in_flight_do_not_mix(shape) -> None:
    """F0 F1 B0 B1, as a pipeline runs them, gives the gradients of F0 B0 F1 B1, dropout and all."""
    model = make(replace(shape, dropout=0.2), torch.float64)
    batches = [batch(shape, 2, seed) for seed in (0, 1)]
    for number, (tokens, targets, valid) in enumerate(batches):
        model.losses(tokens, targets, valid, step_of(2, number)).sum().backward()
    in_turn = gradients(model)
    losses = [model.losses(*each, step_of(2, number)).sum() for number, each in enumerate(batches)]
    for loss in losses:
        loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, in_turn[name]), name


def test_whole_model_against_finite_differences() -> None:
    """No other implementation in sight: the directional derivative of the loss is the gradient's product with it."""
    for shape in (replace(GPT, dropout=0.1), LLAMA):
        model = make(shape, torch.float64)
        each = batch(shape, 2)
        model.losses(*each, step_of(2)).sum().backward()
        found = gradients(model)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter += sign * 1e-5 * direction
                    ends.append(model.losses(*each, step_of(2)).sum())
                    parameter -= sign * 1e-5 * direction
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(slope - (found[name] * direction).sum()) <= 1e-6 * max(1.0, abs(slope)), name


def test_attention_rotates_the_whole_sequence_whatever_part_a_rank_holds_outside() -> None:
    core = make(LLAMA, torch.float64).blocks[0].attention.core
    qkv = torch.randn(16, 1, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(core(qkv, step_of(1)), core(qkv, replace(step_of(1), sequence_offset=8)))


def test_masks_and_positions_of_a_part_of_the_sequence_are_those_of_the_whole() -> None:
    """A rank that holds positions 8..15 of the residual stream draws the masks of positions 8..15."""
    dropout = Dropout(0.3, seed=3, layer=1, site=0, ops=REFERENCE)
    whole, part = step_of(4, step=7), replace(step_of(4, step=7), sequence_offset=8)
    x = torch.ones(16, 4, 40)
    assert torch.equal(dropout(x, whole)[8:], dropout(x[8:], part))
    assert torch.equal(whole.document_positions(16)[8:], part.document_positions(8))
    positions_SB = torch.arange(64).view(16, 4)
    whole, part = (replace(step, positions_SB=positions_SB) for step in (whole, part))
    assert torch.equal(whole.document_positions(16)[8:], part.document_positions(8))


def test_rotation_takes_gradients_in_any_layout() -> None:
    """The heads' gradients come as attention's backward has laid them out."""
    x, half = torch.randn(4, 2, 3, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16.0).view(4, 1, 1, 4)
    angles, ops = torch.cat((half, half), -1), choose("auto", torch.device("cpu"), torch.float32)
    found = []
    for grad in (x.mT.contiguous().mT, x):
        inputs = x.clone().requires_grad_()
        rotary._Rotate.apply(inputs, angles.cos(), angles.sin(), ops).backward(grad)
        found.append(inputs.grad)
    assert torch.equal(*found)
