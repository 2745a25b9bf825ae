"""Fine-tune a transformers model: read a folder, write a folder, with ZeRO over all ranks.

    python examples/finetune.py FOLDER --output TUNED                one rank
    torchrun --nproc-per-node 2 examples/finetune.py FOLDER --output TUNED --stage 3

FOLDER is a folder that `save_pretrained` wrote. All parameters but those of the second half of the blocks are frozen:
they have no gradients and no optimizer state, and are sharded too. The model is built on the meta device, so that no
rank ever holds all of it: its values are read from the folder, one tensor at a time.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

import megazero
from examples.gpt2 import loss
from examples.training import counting


def build(folder: Path) -> nn.Module:
    """Return the folder's model on the meta device; only the second half of its blocks is trainable."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.requires_grad_(False)
    blocks = model.transformer.h
    blocks[len(blocks) // 2 :].requires_grad_(True)
    return model


def reader(folder: Path) -> Callable[[str, Tensor], None]:
    """Return a function (name, tensor) that fills a tensor with the folder's values."""
    file = safe_open(folder / "model.safetensors", framework="pt")
    keys = set(file.keys())

    def fill(name: str, tensor: Tensor) -> None:
        found = next(key for key in (name, f"transformer.{name}", name.removeprefix("transformer.")) if key in keys)
        tensor.copy_(file.get_tensor(found))

    return fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    sharded = megazero.shard(
        build(options.folder),
        {"name": "adamw", "lr": 1e-4},
        stage=options.stage,
        initial=reader(options.folder),
        clip=1.0,
    )
    for step in range(options.steps):
        sharded.backward(loss(sharded, counting(step, sharded.rank)))  # type: ignore[arg-type]
        found = sharded.step()
        if sharded.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {found.loss:.4f}")
    state = sharded.full_state_dict()
    if sharded.rank == 0:
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.folder))
        whole.load_state_dict(state)
        whole.save_pretrained(options.output)


if __name__ == "__main__":
    main()
