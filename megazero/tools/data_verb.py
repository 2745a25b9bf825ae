"""`megazero data`: the command line of `tools/seen_text.py`. Imports torch only when it runs."""

import argparse
from pathlib import Path
from typing import Any

from megazero.base.answers import show
from megazero.base.command_line import at_least
from megazero.base.doing import doing


def add(verbs: Any) -> None:
    """Add the verb `data` to the subparsers of the command line."""
    data = verbs.add_parser("data", help="show which text a step of a run read")
    data.add_argument("--run", dest="run_folder", type=Path, required=True, help="the run's folder")
    steps = "the step whose text to show, counted from 1 as in metrics.jsonl"
    data.add_argument("--step", type=at_least(1, int), required=True, help=steps)
    data.add_argument("--rank", type=at_least(0, int), help="only what this rank read, on the newest checkpoint's grid")
    data.add_argument("--json", action="store_true")
    data.set_defaults(run=_data)


def _data(options: argparse.Namespace) -> int:
    with doing("loading torch"):
        from megazero.run.folder import RunFolder
        from megazero.tools.seen_text import as_text, step_text

    found = step_text(RunFolder(options.run_folder), options.step, options.rank)
    return show(found, as_text(found), as_json=options.json)
