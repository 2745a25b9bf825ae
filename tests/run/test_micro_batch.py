"""batch.micro: null is the largest micro-batch that divides and fits, on any number of ranks."""

import json
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.builders.pipeline import check_world
from megazero.config.file import CONFIGS, load
from megazero.plan.machines import MACHINES
from megazero.tools.planning.job import plan
from megazero.tools.planning.micro_batch import gpu, sized
from tests.tiny_run import TinyData, command

CPU = None
V100, A100 = MACHINES["v100-32gb"], MACHINES["a100-80gb"]
FREE = ("data.train=null", "data.sources=[{path: a}]", "model.position=rotary", "run.steps=9")


def chosen(name: str, ranks: int, machine, *overrides: str) -> int:
    return sized(load(name, list(overrides)), ranks, machine).batch.rows


@pytest.mark.parametrize(
    ("name", "ranks", "machine", "overrides", "expected"),
    [
        ("tiny", 1, CPU, (), 8),  # 2,048 tokens
        ("tiny", 2, CPU, (), 4),
        ("tiny", 8, CPU, (), 1),
        ("tiny", 1, CPU, ("batch.global=48",), 8),
        ("tiny", 1, CPU, ("batch.global=44",), 4),  # 8 does not divide it
        ("tiny", 1, CPU, ("model.seq_len=4096",), 1),  # one sequence at least
        ("tiny", 2, CPU, ("batch.micro=3", "batch.global=6"), 3),  # a number stays
        ("tiny", 2, CPU, ("parallel.pipeline=2",), 1),  # the pipeline is filled
        ("tiny", 2, CPU, ("parallel.pipeline=2", "batch.global=64"), 4),
        ("tiny", 1, A100, ("batch.global=1024",), 1024),
        ("gpt13b", 128, V100, (), 2),  # as published: ZeRO's appendix
        ("gpt100b", 400, V100, (), 32),
        ("gpt170b", 400, V100, (), 12),
        ("gpt13b", 64, V100, (), 1),  # 2 would leave less than 5 %
        ("gpt13b", 64, A100, (), 4),
        ("gpt13b", 1, V100, (), 1),  # nothing fits: plan and the run say so
    ],
)
def test_it_divides_and_fits(name: str, ranks: int, machine, overrides: tuple[str, ...], expected: int) -> None:
    assert chosen(name, ranks, machine, *overrides) == expected


def test_the_next_larger_one_would_not_fit() -> None:
    config = load("gpt2_1.5b", ["batch.global=64"])
    micro = chosen("gpt2_1.5b", 1, A100, "batch.global=64")
    assert 1 < micro < 64 and plan(config, 1, A100).fits
    assert not plan(load("gpt2_1.5b", ["batch.global=64", f"batch.micro={2 * micro}"]), 1, A100).fits


def test_half_the_memory_takes_no_more() -> None:
    sizes = [chosen("gpt2_124m", 1, gpu(gigabytes * 2**30)) for gigabytes in (8, 16, 40, 80, 192)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 5


def test_one_size_serves_all_stages_that_give_none() -> None:
    stages = "stages=[{until_step: 3, batch: {global: 12}}, {until_step: 6, batch: {global: 64, micro: 2}}]"
    config = sized(load("tiny", [*FREE, stages, "batch.global=8"]), 2)
    assert config.batch.micro == 2 and config.stages is not None  # of 6 and 4
    stages = "stages=[{until_step: 3, model: {seq_len: 1024}}]"
    assert chosen("tiny", 1, CPU, *FREE, stages) == 2


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_shipped_config_starts_on_every_number_of_ranks_that_divides_its_batch(name: str) -> None:
    config = load(name)
    split = config.parallel.tensor * config.parallel.pipeline
    sizes = [n for n in range(1, config.batch.global_ + 1) if config.batch.global_ % n == 0]
    for data in sizes:
        check_world(sized(config, split * data, A100), split * data)


@pytest.mark.parametrize(
    ("options", "do"),
    [
        (["batch.global=16", "--gpus", "6"], "use batch.global=12 or 18, or --gpus 2, 4, 8"),
        (["batch.global=16", "--gpus", "32"], "use batch.global=32, or --gpus 4, 8, 16"),
        (["batch.global=16", "parallel.tensor=2", "--gpus", "6"], "use batch.global=15 or 18, or --gpus 2, 4, 8"),
        (["batch.global=16", "batch.micro=8", "--gpus", "4"], "use batch.micro=4, or null"),
        (["batch.global=16", "batch.micro=8", "--gpus", "3"], "use batch.global=24, or --gpus 1, 2"),
        (["zero.shard_ranks=3", "batch.global=16", "--gpus", "6"], "use batch.global=12 or 18"),
        (["parallel.tensor=4", "--gpus", "6"], "start 4 or 8 ranks, or change parallel.tensor or parallel.pipeline"),
    ],
)
def test_what_would_do_is_named(options: list[str], do: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny", "--hardware", "h200", *options]) == 2
    line = capsys.readouterr().err
    assert line.startswith("MZ-106") and line.endswith(f"; {do}\n") and line.count("\n") == 1, line
    for flag in (text for text in do.replace(", or ", "|").split("|") if text.startswith(("--gpus", "batch"))):
        where, _, values = flag.removeprefix("use ").replace(" or ", ", ").replace("=", " ").partition(" ")
        for value in values.split(", "):
            change = [where, value] if where == "--gpus" else [f"{where}={value}"]
            assert main(["plan", "--config", "tiny", "--hardware", "h200", *options, *change]) == 0, change
    capsys.readouterr()


def test_config_yaml_shows_the_number_and_the_run_goes_on(tiny_data: TinyData, tmp_path: Path) -> None:
    options = ["batch.micro=null", "data.valid=null", f"run.dir={tmp_path / 'run'}", "checkpoint.resume=auto"]
    for steps, ranks, micro in ((2, "2", 2), (4, "1", 4)):
        line = ("train.py", "--config", tiny_data.config, *options, f"run.steps={steps}", "--nproc", ranks)
        command(*line)
        assert load(str(tmp_path / "run/config.yaml")).batch.micro == micro
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
