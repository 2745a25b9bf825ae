"""Train a config: python train.py --config gpt13b.yaml [section.key=value ...] [--nproc N]."""

import sys

from megazero.__main__ import command

if __name__ == "__main__":
    sys.exit(command(["train", *sys.argv[1:]]))
