"""List the packages that megazero imports, and report a missing one in one line.

A user who forgot to activate the environment gets this line in place of a traceback.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from megazero.base.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "Makefile").is_file()


@dataclass(frozen=True)
class Package:
    """A package, and whether training needs it.

    Attributes:
        name: its name for pip.
        module: its name for Python's import.
        least: the oldest version that works; () for any.
        use: the feature that needs an optional package; "" for a required one.
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
    Package("protobuf", "google.protobuf"),
    Package("xxhash", "xxhash"),
    Package("matplotlib", "matplotlib", use="loss.png and --draw"),
    Package("wandb", "wandb", use="observe.wandb"),
    Package("tensorboard", "tensorboard", use="observe.tensorboard"),
    Package("tokenizers", "tokenizers", use="tokenizer.json"),
    Package("tiktoken", "tiktoken", use="*.tiktoken"),
    Package("pyarrow", "pyarrow", use="text in .parquet, .arrow and .zst"),
    Package("jinja2", "jinja2", use="preprocess --chat"),
    Package("lm-eval", "lm_eval", (0, 4, 13), use="eval --tasks and observe.evaluate.tasks"),
    Package("transformers", "transformers", use="the tests of export and import"),
)
_NEEDED = tuple(package.module.partition(".")[0] for package in PACKAGES if not package.use)


def is_installed(module: str) -> bool:
    """Return True if a package can be imported; a plain folder of that name does not count."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def missing(name: str | None) -> UserError | None:
    """Return UserError 121 for a missing module; None if it belongs to no package of the list."""
    module = (name or "").partition(".")[0]
    package = next((each for each in PACKAGES if each.module.partition(".")[0] == module), None)
    if package is None:
        return None
    environment, do = ROOT / ".venv/bin", f"run `pip install {package.name}`"
    if not package.use and IS_CHECKOUT:
        found = environment.exists()
        do = f"source {environment / 'activate'}" if found else "run `make setup`, which installs all packages"
    return UserError(121, f"the package {package.name} is not installed for {sys.executable}", do)


def refuse_sinks(*, wandb: bool = False, tensorboard: bool = False) -> None:
    """Refuse a requested metrics sink whose package is not installed. Raises UserError 160, 161."""
    what, do = "the {0} package is not installed", "run `pip install {0}`, or set observe.{0}={1}"
    if wandb and not is_installed("wandb"):
        raise UserError(160, what.format("wandb"), do.format("wandb", "null"), where="observe.wandb")
    if tensorboard and not is_installed("tensorboard"):
        raise UserError(161, what.format("tensorboard"), do.format("tensorboard", "false"), where="observe.tensorboard")


def require() -> None:
    """End the process with a one-line message if a required package is missing."""
    name = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
    if name is not None:
        print(missing(name), file=sys.stderr)
        sys.exit(2)
