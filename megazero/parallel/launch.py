"""Where a process stands in the world: the only file that reads rank and size from the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megazero.errors import UserError


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

    One process where neither did. Values that are not numbers are a UserError 111.
    """
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(name in environment for name in names):
            try:
                return World(*(int(environment[name]) for name in names))
            except ValueError:
                got = ", ".join(f"{name}={environment[name]}" for name in names)
                raise UserError(111, f"expected numbers, got {got}", "unset them or start through torchrun") from None
    return World(rank=0, size=1, local_rank=0)
