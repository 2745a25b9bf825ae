"""Numbers that nobody means are refused before anything is laid out or looped over for them."""

import time

import pytest

from megazero.__main__ import main

SECONDS = 5.0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("plan --config tiny --gpus 1073741824 --hardware h200", "MZ-100: argument --gpus: expected a number from 1"),
        ("simulate --config tiny --gpus 1073741824", "MZ-100: argument --gpus: expected a number from 1"),
        ("certify --config tiny --max-ranks 1000000000", "MZ-100: argument --max-ranks: expected a number from 1"),
        ("train --config tiny --nproc 1000000000", "MZ-100: argument --nproc: expected a number from 1"),
        ("schedule --config tiny --nproc " + "9" * 5000, "MZ-100: argument --nproc: expected a number from 1"),
        ("plan --config tiny --gpus 8 --hardware h200 model.layers=1000000", "model.layers: expected less than"),
        ("simulate --config tiny --gpus 1 model.layers=1000000000", "model.layers: expected less than"),
        ("schedule --config tiny parallel.pipeline=1000000", "parallel.pipeline: expected less than"),
        ("explain --config tiny batch.global=2147483647", "batch.global: expected less than"),
        ("explain --config tiny model.seq_len=2147483647", "model.seq_len: expected less than"),
        ("explain --config tiny zero.bucket_mb=1e300", "zero.bucket_mb: expected less than"),
        (
            "schedule --config tiny parallel.pipeline=8 model.layers=8 batch.global=1048576 batch.micro=1",
            "expected stages * micro-batches <= 131,072 in a step, got 8 * 1048576 = 8,388,608",
        ),
    ],
)
def test_one_line_at_once(line: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(line.split()) == 2
    assert time.process_time() - began < SECONDS
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) <= 301
    assert what in err, err
