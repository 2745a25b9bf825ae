"""Who may import whom: the floors of the house, with no arrow upwards and no circle.

Imports inside functions and under TYPE_CHECKING count: an arrow is an arrow. A new room or top-level module gets a row
here first; that is the moment to think about where it stands.
"""

from collections.abc import Iterator

import pytest

from tests.house.source import FOLDERS, Source, imports, project

EVERYTHING = None

# What everyone may import of ours.
COMMON = {"base"}
MAY_IMPORT: dict[str, set[str] | None] = {
    "base": set(),
    # ground floor
    "comm": set(),
    "launcher": {"comm"},
    "kernels": set(),
    "schedules": set(),
    "nvme": {"comm.home", "comm.ledger", "comm.pinned", "kernels.build"},
    "plan": {"comm.axes", "schedules"},
    "config": set(),
    # first floor
    "model": {"comm", "kernels", "plan.heads", "plan.matrices", "plan.model"},
    # second floor: never the model, and each other only where named
    "zero": {"comm", "kernels", "optim", "plan.matrices", "plan.optimizers", "plan.placements"},
    "optim": {
        *("comm", "kernels", "plan.matrices", "plan.optimizers", "plan.placements"),
        *("zero.layout", "zero.placement", "zero.unit"),
    },
    "memory": {"comm", "zero.gradients"},
    "pipeline": {"comm", "schedules"},
    "extensions": {"comm", "config", "kernels", "nvme.opening", "zero"},  # of zero, which the registry alone knows
    # third floor
    "checkpoint": {"comm", "optim.optimizer", "plan.optimizers", "plan.placements", "zero.layout", "zero.unit"},
    "data": set(),
    "observe": {"comm", "zero.unit"},
    # a run, from its step to its folder
    "train": {
        "checkpoint",
        "comm",
        "data",
        "launcher.signals",
        "observe",
        "optim.learning_rate",
        "pipeline",
        "schedules.actions",
        "zero.engine",
    },
    "builders": {  # from a config to what computes a step
        "comm",
        "config",
        "data.batch",
        "extensions.registry",
        "kernels.operations",
        "launcher.world",
        "memory",
        "model",
        "optim",
        "pipeline",
        "plan",
        "schedules",
        "zero",
    },
    "run": EVERYTHING,
    # ZeRO for modules of others
    "library": {
        *("checkpoint", "comm", "kernels", "launcher", "optim"),
        *("plan.matrices", "plan.optimizers", "plan.placements", "zero"),
        *("builders.units", "config", "extensions", "run.disks"),  # tiers
    },
    # what no run imports
    "generation": {"comm", "data", "kernels", "model", "plan.cache"},
    "evaluation": {
        *("builders.assemble", "comm", "config", "data", "generation", "launcher.environment", "model.batch_context"),
        *("observe.metrics", "train.validation"),
    },
    "tools": EVERYTHING,
    "__main__": EVERYTHING,
}
OUTSIDE = {"train", "tests", *FOLDERS} - {"megazero"}  # commands use the package, never the other way round


def targets(source: Source, modules: set[str]) -> Iterator[tuple[str, str]]:
    """(place, module of the project) for each import; `from package import module` is the module."""
    for found in imports(source):
        whole = f"{found.module}.{found.name}" if found.name else found.module
        target = whole if whole in modules else found.module
        if target.split(".")[0] in {"megazero", *OUTSIDE}:
            yield source.at(found.node), target


def _modules(sources: list[Source]) -> set[str]:
    """Modules and packages; a package need not have an __init__."""
    modules = {source.module for source in sources}
    return modules | {module.rpartition(".")[0] for module in modules}


def forbidden_arrows(sources: list[Source]) -> list[str]:
    modules = _modules(sources)
    return [
        f"{place} imports {target}"
        for source in sources
        if source.module.startswith("megazero.")
        for place, target in targets(source, modules)
        if not allowed(source.module.split(".")[1], target)
    ]


def allowed(room: str, target: str) -> bool:
    """Return whether a room may import a module; tools are for the verbs alone, and for each other."""
    top, _, inside = target.partition(".")
    if top in OUTSIDE:
        return False
    assert room in MAY_IMPORT, f"megazero.{room} has no row in MAY_IMPORT"
    may = MAY_IMPORT[room]
    if inside.startswith("tools.") and room not in ("tools", "__main__"):
        return False
    if may is EVERYTHING or not inside:  # the bare package holds the version only
        return True
    return any(inside == name or inside.startswith(f"{name}.") for name in {room, *COMMON, *may})


def circle(sources: list[Source]) -> list[str]:
    """The modules of one import circle, in order, or nothing."""
    modules = _modules(sources)
    graph = {source.module: sorted({target for _, target in targets(source, modules)}) for source in sources}
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for target in graph.get(module, []):
            if target != module and (found := visit(target)):
                return found
        done.add(path.pop())
        return []

    for module in sorted(graph):
        if found := visit(module):
            return found
    return []


def test_no_arrow_but_those_in_the_table():
    assert forbidden_arrows(project()) == []


def test_no_circle():
    assert circle(project()) == []


def test_every_row_names_rooms_that_have_a_row():
    named = {name.split(".")[0] for may in MAY_IMPORT.values() for name in may or ()}
    assert named <= set(MAY_IMPORT)


def test_the_package_itself_imports_its_version_alone():
    (package,) = [source for source in project() if source.module == "megazero"]
    for_types = ("megazero.library.", "megazero.tools.opened")
    when_imported = [found.module for found in imports(package) if not found.module.startswith(for_types)]
    assert set(when_imported) == {"importlib", "typing", "megazero.base.version"}


def two(text: str, path: str) -> list[Source]:
    others = [
        "model/block.py",
        "zero/layout.py",
        "zero/unit.py",
        "zero/engine.py",
        "base/errors.py",
        "pipeline/stage.py",
        "schedules/actions.py",
    ]
    return [Source(path, text), *(Source(f"megazero/{other}", "") for other in others)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("megazero/zero/planted.py", "import megazero.model.block"),
        ("megazero/zero/planted.py", "from megazero.model.block import Block"),
        ("megazero/zero/planted.py", "from megazero import model"),
        ("megazero/zero/planted.py", "from ..pipeline import stage"),
        ("megazero/zero/planted.py", "from .. import pipeline"),
        ("megazero/zero/planted.py", "def late():\n    from megazero.pipeline.stage import Stage"),
        ("megazero/zero/planted.py", "import importlib\nimportlib.import_module('megazero.model.block')"),
        ("megazero/checkpoint/planted.py", "from megazero.zero import engine"),
        ("megazero/checkpoint/planted.py", "from megazero.zero.engine import Engine"),
        ("megazero/model/planted.py", "from megazero.schedules.actions import F"),
        ("megazero/model/planted.py", "from tests.ranks import spawn"),
        ("megazero/model/planted.py", "import data_tools.preprocess"),
        ("megazero/config/schema.py", "from megazero.builders.assemble import build"),
    ],
)
def test_planted_arrow_is_found(path: str, text: str):
    assert len(forbidden_arrows(two(text, path))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("megazero/zero/planted.py", "from megazero.base.errors import UserError\nfrom megazero.zero import engine"),
        ("megazero/zero/planted.py", "from . import unit\nfrom .layout import Layout\nimport torch, model"),
        ("megazero/checkpoint/planted.py", "from megazero.zero.layout import Layout\nfrom megazero.zero import layout"),
        ("megazero/checkpoint/planted.py", "from megazero import __version__"),
        ("megazero/builders/assemble.py", "from megazero.model.block import Block\nfrom megazero.zero.unit import U"),
    ],
)
def test_allowed_arrow_is_not(path: str, text: str):
    assert forbidden_arrows(two(text, path)) == []


def test_room_without_a_row_is_refused():
    with pytest.raises(AssertionError, match="attic has no row"):
        forbidden_arrows(two("import megazero.base.errors", "megazero/attic.py"))


def test_planted_circle_is_found():
    a = Source("megazero/zero/a.py", "from megazero.zero.b import f")
    b = Source("megazero/zero/b.py", "from . import c")
    c = Source("megazero/zero/c.py", "def f():\n    import megazero.zero.a")
    assert circle([a, b, c]) == ["megazero.zero.a", "megazero.zero.b", "megazero.zero.c", "megazero.zero.a"]
    assert circle([a, b]) == []
