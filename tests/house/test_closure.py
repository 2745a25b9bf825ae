"""How much of the code a reader of a training step has to pass: what build/ and train/ import, directly or not."""

import ast
from collections.abc import Iterator

from tests.house.source import Source, project

# 9,000, and what GPUs need: packed input and pinned memory, documents without a mask, sums in another dtype, channels
# that are connected before the first step, a monitor of what hangs, marks in its place of works, first uses that are
# shown, a loader that can be stopped, streams that a checker can record, CUDA graphs; sums of tensor parallelism in
# chunks beside products; operations that share a function of autograd; of modules of others units that are frozen,
# whole values that are looked at and changed, gradients that are reduced again, tensors of another dtype in a manifest,
# units that are gathered for other ranks alone, ranks that are told at once what another one called; units that tell
# what happens to them; events of CUDA that are used again, splits for channels that are shown; state on disks: homes of
# what is not in memory, updates in windows, checkpoints that read and write it in parts, kept inputs; values that are
# quantised on their way, with their specification and formulas, sums in two hops, second shards of parameters, what
# rounding has lost added to what is sent next; weights in tiles: their products, units, sizes and formulas; a gather
# for the next forward beside the end of a backward; validation sets with names; parts of a run, which end with a saved
# step and give their memory back.
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
    files = closure("build", "train")
    assert {"megazero.zero.engine", "megazero.model.linear", "megazero.comm.collectives"} <= {f.module for f in files}
    lines = sum(len(source.text.splitlines()) for source in files)
    assert lines <= LINES, f"{lines} lines in {len(files)} files"
    assert not [f.module for f in files if f.module.startswith(("megazero.run", "megazero.tools"))]
