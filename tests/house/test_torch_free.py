"""A wrong config is reported in a second: what reads, checks and explains one never imports torch, not even indirectly.

Held twice: in the syntax trees, over everything that importing a module imports in turn, and by a fresh interpreter.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.house.source import ROOT, Source, imports, project

FREE = (
    "megazero.base.errors",
    "megazero.config.rules",
    "megazero.config.schema",
    "megazero.config.file",
    "megazero.config.explain",
)
FREE += (
    "megazero.schedules",
    "megazero.plan",
    "megazero.tools.planning.job",
    "megazero.tools.planning.report",
    "megazero.tools.planning.machine_file",
    "megazero.builders.job",
    "megazero.builders.pipeline",
)
CHECK = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]; sys.exit('torch' in sys.modules)"


def free_modules(sources: list[Source]) -> list[str]:
    return sorted(
        s.module for s in sources if any(s.module == free or s.module.startswith(f"{free}.") for free in FREE)
    )


def at_import(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those in functions, nor under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from at_import(child)


def ways_to_torch(sources: list[Source]) -> list[str]:
    """A chain of imports from a torch-free module to torch, for each that has one."""
    by_module = {source.module: source for source in sources}

    def follow(module: str, seen: set[str]) -> str:
        if module.split(".")[0] == "torch":
            return module
        if module in seen or module not in by_module:
            return ""
        seen.add(module)
        for target in _reached(by_module[module], set(by_module)):
            if way := follow(target, seen):
                return f"{module} -> {way}"
        return ""

    return [way for module in free_modules(sources) if (way := follow(module, set()))]


def _reached(source: Source, modules: set[str]) -> Iterator[str]:
    """What importing this module imports: its packages, and its own imports with their packages."""
    targets = [source.module]
    for statement in at_import(source.tree):
        for found in imports(source, ast.Module([statement], [])):
            whole = f"{found.module}.{found.name}"
            targets.append(whole if whole in modules else found.module)
    for target in targets:
        parts = target.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts)))
    yield from targets[1:]


def test_no_way_to_torch_in_the_syntax_trees():
    sources = project()
    assert free_modules(sources)
    assert ways_to_torch(sources) == []


def test_fresh_interpreter_has_no_torch():
    modules = free_modules(project())
    assert modules
    process = subprocess.run([sys.executable, "-c", CHECK, *modules], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, f"torch was imported by one of {modules}\n{process.stderr}"


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from torch.nn import Linear",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "class A:\n    import torch.nn",
        "from megazero.model import block",
        "from megazero.model.block import Block",
        "import megazero.model.other",
    ],
)
def test_planted_way_is_found(text):
    block = Source("megazero/model/block.py", "import torch")
    package = Source("megazero/model/__init__.py", "from . import block")
    other = Source("megazero/model/other.py", "")
    assert len(ways_to_torch([Source("megazero/config/schema.py", text), package, block, other])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "import torchless",
        "from megazero.config.rules import table",
    ],
)
def test_late_or_other_imports_are_free(text):
    sources = [Source("megazero/config/schema.py", text), Source("megazero/config/rules.py", "")]
    assert ways_to_torch(sources) == []


def test_the_interpreter_check_can_fail(tmp_path):
    (tmp_path / "torch.py").touch()
    (tmp_path / "heavy.py").write_text("import torch")
    process = subprocess.run([sys.executable, "-c", CHECK, "heavy"], cwd=tmp_path, capture_output=True)
    assert (process.returncode, process.stderr) == (1, b"")
