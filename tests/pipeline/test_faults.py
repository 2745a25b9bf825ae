"""A rank that ends or stops in the middle of a schedule: one line in time, with rank, action and micro-batch."""

import re
import time
from pathlib import Path

import pytest

from tests.tiny_run import TinyData, command

TIMEOUT = 3
SHAPE = ("model.layers=3", "batch.micro=1", "data.valid=null", "parallel.pipeline=3", f"parallel.timeout={TIMEOUT}")

# What happens, on which rank, in the middle of what; and the line.
CASES = [
    (
        "KILL",
        1,
        "forward of micro-batch 2 in stage 1",
        r"MZ-310 rank=1 step=2: was ended by SIGKILL in forward of micro-batch 2 in stage 1 on .*",
    ),
    (
        "KILL",
        2,
        "backward of micro-batch 0 in stage 2",
        r"MZ-310 rank=2 step=2: was ended by SIGKILL in backward of micro-batch 0 in stage 2 on .*",
    ),
    (
        "STOP",
        1,
        "backward of micro-batch 1 in stage 1",
        r"MZ-311 rank=1 step=2: did not answer in p2p #\d+ gradients of micro-batch 1 from stage 1 "
        r"in backward of micro-batch 1 in stage 1 on .*; rank 0 waited in backward of micro-batch 1 in stage 0 .*",
    ),
    (
        "STOP",
        0,
        "forward of micro-batch 3 in stage 0",
        r"MZ-311 rank=0 step=2: did not answer in p2p #\d+ activations of micro-batch 3 from stage 0 "
        r"in forward of micro-batch 3 in stage 0 on .*; rank 1 waited in forward of micro-batch 3 in stage 1 .*",
    ),
    (
        "STOP",
        2,
        "forward of micro-batch 1 in stage 2",
        r"MZ-311 rank=2 step=2: did not answer in p2p #\d+ gradients of micro-batch 1 from stage 2 "
        r"in forward of micro-batch 1 in stage 2 on .*; rank 1 waited in backward of micro-batch 1 in stage 1 .*",
    ),
]


FEW = [CASES[0][:2], ("STOP", 1)]  # one that stops takes as long as the others wait


@pytest.mark.parametrize(
    ("what", "rank", "phase", "line"),
    [pytest.param(*case, marks=() if case[:2] in FEW else pytest.mark.full) for case in CASES],
    ids=[f"{case[0]}-{case[1]}" for case in CASES],
)
def test_the_line_names_rank_action_and_micro_batch(
    tiny_data: TinyData, tmp_path: Path, what: str, rank: int, phase: str, line: str
) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    done = command("-m", "tests.pipeline.faulty", what, rank, 2, phase, tiny_data.config, run, *SHAPE)
    ended = time.monotonic()
    (began,) = re.findall(r"^now (\S+)$", done.stdout, re.MULTILINE)
    assert done.returncode != 0 and re.fullmatch(line + "\n", done.stderr), done.stderr
    assert ended - float(began) < (TIMEOUT if what == "STOP" else 0) + 5


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("output", "output of stage 1 of micro-batch 0"),
        pytest.param("gradient", "gradient of blocks.1.", marks=pytest.mark.full),
    ],
)
def test_a_loss_that_is_not_finite_is_the_fault_of_the_stage_that_made_it(
    tiny_data: TinyData, tmp_path: Path, kind: str, found: str
) -> None:
    """Stage 1 of 3 computes it; the others see it in what they receive, and are not blamed."""
    done = command("-m", "tests.pipeline.poisoned", kind, tiny_data.config, f"run.dir={tmp_path / 'run'}", *SHAPE)
    assert done.returncode == 1
    assert re.match(rf"MZ-301 rank=1 step=2: .*first not finite: {found}", done.stderr), done.stderr
