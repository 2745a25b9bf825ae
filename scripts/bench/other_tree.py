"""Run our systems of another checkout of this project next to those of this one.

Their processes import megazero only from the other checkout, because torch accepts the fused operations of one tree per
process. Only numbers and text are passed to them, because the classes of two trees differ.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from scripts.bench.harness import Pair
from scripts.bench.processes import System


def add_before(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the other checkout."""
    says = "another checkout: each system of ours also runs from there"
    parser.add_argument("--before", type=checkout, metavar="TREE", help=says)


def checkout(path: str) -> str:
    """Return the absolute path of a checkout; an argparse type."""
    if not (Path(path) / "megazero/__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a checkout of this project: it has no megazero/__init__.py")
    return str(Path(path).resolve())


def with_before(systems: Sequence[System], tree: str | None, script: str, arguments: tuple) -> list[System]:
    """Return the systems, each "ours..." followed by "before...", its counterpart in the checkout `tree`, if given.

    In both trees `systems_of(*arguments)` of the script, a name in scripts/bench, returns them.
    """
    found = []
    for one in systems:
        found.append(one)
        if tree is not None and _before(one.name) != one.name:
            told = (tree, script, one.name, arguments)
            found.append(replace(one, name=_before(one.name), build=in_tree, arguments=told, needs_script=False))
    return found


def pairs_of(names: Collection[str]) -> list[Pair]:
    """Return a row for each pair of "ours..." and "before...": the ratio of their times."""
    named = [(name, _before(name)) for name in names]
    return [Pair(f"{ours} / {before}", ours, before) for ours, before in named if before != ours and before in names]


def in_tree(tree: str, script: str, name: str, arguments: tuple, *place: int | str) -> Callable[[], float]:
    """Build the system `name` of a script of another tree; `place`: further arguments of `System.build`.

    Raises:
        SystemExit: the tree lacks a module, or the module lacks the system; the text is one line.
    """
    assert "megazero" not in sys.modules, "this process has imported another tree"
    for module in [module for module in sys.modules if module.partition(".")[0] == "scripts"]:
        del sys.modules[module]
    sys.path.insert(0, tree)
    _import_from(tree, "megazero")
    systems_of = getattr(_import_from(tree, f"scripts.bench.{script}"), "systems_of", lambda *_: [])
    system = next((one for one in systems_of(*arguments) if one.name == name), None)
    if system is None:
        raise SystemExit(f"{tree}: scripts/bench/{script}.py has no system {name!r}")
    return system.build(*system.arguments, *place)


def _before(name: str) -> str:
    return "before" + name.removeprefix("ours") if name.startswith("ours") else name


def _import_from(tree: str, name: str) -> ModuleType:
    """Import a module and check that it comes from the tree and not from an installation."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{tree}: cannot import {name}: {error}") from None
    if not Path(module.__file__ or "/").resolve().is_relative_to(Path(tree).resolve()):
        raise SystemExit(f"{tree}: {name} was imported from {module.__file__}")
    return module
