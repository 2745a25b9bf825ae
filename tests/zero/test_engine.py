"""A step of the engine against torch's AdamW and clip_grad_norm_ on the same model."""

from dataclasses import replace

import pytest
import torch

from megazero.builders.assemble import build_engine
from megazero.builders.units import resources_of
from megazero.comm.grid import Axis, single
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Scratch
from megazero.kernels.operations import REFERENCE
from megazero.kernels.select import choose
from megazero.model.parameter import declaration_of
from megazero.model.transformer import Transformer
from megazero.optim.clip import clip_factor
from megazero.optim.elements import Settings
from megazero.optim.groups import Groups
from megazero.optim.mixture import Mixture
from megazero.plan.optimizers import Optimizers
from megazero.tools.certify.tolerances import WEIGHTS_FP32, WEIGHTS_FP64, weight_differences
from megazero.zero.engine import Engine
from megazero.zero.layout import Entry, Group, lay_out
from megazero.zero.placement import Precision, UnitAxes
from megazero.zero.unit import Unit
from tests.model.small import GPT, LLAMA, batch, make, step_of

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
CPU = torch.device("cpu")
ALONE = UnitAxes(Axis("shard"), Axis("tensor"))


PADDED = replace(GPT, hidden=36, ffn=100)  # no unit is a multiple of 16 elements


def engine_of(shape, dtype: torch.dtype, *, clip: float, rows: int, kernels: str = "reference"):
    ops = choose(kernels, CPU, dtype)
    model = Transformer(shape, seed=0, tensor=Axis("tensor"), sequence=False, ops=ops)
    return model, build_engine(
        model,
        [range(len(model.layers))],
        seed=0,
        axes=lambda unit: ALONE,
        grid=single(),
        resources=resources_of(Precision(dtype, dtype), CPU, Ledger(), ops=ops),
        groups=Groups("adamw", DECAY),
        settings=Settings(BETAS, EPS),
        clip=clip,
        tokens_per_step=rows * shape.seq_len,
        update_ops=ops,
    )


@pytest.mark.parametrize("kernels", ["reference", pytest.param("auto", marks=pytest.mark.full)])
@pytest.mark.parametrize("clip", [0.05, *(pytest.param(clip, marks=pytest.mark.full) for clip in (0.0, 100.0))])
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_steps_equal_torch(dtype: torch.dtype, shape, clip: float, kernels: str) -> None:
    """Accumulation over uneven valid tokens, clip, decay by kind, 5 steps."""
    model, engine = engine_of(shape, dtype, clip=clip, rows=4, kernels=kernels)
    twin = make(shape, dtype)
    decays = [p for p in twin.parameters() if declaration_of(p).decay]
    rest = [p for p in twin.parameters() if not declaration_of(p).decay]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    tolerance = WEIGHTS_FP64 if dtype == torch.float64 else WEIGHTS_FP32
    for step in range(5):
        micro_batches = [batch(shape, 2, seed=2 * step + micro) for micro in range(2)]
        micro_batches[0][2][3:9] = False
        engine.begin_step()
        for micro, (tokens, targets, valid) in enumerate(micro_batches):
            engine.stages[0].forward(micro)
            loss = engine.loss(model.losses(tokens, targets, valid, step_of(2, micro)), valid)
            engine.stages[0].backward(micro, loss.backward, reduce=micro == 1, last=micro == 1)
        engine.stages[0].finish_reduction()
        result = engine.finish_step(LR)

        theirs.zero_grad()
        count = sum(int(valid.sum()) for _, _, valid in micro_batches)
        losses = [twin.losses(*each, step_of(2, micro)).sum() for micro, each in enumerate(micro_batches)]
        loss = sum(losses) / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip or float("inf"))
        theirs.step()
        assert abs(result.loss - loss.item()) <= tolerance * abs(loss.item())
        assert abs(result.grad_norm - norm.item()) <= tolerance * norm.item()
        assert not result.skipped
        assert result.finite
    mine, expected = dict(engine.named_parameters()), {n: p.detach() for n, p in twin.named_parameters()}
    for name, apart in weight_differences(mine, expected, heads=shape.heads, kv_heads=shape.kv_heads).items():
        assert apart <= tolerance, name


def state(engine: Engine) -> list[torch.Tensor]:
    """Everything an update may change."""
    tensors = [unit.resting.parameters.values for unit in engine.units]
    for unit in engine.units:
        tensors += [
            *engine.optimizer.runs(unit)[0].state.values(),
            *(piece.step for piece in engine.optimizer.pieces(unit)),
        ]
    return [tensor.clone() for tensor in tensors]


def one_step(model, engine: Engine, seed: int, *, valid: bool = True, poison: str | None = None):
    tokens, targets, mask = batch(model.shape, 2, seed=seed)
    mask &= valid
    engine.begin_step()
    engine.stages[0].forward(0)
    loss = engine.loss(model.losses(tokens, targets, mask, step_of(2, seed)), mask)
    engine.stages[0].backward(0, loss.backward, reduce=True, last=True)
    engine.stages[0].finish_reduction()
    if poison is not None:
        unit = next(unit for unit in engine.units if unit.layout.name == poison)
        unit.resting.gradients.values[-1] = torch.inf
    return engine.finish_step(LR)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("unit", ["tied", "blocks.1", "head"])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, unit: str) -> None:
    model, engine = engine_of(GPT, dtype, clip=1.0, rows=2)
    one_step(model, engine, 0)
    before = state(engine)
    result = one_step(model, engine, 1, poison=unit)
    assert result.skipped
    assert not result.finite
    bad = [engine.units[i].layout.name for i in (~result.squares.isfinite()).nonzero().flatten().tolist()]
    assert bad == [unit]
    again = one_step(model, engine, 2)  # before the host has noticed: later updates stay suppressed
    assert again.skipped
    for a, b in zip(before, state(engine), strict=True):
        assert torch.equal(a, b)


def test_a_weight_that_is_not_finite_changes_nothing() -> None:
    model, engine = engine_of(GPT, torch.float32, clip=1.0, rows=2)
    one_step(model, engine, 0)
    engine.units[2].resting.parameters.values[5] = torch.nan
    before = state(engine)
    result = one_step(model, engine, 1)
    assert not result.finite
    for a, b in zip(before, state(engine), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("shape", [GPT, PADDED], ids=["whole", "padded"])
def test_a_step_without_valid_tokens_is_skipped_and_the_next_goes_on(shape, dtype: torch.dtype, clip: float) -> None:
    model, engine = engine_of(shape, dtype, clip=clip, rows=2)
    other = engine_of(shape, dtype, clip=clip, rows=2)
    one_step(model, engine, 0)
    before = state(engine)
    result = one_step(model, engine, 1, valid=False)
    assert result.skipped
    assert result.finite
    for a, b in zip(before, state(engine), strict=True):
        assert torch.equal(a, b)
    assert one_step(model, engine, 2).finite
    one_step(*other, 0)
    one_step(*other, 2)
    for a, b in zip(state(other[1]), state(engine), strict=True):
        assert torch.equal(a, b)


def test_the_optimizer_does_not_depend_on_how_units_are_cut() -> None:
    """AdamW bit for bit on any slicing: one flat tensor against many."""
    generator = torch.Generator().manual_seed(0)
    values, grads = torch.randn(5008, generator=generator), torch.randn(3, 5008, generator=generator)
    skip = torch.tensor(0.0)
    results = []
    for cuts in ([5008], [16, 32, 960, 4000], [2496, 2512]):
        units = []
        for number, piece in enumerate(values.split(cuts)):
            layout = lay_out(str(number), [Entry(f"p{number}", (len(piece),), Group(decay=DECAY), split=True)])
            unit = Unit(layout, ALONE, resources_of(Precision(), CPU, Ledger()))
            unit.resting.parameters.values.copy_(piece)
            units.append(unit)
        optimizer = Mixture(
            units,
            Optimizers(),
            {"adamw": Settings(BETAS, EPS), "muon": Settings()},
            bucket=1 << 20,
            ops=REFERENCE,
            scratch=Scratch(Ledger()),
        )
        for grad in grads:
            for unit, piece in zip(units, grad.split(cuts), strict=True):
                unit.resting.gradients.values.copy_(piece)
                optimizer.update(unit, lr=LR, scale=torch.tensor(0.3, dtype=torch.float64), skip=skip)
        results.append(torch.cat([unit.resting.parameters.values for unit in units]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_clip_factor() -> None:
    for norm in (0.0, 0.5, 1.0, 4.0):
        factor = clip_factor(torch.tensor(norm, dtype=torch.float64), 1.0).item()
        assert factor == min(1.0, 1.0 / (norm + 1e-6))
        assert clip_factor(torch.tensor(norm), 0.0) == 1.0
