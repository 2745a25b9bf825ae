"""`megazero certify`: the command line of `tools/certify/`. Imports torch only when it runs."""

import argparse
from typing import Any

from megazero.base.answers import show, tell
from megazero.base.command_line import at_least
from megazero.base.doing import ACTIVITIES, doing
from megazero.base.errors import UserError
from megazero.base.stop_signals import handle, restore


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options to its parser, which already has the config's options."""
    parser.add_argument("--max-ranks", type=at_least(1, int, 32), default=8, help="most ranks of a layout (default: 8)")
    layouts = "most layouts to compare; those that cover most pairs of values come first (default: 160)"
    parser.add_argument("--layouts", type=at_least(1, int), default=160, help=layouts)
    steps = "training steps to compare (default: 4)"
    parser.add_argument("--steps", type=int, choices=range(1, 21), default=4, help=steps, metavar="1-20")
    plant = "plant faults into layouts and report which of them are found, in every precision"
    parser.add_argument("--plant", action="store_true", help=plant)
    parser.add_argument("--fault", action="append", metavar="NAME", help="plant only this fault; may be repeated")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Compare layouts with one process, or plant faults into them; return the exit code."""
    from megazero.config.file import load
    from megazero.tools.planning.micro_batch import sized

    config = sized(load(options.config, options.overrides), options.max_ranks)
    with doing("loading torch"):
        from megazero.tools.certify.certify import end_by

    before = handle(end_by)
    try:
        return (_plant if options.plant or options.fault else _compare)(config, options)
    finally:
        restore(before)


def _compare(config: Any, options: argparse.Namespace) -> int:
    from megazero.tools.certify.certify import certify
    from megazero.tools.certify.layouts import layouts_of, pairs_missed, sample_of, with_one_process
    from megazero.tools.certify.report import as_json, table

    with doing("choosing layouts"):
        allowed = layouts_of(config, options.max_ranks)
        layouts = sample_of(allowed, options.layouts)
    if not layouts:
        what = f"no layout of up to {options.max_ranks} ranks to compare with one process"
        raise UserError(106, what, "raise --max-ranks, or batch.global", where="certify")
    missed, pairs = pairs_missed(allowed, layouts)
    if missed:
        tell(f"{len(layouts)} of {len(allowed)} layouts: {missed} of {pairs} pairs of values are in none of them")
    ACTIVITIES.now("comparing layouts")
    compared, rows = with_one_process(layouts), []
    for row in certify(config, compared, options.steps):
        rows.append(row)
        tell(f"{len(rows)}/{len(compared)} {row.layout}: {row.fault or row.summary}")
    told = rows, config, options.steps
    show(as_json(*told), table(*told), as_json=options.json)
    return 1 if any(row.fault for row in rows) else 0


def _plant(config: Any, options: argparse.Namespace) -> int:
    from megazero.tools.certify.planting import as_json, names, plant, table

    chosen, found = options.fault or names(), []
    if unknown := set(chosen) - set(names()):
        raise UserError(100, f"--fault {min(unknown)}: expected one of {', '.join(names())}", where="certify")
    for each in plant(config, chosen, options.steps):
        found.append(each)
        verdict = "" if each.right else "WRONG, "
        tell(f"{each.dtype} {each.fault}: {verdict}{each.measure} {each.times:.2g}")
    show(as_json(found, options.steps), table(found, options.steps), as_json=options.json)
    return 0 if all(each.right for each in found) else 1
