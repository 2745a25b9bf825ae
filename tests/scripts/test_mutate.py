"""Mutations are of one line each, are Python, and are judged once."""

import json
from pathlib import Path

import pytest

from scripts.mutate import ROOT, Mutation, candidates, drawn, report, run

SOURCE = '''"""A text with 1 + 1."""


def f(x: int, dim: int = 0) -> int:
    """Return 2 * x."""
    if x < 3 and x > 1:
        send(x)
    assert x - 1
    if x:
        raise ValueError(f"{x + 1}")
    return all_gather(x, "tensor") if x == 2 else -0.5 * x + 1
'''


def test_candidates_leave_texts_annotations_and_messages_alone() -> None:
    found = list(candidates("m.py", SOURCE))
    lines = {(each.line, each.kind, each.planted(SOURCE).splitlines()[each.line - 1].strip()) for each in found}
    assert {line for line, *_ in lines} == {6, 7, 9, 11}
    assert (6, "off by one", "if x <= 3 and x > 1:") in lines and (6, "wrong branch", "if (x < 3) or (x > 1):") in lines
    assert (7, "missing call", "pass") in lines and (9, "wrong branch", "if not (x):") in lines
    assert (11, "axis", "return all_gather(x, 'pipeline') if x == 2 else -0.5 * x + 1") in lines
    assert (11, "scale", 'return all_gather(x, "tensor") if x == 2 else -0.5 + 1') in lines
    for each in found:
        compile(each.planted(SOURCE), "m.py", "exec")


def test_a_draw_repeats_and_has_all_kinds() -> None:
    some = drawn(12, 0)
    assert some == drawn(12, 0) != drawn(12, 1) and some == drawn(24, 0)[:12]
    assert {each.kind for each in some} == {"axis", "missing call", "off by one", "scale", "sign", "wrong branch"}
    assert all((ROOT / each.path).is_file() for each in some)


def test_it_goes_on_where_it_stopped_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, judged = tmp_path / "found.jsonl", list[Mutation]()

    def judge(mutation: Mutation, tree: Path, data: Path) -> str:
        assert (tree / mutation.path).read_text() == mutation.planted((ROOT / mutation.path).read_text())
        assert (data / "train.bin").stat().st_size
        judged.append(mutation)
        return "survived" if len(judged) == 1 else "tests/zero/test_stages.py"

    run(out, 2, 0, judge)
    run(out, 3, 0, judge)
    assert judged == drawn(3, 0) and len([json.loads(line) for line in out.read_text().splitlines()]) == 3
    capsys.readouterr()
    report(out)
    said = capsys.readouterr().out
    assert "| all | 3 | 1 |" in said and f"`{judged[0].path}:{judged[0].line}`" in said
