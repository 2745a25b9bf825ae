"""How large the product is, and how much of it a reader of a training step or of a run has to pass.

The limits rise only by an allowance that is stated for a feature. A full limit means: delete or simplify first.
"""

import ast
import io
import tokenize
from collections.abc import Iterator

import pytest

from tests.house.source import Source, imports, planted, project

# 23,000; 300 for layers that state their cost; 800 for kernels that prove themselves; 900 for kinds of layers; 700
# for families with proof; 1,100 for optimizers, which are a part of a step and so in its reach too; 900 for generation
# and evaluation, 300 of them in the files that a step imports
CODE_LINES = 27_700
STEP_LINES = 16_400
RUN_LINES = 26_100

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: Source) -> set[int]:
    """Return the numbers of the lines that hold code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in source.nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def lengths(source: Source) -> Iterator[str]:
    yield str(len(code_lines(source)))


def needed(source: Source, modules: dict[str, Source]) -> Iterator[str]:
    """Yield the modules that a file imports: at its top, inside functions, and for types alone."""
    for found in imports(source):
        whole = f"{found.module}.{found.name}"
        yield whole if whole in modules else found.module


def reach(sources: list[Source], *rooms: str) -> set[Source]:
    """Return the files of some rooms and all files that they import, directly or not."""
    modules = {source.module: source for source in sources}
    todo = [name for name in modules if name.startswith(tuple(f"megazero.{room}." for room in rooms))]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in modules and name not in found:
            found.add(name)
            todo += needed(modules[name], modules)
    return {modules[name] for name in found}


def lines_of(files: set[Source]) -> int:
    return sum(len(source.text.splitlines()) for source in files)


def test_the_product_is_small_enough():
    product = [source for source in project() if source.path.startswith(("megazero/", "data_tools/"))]
    lines = sum(len(code_lines(source)) for source in product)
    assert lines <= CODE_LINES, f"{lines} lines of code, limit {CODE_LINES}"


@pytest.mark.parametrize(("rooms", "limit"), [(("builders", "train"), STEP_LINES), (("run",), RUN_LINES)])
def test_the_reach_of_a_reader_is_bounded(rooms: tuple[str, ...], limit: int):
    files = reach(project(), *rooms)
    assert {"megazero.zero.engine", "megazero.model.linear", "megazero.comm.collectives"} <= {f.module for f in files}
    assert lines_of(files) <= limit, f"{lines_of(files)} lines in {len(files)} files, limit {limit}"


def test_a_step_needs_neither_the_run_nor_the_tools():
    files = reach(project(), "builders", "train")
    assert not [f.module for f in files if f.module.startswith(("megazero.run", "megazero.tools"))]


def test_only_code_counts():
    module = '"""A module."""\n\n# a reason\nx = 1  # one\n\n\n'
    function = 'def f():\n    """Return a text."""\n    return """a\n\nb"""\n'
    assert planted(lengths, module + function) == ["5"]


def test_every_import_counts():
    inside = "if TYPE_CHECKING:\n    import megazero.far\ndef f():\n    import megazero.lazy\n"
    sources = [
        Source("megazero/run/start.py", inside),
        Source("megazero/far.py", "from megazero import farther\n"),
        *(Source(f"megazero/{name}.py", "") for name in ("lazy", "farther", "unused")),
    ]
    reached = {source.module.rpartition(".")[2] for source in reach(sources, "run")}
    assert reached == {"start", "far", "lazy", "farther"}
