"""Report a missing package in one line: a user who forgot to activate the environment gets no traceback."""

import sys
from importlib.util import find_spec
from pathlib import Path

from megazero.base.errors import UserError

_NEEDED = ("torch", "numpy", "einops", "pydantic", "ruamel", "safetensors", "sentencepiece", "rich", "xxhash")


def missing(name: str | None) -> UserError | None:
    """Return error 121 for a module that is missing; None: it is none of those that megazero needs."""
    package = (name or "").partition(".")[0]
    if package not in _NEEDED:
        return None
    environment = Path(__file__).resolve().parents[2] / ".venv/bin"
    do = f"source {environment / 'activate'}" if environment.exists() else "`make setup` makes an environment with all"
    return UserError(121, f"the package {package} is not installed for {sys.executable}", do)


def require() -> None:
    """End the process with one line where a package is missing."""
    name = next((name for name in _NEEDED if find_spec(name) is None), None)
    if name is not None:
        print(missing(name), file=sys.stderr)
        sys.exit(2)
