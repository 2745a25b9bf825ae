"""Name commands that the user of this copy of megazero has: a checkout has `make`, an installed package has none."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "Makefile").is_file()


def here(checkout: str, installed: str) -> str:
    """Return the first text in a checkout, the second where megazero was installed as a package."""
    return checkout if IS_CHECKOUT else installed
