"""The project's Python files as syntax trees, for the tests of its structure.

A checker takes one `Source` (or all of them) and returns what it found, one line per finding. Each is run twice: over
the project, where it must find nothing, and over a planted source, where it must find what was planted.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("megazero", "data_tools", "scripts", "examples")


@dataclass(frozen=True)
class Source:
    """One file: its path from the root and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree; walking it again takes longer than most rules."""
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Dotted name; a package's __init__ has the package's name."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.module if self.path.endswith("/__init__.py") else self.module.rpartition(".")[0]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def __hash__(self) -> int:
        return hash(self.path)


def project() -> list[Source]:
    """Every Python file that the rules are about."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += [path for path in [ROOT / "train.py"] if path.exists()]
    sources = [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    assert any(source.path.startswith("megazero/") for source in sources), "no source found: these tests check nothing"
    return sources


def findings(*checks: Callable[[Source], Iterator[str]]) -> list[str]:
    """What checkers find in the whole project; each file is parsed once for all of them."""
    return [f"{check.__name__}: {line}" for source in project() for check in checks for line in check(source)]


def planted(check: Callable[[Source], Iterator[str]], text: str, path: str = "megazero/zero/planted.py") -> list[str]:
    """What a checker finds in a source made up for it."""
    return list(check(Source(path, text)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes on a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


@dataclass(frozen=True)
class Import:
    """One imported thing: `import a.b` is (a.b, ""), `from a.b import c as d` is (a.b, c), bound to d."""

    node: ast.AST
    module: str
    name: str
    bound: str


def imports(source: Source, tree: ast.AST | None = None) -> Iterator[Import]:
    """All imports, those inside functions too, relative ones resolved, importlib.import_module("...") included."""
    for node in source.nodes if tree is None else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node, alias.name, "", alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = source.package.split(".")
                base = base[: len(base) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                yield Import(node, module, alias.name, alias.asname or alias.name)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(node, argument.value, "", "")


def full_names(source: Source) -> dict[str, str]:
    """What each imported name stands for: `import torch.distributed as dist` gives {"dist": "torch.distributed"}."""
    names = {}
    for found in imports(source):
        target = f"{found.module}.{found.name}" if found.name else found.module
        if found.name or found.bound != found.module:
            names[found.bound] = target
    return names


def uses(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every name, attribute chain and imported thing, by the full name it stands for."""
    names = full_names(source)
    for found in imports(source):
        yield found.node, f"{found.module}.{found.name}" if found.name else found.module
    for node in source.nodes:
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, _, rest = dotted(node).partition(".")
            if first:
                yield node, ".".join([names.get(first, first), *([rest] if rest else [])])
