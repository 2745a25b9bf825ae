"""Windows have the same scores on every grid, and texts the same continuations, also where training splits more."""

import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megazero.base.errors import FailedElsewhere, UserError
from megazero.builders.assemble import build
from megazero.comm.grid import Grid, single
from megazero.evaluation.calls import Calls
from megazero.evaluation.scorer import Interrupted, Scorer
from megazero.generation.sampling import Sampling
from megazero.kernels.operations import REFERENCE
from megazero.model.batch_context import BatchContext
from tests.generation.test_decode import PROMPTS, config_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")
BASE = ("precision.dtype=fp64", "batch.micro=2", "batch.global=8", "model.layers=4")
GREEDY, DRAWN = Sampling(12, 0.0), Sampling(12, 1.0, 0, seed=5)


def windows() -> list[tuple[list[int], int]]:
    """13 windows of uneven length: the last batch of every grid is incomplete."""
    draws = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 32, (11,), generator=draws).tolist()
    found = [(torch.randint(0, 50, (n,), generator=draws).tolist(), max(1, n // 3)) for n in lengths]
    return [*found, ([7, 9], 1), ([3], 0)]


def scorer_on(grid: Grid, name: str, options: tuple[str, ...]) -> Scorer:
    config = config_of(name, *BASE, *options)
    built = build(config, grid, CPU, REFERENCE, trains=False)
    for unit in built.engine.units:
        built.engine.gather.publish(unit)
    built.engine.gather.finish()
    return Scorer(config, grid, CPU, built)


def found_on(grid: Grid, name: str, options: tuple[str, ...]) -> tuple[Any, ...]:
    """The scores of windows, their flags where the greedy continuation is scored, and continuations."""
    scorer = scorer_on(grid, name, options)
    texts = [scorer.decoder.continued(PROMPTS, how, vocab=50, stops={49}) for how in (GREEDY, DRAWN)]
    known = [([*prompt, *new][:33], min(len(new), 32)) for prompt, new in zip(PROMPTS, texts[0], strict=True)]
    return scorer.scores(windows()), scorer.scores(known), texts


GRIDS = {
    "offloaded": (2, {}, ("zero.stage=3", "zero.offload.parameters=cpu")),
    "zb-v": (2, {"pipeline": 2}, ("parallel.pipeline=2", "pipeline.schedule=zb-v")),
    "tensor 2": (2, {"tensor": 2}, ("parallel.tensor=2",)),
    "sequence": (2, {"tensor": 2}, ("parallel.tensor=2", "parallel.sequence=true")),
    "stage 3": (2, {}, ("zero.stage=3",)),
    "pipeline": (2, {"pipeline": 2}, ("parallel.pipeline=2",)),
    "interleaved": (4, {"pipeline": 2}, ("parallel.pipeline=2", "pipeline.schedule=interleaved", "zero.stage=2")),
    "all": (
        4,
        {"tensor": 2, "pipeline": 2},
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true", "zero.stage=1"),
    ),
    "tensor 2 x stage 3": (4, {"tensor": 2}, ("parallel.tensor=2", "zero.stage=3", "memory.recompute=full")),
}


@pytest.mark.parametrize("name", ["gpt", pytest.param("gemma", marks=pytest.mark.full)])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_equals_one_process(grid: str, name: str) -> None:
    scores, known, texts = found_on(single(), name, ())
    assert all(greedy for _, greedy in known) and not all(greedy for _, greedy in scores)
    assert min(nats for nats, _ in scores[:-1]) > 0 == scores[-1][0]
    ranks, axes, options = GRIDS[grid]
    for of_rank in run_ranks(ranks, found_on, name, options, **axes):
        assert of_rank[2] == texts
        for own, expected in ((of_rank[0], scores), (of_rank[1], known)):
            assert [greedy for _, greedy in own] == [greedy for _, greedy in expected]
            nats = torch.tensor([[nats for nats, _ in each] for each in (own, expected)], dtype=torch.float64)
            torch.testing.assert_close(nats[0], nats[1], rtol=1e-12, atol=1e-12)


def test_scores_are_those_of_the_logits() -> None:
    scorer = scorer_on(single(), "gpt", ())
    step = BatchContext(0, torch.zeros(1, dtype=torch.int64), training=False)
    for (ids, scored), (nats, greedy) in zip(windows(), scorer.scores(windows()), strict=True):
        if scored:
            with torch.no_grad():
                logits = scorer.decoder.model(torch.tensor(ids[:-1])[:, None], step)[-scored:, 0, :50]
            targets = torch.tensor(ids[-scored:])
            chosen = logits.log_softmax(-1).gather(1, targets[:, None])
            assert nats == pytest.approx(-float(chosen.sum()), rel=1e-12)
            assert greedy == bool((logits.argmax(-1) == targets).all())


def test_of_equal_logits_the_first_is_the_most_probable() -> None:
    scorer = scorer_on(single(), "gpt", ())
    context, step = [7, 9, 11], BatchContext(0, torch.zeros(1, dtype=torch.int64), training=False)
    model = scorer.decoder.model
    with torch.no_grad():
        best = int(model(torch.tensor(context)[:, None], step)[-1, 0, :50].argmax())
        for other in {20, 49} - {best}:
            model.head.weight[other] = model.head.weight[best]
            found = dict(zip((best, other), scorer.scores([([*context, i], 1) for i in (best, other)]), strict=True))
            first, second = min(best, other), max(best, other)
            assert found[first] == (found[second][0], True) and found[second][1] is False
            model.head.weight[other] = 0.0


def patient_on(grid: Grid, fails: bool) -> int | None:
    """The work takes longer than an operation may, then asks for scores."""
    world = grid["world"]
    quick = replace(world, comm=replace(world.comm, timeout=timedelta(seconds=2)))
    scorer: Any = SimpleNamespace(device=CPU, scores=len)
    calls = Calls(scorer, cast(Any, None), cast(Any, {"world": quick}))

    def work() -> int:
        time.sleep(5)
        if fails:
            raise UserError(230, "no such task", "leave it out")
        return calls.ask("scores", [1, 2, 3])

    if not fails:
        return calls.serve(work)
    with pytest.raises(UserError if world.rank == 0 else FailedElsewhere) as caught:
        calls.serve(work)
    return caught.value.code


@pytest.mark.full
def test_work_of_rank_0_may_take_longer_than_an_operation() -> None:
    assert run_ranks(2, patient_on, False) == [3, None]
    assert run_ranks(2, patient_on, True) == [230, 230]


def interrupted_on(grid: Grid) -> list[int]:
    """After how many questions each kind of work ended, when the third one is answered with yes."""
    scorer, counts = scorer_on(grid, "gpt", ("parallel.pipeline=2",)), []
    for work in (
        lambda: scorer.scores(windows() * 20),
        lambda: scorer.decoder.continued(PROMPTS, GREEDY, vocab=50, stops=()),
    ):
        asked: list[int] = []
        scorer.stop = lambda asked=asked: asked.append(1) or len(asked) == 3
        with pytest.raises(Interrupted):
            work()
        counts.append(len(asked))
    return counts


def test_all_ranks_stop_together() -> None:
    assert run_ranks(4, interrupted_on, pipeline=2) == [[3, 3]] * 4
