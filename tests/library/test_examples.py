"""Every example trains in every stage on 1, 2 and 4 ranks as one process does, and saves for any other."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero import Sharded
from tests.house.source import ROOT
from tests.library.running import ADAMW, on_ranks, train_plain

EXAMPLES = ("gpt2", "llama", "vit", "resnet", "unet", "recommender")
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}  # sums over ranks in another order
STEPS = 2
SMALL_TABLES = [40, 7, 5]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def of(name: str) -> Any:
    return importlib.import_module(f"examples.{name}")


def model(name: str, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = of(name).Recommender(SMALL_TABLES) if name == "recommender" else of(name).make()
    return made.to(dtype)


def loss(name: str, module: Any, dtype: torch.dtype, step: int, rank: int) -> Tensor:
    if name == "recommender":
        dense, ids, clicks = of(name).batch(SMALL_TABLES, step, rank, 4)
        return of(name).loss_of(module(dense.to(dtype), ids), clicks.to(dtype))
    example = of(name)
    samples = {"gpt2": "counting", "llama": "counting", "unet": "batch"}.get(name, "bright_quarter")
    found = getattr(example, samples)(step, rank)
    if not isinstance(found, Tensor):
        found = tuple(x.to(dtype) if x.is_floating_point() else x for x in found)
    return example.loss(module, found)


def sharded_model(name: str, dtype: torch.dtype, stage: int) -> Sharded:
    options = {"name": "adamw", **ADAMW}
    return megazero.shard(model(name, dtype), options, stage=stage, clip=0.5, kernels="reference")


def trained(name: str, dtype: torch.dtype, stage: int, load: Path | None, save: Path | None) -> dict[str, Tensor]:
    """Train from the beginning or a checkpoint to the end, or to the middle and a checkpoint."""
    sharded = sharded_model(name, dtype, stage)
    first = 0 if load is None else sharded.load(load)
    for step in range(first, STEPS if save is None else 1):
        sharded.backward(loss(name, sharded, dtype, step, sharded.rank))
        sharded.step()
    if save is not None:
        sharded.save(save)
    return sharded.full_state_dict()


def plain(name: str, dtype: torch.dtype, ranks: int) -> dict[str, Tensor]:
    module = model(name, dtype)
    train_plain(module, lambda step, rank: loss(name, module, dtype, step, rank), ranks, STEPS)
    return module.state_dict()


def layouts() -> Iterator[Any]:
    """Yield (example, stage, ranks, dtype): each pair of them somewhere in the quick half, all in the full one."""
    for e, name in enumerate(EXAMPLES):
        for stage in range(4):
            for r, ranks in enumerate((1, 2, 4)):
                for d, dtype in enumerate(TOLERANCE):
                    quick = ranks < 4 and (e + stage) % 2 == r and (stage // 2 + e) % 2 == d
                    yield pytest.param(name, stage, ranks, dtype, marks=[] if quick else pytest.mark.full)


@pytest.mark.parametrize(("name", "stage", "ranks", "dtype"), [*layouts()])
def test_an_example_trains_as_in_one_process(name: str, stage: int, ranks: int, dtype: torch.dtype):
    found, expected = on_ranks(ranks, trained, name, dtype, stage, None, None)[0], plain(name, dtype, ranks)
    assert list(found) == list(expected)
    for key, values in expected.items():
        assert torch.allclose(found[key], values, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]), key


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_checkpoint_goes_into_another_stage_and_grid(name: str, tmp_path: Path):
    number = EXAMPLES.index(name)
    before, after = ((number % 4, 2), ((number + 2) % 4, 1 + number % 2))
    on_ranks(before[1], trained, name, torch.float64, before[0], None, tmp_path)
    found = on_ranks(after[1], trained, name, torch.float64, after[0], tmp_path, None)[0]
    there = on_ranks(before[1], trained, name, torch.float64, before[0], tmp_path, None)[0]
    if before[1] == after[1]:
        assert all(torch.equal(found[key], there[key]) for key in there)
    else:  # of one rank the second step has other samples
        assert list(found) == list(there) and all(values.isfinite().all() for values in found.values())


def tuned(folder: Path, stage: int, dtype: torch.dtype, load: Path | None, save: Path | None) -> dict[str, Tensor]:
    """Fine-tune from the folder or a checkpoint to the end, or to the middle and a checkpoint."""
    finetune = of("finetune")
    sharded = megazero.shard(
        finetune.build(folder).to(dtype),
        {"name": "adamw", **ADAMW},
        stage=stage,
        kernels="reference",
        initial=finetune.reader(folder),
    )
    first = 0 if load is None else sharded.load(load)
    for step in range(first, STEPS if save is None else 1):
        sharded.backward(finetune.loss(sharded, finetune.counting(step, sharded.rank)))
        sharded.step()
    if save is not None:
        sharded.save(save)
    return sharded.full_state_dict()


def pretrained(folder: Path) -> Path:
    """Write a folder of transformers."""
    model("gpt2", torch.float32).save_pretrained(folder / "from")  # type: ignore[operator]
    return folder / "from"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        pytest.param(stage, ranks, marks=[] if (stage, ranks) in ((0, 2), (3, 2)) else pytest.mark.full)
        for stage in range(4)
        for ranks in (1, 2, 4)
    ],
)
def test_fine_tuning_from_a_folder(stage: int, ranks: int, dtype: torch.dtype, tmp_path: Path):
    folder = pretrained(tmp_path)
    found = on_ranks(ranks, tuned, folder, stage, dtype, None, None)[0]
    whole = of("finetune").AutoModelForCausalLM.from_pretrained(folder).to(dtype)
    blocks = whole.transformer.h[1:]
    optimizer = torch.optim.AdamW(blocks.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        for rank in range(ranks):
            (of("gpt2").loss(whole, of("finetune").counting(step, rank)) / ranks).backward()
        optimizer.step()
        whole.zero_grad()
    expected, within = whole.state_dict(), TOLERANCE[dtype]
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[key], expected[key], rtol=within, atol=within) for key in expected)


def test_a_fine_tuned_checkpoint_goes_into_another_stage_and_grid(tmp_path: Path):
    folder, saved = pretrained(tmp_path), tmp_path / "saved"
    on_ranks(2, tuned, folder, 3, torch.float64, None, saved)
    expected = on_ranks(2, tuned, folder, 3, torch.float64, saved, None)[0]
    found = on_ranks(2, tuned, folder, 1, torch.float64, saved, None)[0]
    assert all(torch.equal(found[key], values) for key, values in expected.items())
    alone = on_ranks(1, tuned, folder, 0, torch.float64, saved, None)[0]  # its second step has other samples
    assert list(alone) == list(expected) and torch.equal(alone["lm_head.weight"], expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["examples/unet.py", "--steps", "20", "--stage", "1"], "step 20: loss"),
        pytest.param(
            [*TORCHRUN, "examples/recommender.py", "--rows=64", "--steps=10", "--stage=3"],
            "step 10: loss",
            marks=pytest.mark.full,
        ),
    ],
)
def test_examples_run_as_they_say(command: list[str], said: str):
    line = ["env", "OMP_NUM_THREADS=1", sys.executable, *command]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
