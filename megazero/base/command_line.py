"""Parse command lines the same way in all verbs: mistakes raise a UserError, numbers have bounds."""

import argparse

from megazero.base.errors import UserError

OVERRIDES = """overrides:
  section.key=value changes one option of the config; the value is YAML, null unsets;
  if an option is given twice, the last value counts; FILE.yaml holds many overrides

      train --config tiny run.steps=50 optimizer.lr=3e-4 'optimizer.betas=[0.9, 0.99]'

  megazero explain                  lists all options and what they mean
  megazero explain optimizer        lists the options of a section
  megazero explain --config tiny    lists all with the values of a config
  Paths are relative to the current folder.
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises a UserError for a mistake on the command line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise UserError 100 instead of exiting as argparse does."""
        raise UserError(100, message, f"see `{self.prog} --help`")


def tokens(text: str) -> float:
    """Return the value of an option that counts tokens: 300B, 1.5T, 5e9."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0)
    try:
        return at_least(1, float)(text[:-1] if factor else text) * (factor or 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 5e9 or 300B, got {text:.40}") from None


def at_least(bound: float, kind: type, most: int = 2**63 - 1):
    """Return an argparse type: a number of `kind` that is >= `bound` and <= `most`."""

    def parse(text: str):
        value = kind(text) if len(text) < 100 else None  # Python refuses to read thousands of digits
        if value is None or not bound <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {bound} to {most:,}, got {text:.40}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid float value"
    return parse
