"""Distinguish a checkout, which has `make` targets, from an installed package, for commands in messages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "Makefile").is_file()


def here(checkout: str, installed: str) -> str:
    """Return `checkout` in a checkout, `installed` where megazero is installed as a package."""
    return checkout if IS_CHECKOUT else installed
