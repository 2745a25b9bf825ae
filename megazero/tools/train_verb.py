"""`megazero train`, also `train.py`: run the checks that need no torch, then the training."""

import argparse

from megazero.base.command_line import at_least
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import end_at_once, end_silently, handle, restore

MOST_LOCAL = 1024  # ranks that are started on one machine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument("--nproc", type=at_least(1, int, MOST_LOCAL), help="local ranks to start")
    share = "allow more ranks than GPUs: they share GPUs and exchange data through host memory; slow, to try layouts"
    parser.add_argument("--share-gpus", action="store_true", help=share)
    allow = "options or sections that may differ from the checkpoint to resume, such as data,optimizer.betas"
    parser.add_argument("--allow-change", metavar="KEYS", help=allow)


def run(options: argparse.Namespace) -> int:
    """Train a config; return the exit code. torch is imported only after the config has been checked."""
    from megazero.config.file import load, name_of
    from megazero.config.flat import option_keys
    from megazero.config.permitted import permitted
    from megazero.launcher.environment import set_for_gpus, world_from_environment
    from megazero.tools.training.early_look import look

    world = world_from_environment()
    before = handle(end_at_once if world.rank == 0 else end_silently)
    try:
        set_for_gpus()
        if world.rank:
            HEART.end()
        config = load(options.config, options.overrides)
        allowed = () if options.allow_change is None else permitted(options.allow_change, option_keys())
        if allowed and config.checkpoint.resume == "none":
            do = "give checkpoint.resume=auto or PATH, or leave it out"
            raise UserError(100, "--allow-change is for a resumed run", do, where="train")
        if not world.launcher:
            look(config, name_of(options.config), options.nproc)
        with doing("loading torch"):
            from megazero.tools.training.launch import launch

        name, shares = name_of(options.config), options.share_gpus
        return launch(config, name, options.nproc, shares_gpus=shares, allowed=allowed)
    finally:
        restore(before)
