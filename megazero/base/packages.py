"""The packages that megazero imports; a missing one is reported in one line.

A user who forgot to activate the environment gets no traceback.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megazero.base.errors import UserError


@dataclass(frozen=True)
class Package:
    """A package, and whether training needs it.

    Attributes:
        name: as pip knows it.
        module: as Python imports it.
        least: the oldest version that does, () for any.
        use: what an optional one is for; "" for one that is needed.
    """

    name: str
    module: str
    least: tuple[int, ...] = ()
    use: str = ""


PACKAGES = (
    Package("torch", "torch", (2, 10)),
    Package("numpy", "numpy"),
    Package("einops", "einops"),
    Package("pydantic", "pydantic", (2, 10)),
    Package("ruamel.yaml", "ruamel.yaml", (0, 18)),
    Package("safetensors", "safetensors"),
    Package("sentencepiece", "sentencepiece"),
    Package("rich", "rich"),
    Package("xxhash", "xxhash"),
    Package("matplotlib", "matplotlib"),
    Package("wandb", "wandb", use="observe.wandb"),
    Package("tensorboard", "tensorboard", use="observe.tensorboard"),
    Package("tokenizers", "tokenizers", use="tokenizer.json"),
    Package("tiktoken", "tiktoken", use="*.tiktoken"),
    Package("pyarrow", "pyarrow", use="text in .parquet and .arrow"),
    Package("zstandard", "zstandard", use="text in .zst"),
    Package("jinja2", "jinja2", use="preprocess.py --chat"),
    Package("transformers", "transformers", use="the tests of export and import"),
)
_NEEDED = tuple(package.module.partition(".")[0] for package in PACKAGES if not package.use)


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
