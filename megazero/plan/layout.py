"""A model, its parallel axes and what is kept: all that fixes the memory, the traffic and the time of a step."""

from dataclasses import dataclass
from functools import cached_property

from megazero.plan.model import ModelShape
from megazero.plan.states import Bytes
from megazero.schedules.layers import Layers, cut


@dataclass(frozen=True)
class Layout:
    """A training job, as the closed formulas see it.

    Attributes:
        shape: the model's.
        bytes: of an element of parameters (and activations), gradients, masters.
        tensor, pipeline, data: ranks of the three axes.
        sequence: the residual stream is split over the tensor axis.
        schedule, chunks: of the pipeline.
        stage: of ZeRO.
        shard_ranks: data ranks over which it shards; None: all.
        micro_batch, global_batch: sequences.
        recompute: none | selective | full.
        partition, offload: of the inputs that full recompute keeps (Pa, Pa+cpu).
        offload_optimizer, offload_parameters: to the host.
        delayed: the host updates beside the next step, which takes no more memory.
        dropout: the model has dropout, so there are masks.
        documents: attention does not cross the ends of documents.
    """

    shape: ModelShape
    bytes: Bytes
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    stage: int = 1
    shard_ranks: int | None = None
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    partition: bool = False
    offload: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    delayed: bool = False
    dropout: bool = False
    documents: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step, on each data rank."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def shard(self) -> int:
        """Return the number of data ranks over which states are sharded."""
        return self.shard_ranks or self.data

    @property
    def replicas(self) -> int:
        """Return the number of such groups, which hold the same."""
        return self.data // self.shard

    @property
    def shard_axis(self) -> str:
        """Return the name of the axis over which states are sharded, as the ledger has it."""
        return "data" if self.replicas == 1 else "shard"

    @cached_property
    def layers(self) -> Layers:
        """Return how the model is cut into stages."""
        return cut(self.schedule, self.pipeline, self.chunks, self.shape.layers, self.shape.head_in_blocks())
