"""Train a config: python train.py --config gpt13b.yaml [section.key=value ...] [--nproc N]."""

import sys

from megazero.base.stop_signals import end_at_once, handle

if __name__ == "__main__":
    handle(end_at_once)  # before the slow imports, so that a signal during them is handled
    from megazero.__main__ import command

    sys.exit(command(["train", *sys.argv[1:]]))
