"""A training job as one value: all that fixes the memory, the traffic and the time of a step, and no more.

`build/job.py` makes it from a config, and a config from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megazero.base.quantized import BLOCK
from megazero.plan.model import Micro, ModelShape
from megazero.plan.placements import ALIGNMENT, STAGES, Placement, ZeroStage
from megazero.plan.states import Bytes, UnitSize, units
from megazero.schedules.layers import Layers, cut


@dataclass(frozen=True)
class Job:
    """A training job: model, precision, axes, placements, schedule, batch, recompute and offload.

    Attributes:
        shape: the model's.
        bytes: of an element of parameters (and activations), gradients, masters.
        tensor, pipeline, data: ranks of the three axes.
        sequence: the residual stream is split over the tensor axis.
        tensor_chunks: of what forward sums and gathers over it, each beside the product of another.
        schedule, chunks: of the pipeline.
        stage: of ZeRO, a row of `placements.STAGES`.
        shard_ranks: data ranks over which it shards; None: all.
        secondary_ranks: data ranks that keep a second shard of parameters; None: nobody does.
        micro_batch, global_batch: sequences.
        recompute: none | selective | full.
        partition, offload, disk_inputs: of the inputs that full recompute keeps (Pa, Pa+cpu, Pa+nvme).
        graphs: blocks are replayed as CUDA graphs.
        offload_optimizer, offload_parameters: to the host.
        disk_optimizer, disk_parameters: to disks instead.
        parameter_bits, gradient_bits: of what is sent of them between shard ranks; None: it is sent as it is.
        error_feedback: what rounding gradients to that loses is kept, and sent with the next ones.
        apart: the host's memory is not the device's.
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
    tensor_chunks: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    stage: int = 1
    shard_ranks: int | None = None
    secondary_ranks: int | None = None
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    partition: bool = False
    offload: bool = False
    disk_inputs: bool = False
    graphs: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    disk_optimizer: bool = False
    disk_parameters: bool = False
    parameter_bits: int | None = None
    gradient_bits: int | None = None
    error_feedback: bool = False
    apart: bool = True
    delayed: bool = False
    dropout: bool = False
    documents: bool = False

    def __str__(self) -> str:
        """Return in a few words how the job differs from one process."""
        words = [f"{name}{size}" for name, size in (("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data))]
        words = [word for word in words if not word.endswith("p1")] + [f"zero{self.stage}"] * (self.data > 1)
        words += [f"shard{self.shard_ranks}"] * (self.shard_ranks is not None)
        words += [f"secondary{self.secondary_ranks}"] * (self.secondary_ranks is not None)
        words += ["sequence"] * self.sequence + [f"tensor-chunks{self.tensor_chunks}"] * (self.tensor_chunks > 1)
        words += [self.schedule] * (self.pipeline > 1)
        words += [f"recompute-{self.recompute}"] * (self.recompute != "none")
        words += [self.inputs] * self.partition + ["graphs"] * self.graphs
        words += [f"offload-{self.offloaded}"] * (self.offloaded != "none") + ["delayed"] * self.delayed
        words += [f"parameters-int{self.parameter_bits}"] * (self.parameter_bits is not None)
        words += [f"gradients-int{self.gradient_bits}"] * (self.gradient_bits is not None)
        words += ["error-feedback"] * self.error_feedback
        return " ".join(words) or "one process"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step, on each data rank."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def micro(self) -> Micro:
        """Return one micro-batch, on one rank."""
        return Micro(self.micro_batch, self.tensor, self.sequence, self.bytes.parameter, self.dropout, self.documents)

    @property
    def alignment(self) -> int:
        """Return the elements at a multiple of which parameters begin: a block where values are quantised."""
        return ALIGNMENT if self.parameter_bits is None and self.gradient_bits is None else BLOCK

    def units(self, parts: Sequence[range] | None = None) -> Sequence[UnitSize]:
        """Return the units of some parts of the model's path, on a tensor rank; see `states.units`."""
        return units(self.shape, self.tensor, None if parts is None else tuple(parts), self.alignment)

    @property
    def shard(self) -> int:
        """Return the number of data ranks over which states are sharded."""
        return self.shard_ranks or self.data

    @property
    def gradient_hops(self) -> tuple[int, int] | None:
        """Return the ranks of the two hops in which quantised gradients are reduced, near and far; None: in one."""
        near = self.secondary_ranks
        if self.gradient_bits is None or near is None or near == self.data:
            return None
        return near, self.data // near

    @property
    def neighbours(self) -> int | None:
        """Return how many neighbouring data ranks are an axis of their own, for shards or second ones; None: none."""
        return self.shard_ranks or self.secondary_ranks

    @property
    def replicas(self) -> int:
        """Return the number of such groups, which hold the same."""
        return self.data // self.shard

    @property
    def shard_axis(self) -> str:
        """Return the name of the axis over which states are sharded, as the ledger has it."""
        return "data" if self.replicas == 1 else "shard"

    @property
    def placements(self) -> ZeroStage:
        """Return where model states rest along the axis over which they are sharded."""
        return STAGES[self.stage]

    @property
    def shards_parameters(self) -> bool:
        """Return whether parameters rest sharded over that axis, and are gathered where they are used."""
        return self.placements.parameters is Placement.SHARD

    @property
    def shards_gradients(self) -> bool:
        """Return whether gradients rest sharded over that axis, and are reduced after each micro-batch."""
        return self.placements.gradients is Placement.SHARD

    @property
    def shards_optimizer(self) -> bool:
        """Return whether each rank of that axis updates its own shard, which is what its optimizer state is of."""
        return self.placements.optimizer is Placement.SHARD

    @property
    def inputs(self) -> str:
        """Return how the inputs that full recompute keeps are split and where they rest, in the paper's words."""
        return f"Pa{'+cpu' * self.offload}{'+nvme' * self.disk_inputs}" if self.partition else "whole"

    @property
    def inputs_away(self) -> Literal["host", "disk"] | None:
        """Return where the inputs that full recompute keeps rest; None: on the device."""
        return "disk" if self.disk_inputs else "host" if self.offload else None

    @property
    def uses_disks(self) -> bool:
        """Return whether anything rests on disks."""
        return self.disk_optimizer or self.disk_parameters or self.disk_inputs

    @property
    def offloaded(self) -> str:
        """Return which model states rest elsewhere: none | optimizer | parameters | both, on disks after "nvme-"."""
        host = ["optimizer"] * self.offload_optimizer + ["parameters"] * self.offload_parameters
        disks = ["optimizer"] * self.disk_optimizer + ["parameters"] * self.disk_parameters
        named = (
            (prefix, "both" if len(words) == 2 else "".join(words)) for prefix, words in (("", host), ("nvme-", disks))
        )
        return "+".join(prefix + words for prefix, words in named if words) or "none"

    @property
    def optimizer_away(self) -> bool:
        """Return whether masters and moments rest elsewhere than on the device, and the host updates."""
        return self.offload_optimizer or self.disk_optimizer

    @property
    def parameters_away(self) -> bool:
        """Return whether parameters rest elsewhere than on the device."""
        return self.offload_parameters or self.disk_parameters

    @property
    def one_home(self) -> bool:
        """Return whether masters rest where parameters do: of one dtype they are the same memory."""
        return (self.offload_optimizer, self.disk_optimizer) == (self.offload_parameters, self.disk_parameters)

    @property
    def gradients_away(self) -> Literal["host", "disk"] | None:
        """Return where reduced gradients wait for the update; None: on the device."""
        if self.disk_optimizer and self.shards_gradients:
            return "disk"
        return "host" if self.offload_optimizer or (self.disk_optimizer and self.apart) else None

    @property
    def ties_ranks(self) -> bool:
        """Return whether the first and the last stage share a weight and are on two ranks."""
        return self.shape.tied and self.layers.rank_of[0] != self.layers.rank_of[-1]

    @property
    def alone(self) -> "Job":
        """Return the same model, precision and batch on one rank, with nothing recomputed or offloaded."""
        return Job(
            self.shape,
            self.bytes,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            dropout=self.dropout,
            documents=self.documents,
        )

    @cached_property
    def layers(self) -> Layers:
        """Return how the model is cut into stages."""
        return cut(self.schedule, self.pipeline, self.chunks, self.shape.layers, self.shape.head_in_blocks())
