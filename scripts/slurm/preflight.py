"""Summarise the output of `megazero doctor --json` of all nodes of a job: one line per node.

    python -m scripts.slurm.preflight FOLDER NODE...

FOLDER has NODE.json of every node that answered, and NODE.err with its standard error. The exit code is 1 if a node
lacks something that training needs, or did not answer. A rate below SLOW times the median over the nodes is shown, but
does not change the exit code: a busy node is slow only for a while.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megazero.base.errors import one_line

SLOW = 0.7  # of the median: idle nodes vary less, a lost link or a hot GPU costs more
_RATES = ("flops", "bandwidth")
_SHOWN = ("GPUs", "processor", "memory")


def main(arguments: Sequence[str]) -> int:
    """Print the lines; return the exit code."""
    folder, *nodes = arguments
    answers = {node: _answer(Path(folder), node) for node in nodes}
    rates = {node: _rates(found) for node, found in answers.items() if not isinstance(found, str)}
    usual = _medians(list(rates.values()))
    faulty = 0
    for node, found in answers.items():
        if isinstance(found, str):
            text, faulty = f"did not answer: {found}", faulty + 1
        elif missing := _missing(found):
            text, faulty = f"missing: {missing}", faulty + 1
        else:
            text = "ok: " + "; ".join([*_shown(found), *_slow(rates[node], usual)])
        print(one_line(f"{node}: {text}"))
    print(f"{len(nodes) - faulty} of {len(nodes)} nodes can train; what each said is in {folder}")
    return 1 if faulty else 0


def _answer(folder: Path, node: str) -> dict[str, Any] | str:
    """Return the output of doctor on a node, or why there is none."""
    try:
        found = json.loads((folder / f"{node}.json").read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("parts"), dict):
            return found
    except (OSError, ValueError):
        pass
    try:
        said = (folder / f"{node}.err").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        said = []
    return next((line for line in reversed(said) if line.strip()), "it said nothing")


def _findings(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [finding for part in found["parts"].values() for finding in part]


def _missing(found: Mapping[str, Any]) -> str:
    lines = [finding for finding in _findings(found) if finding["state"] == "missing"]
    return "; ".join(f"{finding['name']} ({finding['text']})" for finding in lines)


def _shown(found: Mapping[str, Any]) -> list[str]:
    texts = {finding["name"]: finding["text"] for finding in _findings(found)}
    return [texts[name] for name in _SHOWN if name in texts]


def _rates(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured rates by name; higher is better."""
    measured = [(finding["name"], finding.get("values") or {}) for finding in _findings(found)]
    return {name: values[rate] for name, values in measured for rate in _RATES if values.get(rate)}


def _medians(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for of_node in rates for name in of_node}
    return {name: statistics.median([of[name] for of in rates if name in of]) for name in sorted(names)}


def _slow(rates: Mapping[str, float], usual: Mapping[str, float]) -> list[str]:
    low = {name: rate / usual[name] for name, rate in rates.items() if rate < SLOW * usual[name]}
    return [f"SLOW {name}, {share:.0%} of the median node" for name, share in low.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
