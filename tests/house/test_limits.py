"""How large a file, a function and a line may be, and what may not be written in them."""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.house.source import ROOT, Source, findings, planted

FILE_LINES, FUNCTION_LINES, LINE_CHARACTERS = 400, 80, 160

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b")

# The project speaks of itself only: no place on somebody's machine, no file that is not in the repository.
FOREIGN = [
    re.compile(r"(?<![\w.:/-])/(?:work|root|home|Users)/\w+"),
    re.compile(r"\bbash_(?:jobs)\b"),
    re.compile(r"\bshared/(?:design|contracts|style|numerics|faults|recipes|published)\b"),
]
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".sbatch", ".cpp", ".cu", ".cuh", ".h", ""}
TEXT_FOLDERS = ("megazero", "data_tools", "scripts", "examples", "tests", "docs", "configs", "locks", ".ci")


def long_files(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > FILE_LINES:
        yield f"{source.path}: {lines} lines, limit {FILE_LINES}"


def long_functions(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{source.at(node)} {node.name}: {lines} lines, limit {FUNCTION_LINES}"


def long_lines(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.split("\n"), 1):
        if len(line) > LINE_CHARACTERS:
            yield f"{source.path}:{number}: {len(line)} characters, limit {LINE_CHARACTERS}"


def globals_declared(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"{source.at(node)}: global {', '.join(node.names)}"


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.split("\n"), 1):
        if found := UNFINISHED.search(line):
            yield f"{source.path}:{number}: {found[0]}"


def foreign_words(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.split("\n"), 1):
        for pattern in FOREIGN:
            if found := pattern.search(line):
                yield f"{source.path}:{number}: {found[0]}"


def test_project_keeps_to_the_limits():
    assert findings(long_files, long_functions, long_lines, globals_declared, unfinished) == []


def texts() -> list[Source]:
    """Every text file that belongs to the project, whatever language."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in TEXT_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = [path for path in paths if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts]
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8", "replace")) for path in sorted(kept)]


def test_texts_speak_of_the_project_only():
    sources = texts()
    assert {"pyproject.toml", "tests/house/test_limits.py"} <= {source.path for source in sources}
    assert [line for source in sources for line in foreign_words(source)] == []


BAD: list[tuple[Callable[[Source], Iterator[str]], str]] = [
    (long_files, "x = 1\n" * (FILE_LINES + 1)),
    (long_functions, "class A:\n    def f(self):\n" + "        x = 1\n" * FUNCTION_LINES),
    (long_functions, "async def f():\n" + "    x = 1\n" * FUNCTION_LINES),
    (long_lines, "x = 1\n#" + "-" * LINE_CHARACTERS),
    (globals_declared, "def f():\n    global x\n    x = 1"),
    (unfinished, "# TO" + "DO: later"),
    (unfinished, "raise NotImplemented" + "Error"),
    (foreign_words, "path = '/ho" + "me/somebody/data'"),
    (foreign_words, "see /wo" + "rk/main"),
    (foreign_words, "as sha" + "red/design.md says"),
]
GOOD: list[tuple[Callable[[Source], Iterator[str]], str]] = [
    (long_files, "x = 1\n" * FILE_LINES),
    (long_functions, "def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1)),
    (long_lines, "#" * LINE_CHARACTERS),
    (globals_declared, "def f():\n    x = globals_of\n"),
    (unfinished, "todos = []  # a hacksaw, NotImplemented"),
    (foreign_words, "https://example.org/home/page, a/work/b, $HOME/data, shared/data, /homework"),
]


@pytest.mark.parametrize(("check", "text"), BAD)
def test_planted_fault_is_found(check, text):
    assert len(planted(check, text)) == 1


@pytest.mark.parametrize(("check", "text"), GOOD)
def test_what_is_within_the_limit_is_not(check, text):
    assert planted(check, text) == []
