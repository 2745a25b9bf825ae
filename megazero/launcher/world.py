"""The ranks of a run, as one of them sees them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class World:
    """All ranks of a run, as one of them sees it.

    Attributes:
        rank, size: the rank of this process, and the number of ranks.
        local_rank: the rank of this process on its host.
        launcher: "torchrun", "srun", "local" (`spawn.py`), or "" for a single process.
        shares_gpus: ranks of a host use its GPUs in turn, so there may be more ranks than GPUs. They communicate
            through host memory, because NCCL refuses two ranks on one device.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str = ""
    shares_gpus: bool = False

    @property
    def device(self) -> "torch.device":
        """Return this rank's GPU, or the CPU if there is none. A rank that sees only one GPU (srun) uses that one."""
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        gpus = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank % gpus if gpus == 1 or self.shares_gpus else self.local_rank)
