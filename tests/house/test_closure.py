"""How much of the code a reader of a training step has to pass: what build/ and train/ import, directly or not."""

import ast
from collections.abc import Iterator

from tests.house.source import Source, project

LINES = 12_000


def imported(source: Source, modules: dict[str, Source]) -> Iterator[str]:
    """Yield the modules of ours that a file imports when it runs; not those for types alone."""
    for_types = {
        inner
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(source.tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def closure(*rooms: str) -> set[Source]:
    """Return the files of some rooms and all that they need."""
    modules = {source.module: source for source in project()}
    todo = [name for name in modules if name.startswith(tuple(f"megazero.{room}" for room in rooms))]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in modules and name not in found:
            found.add(name)
            todo += imported(modules[name], modules)
    return {modules[name] for name in found}


def test_what_computes_a_step_is_bounded() -> None:
    files = closure("builders", "train")
    assert {"megazero.zero.engine", "megazero.model.linear", "megazero.comm.collectives"} <= {f.module for f in files}
    lines = sum(len(source.text.splitlines()) for source in files)
    assert lines <= LINES, f"{lines} lines in {len(files)} files"
    assert not [f.module for f in files if f.module.startswith(("megazero.run", "megazero.tools"))]
