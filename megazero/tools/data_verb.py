"""`megazero data`: the command line of what `tools/seen_text.py` finds. Imports torch only when it runs."""

import argparse
from pathlib import Path
from typing import Any

from megazero.base.answers import show
from megazero.base.command_line import at_least
from megazero.base.doing import doing
from megazero.base.errors import UserError


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    data = verbs.add_parser("data", help="tell which text a step of a run saw, or when a document was seen")
    data.add_argument("--run", dest="run_folder", type=Path, required=True, help="the run's folder")
    which = data.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=at_least(1, int), help="of which to show the text, counted from 1 as in the rows")
    data.add_argument("--rank", type=at_least(0, int), help="only what this rank read, on the newest checkpoint's grid")
    which.add_argument("--document", type=at_least(0, int), help="of which to show in which steps it was read, instead")
    data.add_argument("--source", metavar="NAME", help="of the document, where there are several")
    data.add_argument("--shard", metavar="NAME", help="of the document, where the source is a folder of shards")
    data.add_argument("--json", action="store_true")
    data.set_defaults(run=_data)


def _data(options: argparse.Namespace) -> int:
    step, document = options.step, options.document
    for name, needs in {"rank": step, "source": document, "shard": document}.items():
        if getattr(options, name) is not None and needs is None:
            raise UserError(100, f"--{name} goes with --{'step' if name == 'rank' else 'document'}", where="data")
    with doing("loading torch"):
        from megazero.run.folder import RunFolder
        from megazero.tools.seen_text import as_text, step_text, steps_of

    folder = RunFolder(options.run_folder)
    if document is None:
        found = step_text(folder, step, options.rank)
    else:
        found = steps_of(folder, document, options.source, options.shard)
    show(found, as_text(found), as_json=options.json)
    return 0
