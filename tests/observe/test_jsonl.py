"""metrics.jsonl: valid JSON whatever happens, floats to the bit, no torn lines, atomic cuts."""

import json
import math
import re
import resource
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.base.files import replace_file
from megazero.observe.jsonl import JsonlSink, drop_rows_after, encode, read_rows


def strict(text: bytes):
    def refuse(word: str):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_floats_come_back_to_the_bit_or_as_null(value):
    back = strict(encode({"loss": value}))["loss"]
    if math.isfinite(value):
        assert struct.pack("<d", back) == struct.pack("<d", value)
    else:
        assert back is None


def test_one_line_per_row_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        sink.row({"step": step, "loss": 1.5, "mfu": None})
        assert read_rows(sink.path)[-1] == {"step": step, "loss": 1.5, "mfu": None}
    sink.close()
    assert sink.path.read_bytes() == b'{"step": 1, "loss": 1.5, "mfu": null}\n{"step": 2, "loss": 1.5, "mfu": null}\n'


def test_deleted_file_comes_back_with_the_next_row(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.row({"step": 1})
    sink.path.unlink()
    sink.row({"step": 2})
    assert read_rows(sink.path) == [{"step": 2}]


def test_row_that_does_not_fit_is_taken_back_whole(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.row({"step": 1})
    before = sink.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))  # the disk takes 5 more bytes
    try:
        with pytest.raises(OSError, match="bytes"):
            sink.row({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sink.path.read_bytes() == before
    sink.row({"step": 3})
    assert read_rows(sink.path) == [{"step": 1}, {"step": 3}]


def test_resume_cuts_later_rows_and_a_torn_tail(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": step / 3} for step in range(1, 8)]
    path.write_bytes(b"".join(encode(row) for row in rows) + b'{"step": 8, "lo')
    kept = b"".join(encode(row) for row in rows[:5])
    drop_rows_after(path, 5)
    assert path.read_bytes() == kept
    drop_rows_after(path, 5)
    assert path.read_bytes() == kept
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_without_a_file_is_nothing(tmp_path):
    drop_rows_after(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_broken_line_in_the_middle_is_an_error_and_changes_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="Unterminated"):
        drop_rows_after(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n{"st\n{"step": 3}\n'


def test_failed_replacement_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(path, b"x")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_what_is_beyond_the_step_is_not_read(tmp_path):
    """A power cut leaves zero bytes there; and what a held-up job has written there is dropped, whatever it is."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(encode({"step": step}) for step in (1, 2, 3, 1)) + b"\0" * 40 + b"\n")
    assert drop_rows_after(path, 2) == {"step": 2}
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"[1]", "expected a JSON object, got list"),
        (b'{"loss": 1.0}', "expected a step, got None"),
        (b'{"step": true}', "expected a step, got True"),
        (b'{"step": 0}', "expected a step, got 0"),
        (b'{"step": 1e999}', "expected a step, got inf"),
        (b'{"step": 3, "loss": NaN}', "NaN is not a JSON number"),
        (b'{"step": 3, "loss": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"step": ' + b"[" * 9000, "nested too deeply"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, what):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 4}\n')
    with pytest.raises(ValueError, match="line 2: .*" + re.escape(what)):
        drop_rows_after(path, 9)


def test_rows_of_a_job_that_was_held_up_are_left_out(tmp_path):
    """It wrote one between those of the job that has taken the folder over; the later ones are the run's."""
    path = tmp_path / "metrics.jsonl"
    stray = [(1, 0.1), (2, 0.2), (5, 9.9), (3, 0.3), (4, 0.4), (5, 0.5), (6, 0.6)]
    path.write_bytes(b"".join(encode({"step": step, "loss": loss}) for step, loss in stray))
    assert drop_rows_after(path, 5) == {"step": 5, "loss": 0.5}
    assert read_rows(path) == [{"step": step, "loss": step / 10} for step in range(1, 6)]
