"""Where a process stands in the world: the only file that reads rank and size from the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megazero.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
DO = "unset them or start through torchrun"


@dataclass(frozen=True)
class World:
    """All ranks of a run, as one of them sees it."""

    rank: int
    size: int
    local_rank: int

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU where there is none."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def world_from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """The world that torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID) set.

    One process where neither did. Values that are no place in a world, or only some of torchrun's three, are a
    UserError 111: ranks that each took themselves for the whole run would write into one folder.
    """
    for names in (TORCHRUN, SLURM):
        if all(name in environment for name in names):
            return _world(names, environment)
    given = [name for name in TORCHRUN if name in environment]
    if "WORLD_SIZE" in given or "RANK" in given:
        missing = [name for name in TORCHRUN if name not in environment]
        raise UserError(111, f"{' and '.join(given)} set, {' and '.join(missing)} not", DO)
    return World(rank=0, size=1, local_rank=0)


def _world(names: tuple[str, str, str], environment: Mapping[str, str]) -> World:
    try:
        world = World(*(int(environment[name]) for name in names))
    except ValueError:
        world = None
    if world is None or not 0 <= world.rank < world.size or world.local_rank < 0:
        got = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError(111, f"expected 0 <= rank < size and local rank >= 0, got {got}", DO)
    return world
