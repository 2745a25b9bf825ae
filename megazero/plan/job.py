"""A training job as one value: everything that decides the memory, the traffic and the time of a step.

Fields that are options have the names of the config's options: `offload_optimizer` is `zero.offload.optimizer`.
`builders/job.py` converts a config to a job, and a job to options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megazero.base.quantized import BITS, BLOCK
from megazero.plan.flops import block_costs
from megazero.plan.model import Kind, Shape
from megazero.plan.optimizers import ADAMW, AVERAGE, STATES, Optimizers
from megazero.plan.placements import ALIGNMENT, STAGES, Placement
from megazero.schedules.layers import Layers, cut

Home = Literal["none", "cpu", "nvme"]  # the tiers of offload: on the device, on the host, on disks


@dataclass(frozen=True)
class Bytes:
    """The bytes of one element.

    Attributes:
        reduced: of a gradient while it is summed over the data axis and copies of a tied weight; None: `gradient`.
        narrow_matrices: optimizers of whole matrices compute in the dtype of parameters, not in that of updates.
        moment: of a value of optimizer state, averages apart; None: `master`.
    """

    parameter: int
    gradient: int
    master: int
    reduced: int | None = None
    narrow_matrices: bool = False
    moment: int | None = None

    @property
    def summed(self) -> int:
        """Return the bytes of a gradient while it is summed over ranks."""
        return self.gradient if self.reduced is None else self.reduced

    @property
    def whole(self) -> int:
        """Return the bytes of an element of a matrix that is updated whole."""
        return self.parameter if self.narrow_matrices else self.master

    @property
    def optimizer(self) -> int:
        """Return the bytes of AdamW's moments, and of the master where it is not the parameter itself."""
        return self.kept(STATES["adamw"]) + (0 if self.master == self.parameter else self.master)

    def kept(self, kinds: Sequence[str]) -> int:
        """Return the bytes of an element's optimizer state."""
        moment = self.master if self.moment is None else self.moment
        return sum(self.master if kind == AVERAGE else moment for kind in kinds)

    def moved_by_update(self, kept: int) -> int:
        """Return the bytes that an update moves for one element: state and master in and out, gradient, parameter.

        Args:
            kept: bytes of state of an element.
        """
        return 2 * (kept + self.master) + self.gradient + (0 if self.master == self.parameter else self.parameter)


@dataclass(frozen=True)
class Job:
    """A training job: model, precision, axes, placements, schedule, batch, recompute and offload.

    Attributes:
        shape: hyper-parameters of the model.
        bytes: bytes of an element of parameters (and activations), gradients, masters.
        tensor, pipeline, data: ranks of the three axes.
        micro_batch, global_batch: `batch.micro` and `batch.global`, in sequences.
        apart: host and device have separate memories; where they share one, nothing is offloaded to the host.
        mask_eod: attention does not cross the ends of documents.
        optimizers: which optimizer updates which parameter.
        norms: number of norms by which gradients are clipped.
        muon_steps: iterations of Muon.

    `megazero explain` describes the other fields under `parallel`, `pipeline`, `zero` and `memory`; and
    `model.loss_chunk`.
    """

    shape: Shape
    bytes: Bytes
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    tensor_chunks: int = 1
    loss_chunk: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    stage: int = 1
    shard_ranks: int | None = None
    secondary_ranks: int | None = None
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    partition: bool = False
    offload: Home = "none"
    cuda_graphs: bool = False
    offload_optimizer: Home = "none"
    offload_parameters: Home = "none"
    delayed: bool = False
    quantize_parameters: str = "none"
    quantize_gradients: str = "none"
    error_feedback: bool = False
    apart: bool = True
    mask_eod: bool = False
    optimizers: Optimizers = ADAMW
    norms: int = 1
    muon_steps: int = 5

    def __str__(self) -> str:
        """Return a short text of how the job differs from one process."""
        axes = {"tp": self.tensor, "pp": self.pipeline, "dp": self.data}
        words = [f"{name}{size}" for name, size in axes.items() if size > 1]
        words += [f"zero{self.stage}"] * (self.data > 1)
        words += [f"shard{self.shard_ranks}"] * (self.shard_ranks is not None)
        words += [f"secondary{self.secondary_ranks}"] * (self.secondary_ranks is not None)
        words += ["sequence"] * self.sequence + [f"tensor-chunks{self.tensor_chunks}"] * (self.tensor_chunks > 1)
        words += [self.schedule] * (self.pipeline > 1) + [f"loss-chunk{self.loss_chunk}"] * (self.loss_chunk > 0)
        words += [f"recompute-{self.recompute}"] * (self.recompute != "none")
        words += ["Pa" if self.offload == "none" else f"Pa+{self.offload}"] * self.partition
        words += ["graphs"] * self.cuda_graphs
        words += [f"offload-{self.offloaded}"] * (self.offloaded != "none") + ["delayed"] * self.delayed
        words += [f"parameters-{self.quantize_parameters}"] * (self.parameter_bits is not None)
        words += [f"gradients-{self.quantize_gradients}"] * (self.gradient_bits is not None)
        words += ["error-feedback"] * self.error_feedback
        return " ".join(words) or "one process"

    @property
    def ranks(self) -> int:
        """Return the total number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a step on each data rank."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a micro-batch."""
        return self.shape.seq_len * self.micro_batch

    @property
    def scored(self) -> int:
        """Return the number of tokens whose logits exist at a time."""
        return min(self.loss_chunk or self.tokens, self.tokens)

    def local(self, whole: int) -> int:
        """Return how many of `whole` elements of the residual stream a rank has: 1/t with sequence parallelism."""
        return whole // self.tensor if self.sequence else whole

    @property
    def stream(self) -> int:
        """Return the bytes of a rank's part of the residual stream of one micro-batch."""
        return self.local(self.tokens) * self.shape.hidden * self.bytes.parameter

    @property
    def parameter_bits(self) -> int | None:
        """Return the bits of a gathered parameter; None: not quantised."""
        return BITS[self.quantize_parameters]

    @property
    def gradient_bits(self) -> int | None:
        """Return the bits of a gradient that is sent to the rank that sums it; None: not quantised."""
        return BITS[self.quantize_gradients]

    @property
    def alignment(self) -> int:
        """Return the alignment of parameters in elements: ALIGNMENT, or a quantisation block if any are quantised."""
        return ALIGNMENT if self.parameter_bits is None and self.gradient_bits is None else BLOCK

    def blocks(self, parts: range) -> int:
        """Return how many of these parts are blocks: part 0 is the embedding, the last one the head."""
        return len(self.block_indices(parts))

    def kinds(self, parts: range) -> Mapping[Kind, int]:
        """Return how many blocks of each kind are among these parts."""
        return self.shape.counted(self.block_indices(parts))

    def lasts(self, parts: range) -> list[int]:
        """Return the last part of each kind of block among these parts."""
        return [*{self.shape.kind(i): i + 1 for i in self.block_indices(parts)[-len(self.shape.kinds) :]}.values()]

    def firsts(self, parts: range) -> list[int]:
        """Return the first part of each kind of block among these parts."""
        early = self.block_indices(parts)[: len(self.shape.kinds)]
        return [*{self.shape.kind(i): i + 1 for i in reversed(early)}.values()]

    def block_indices(self, parts: range) -> range:
        """Return the indices, from 0, of the blocks among these parts."""
        return range(max(parts.start, 1) - 1, min(parts.stop - 1, self.shape.layers))

    @property
    def shard(self) -> int:
        """Return the number of data ranks over which states are sharded."""
        return self.shard_ranks or self.data

    @property
    def gradient_hops(self) -> tuple[int, int] | None:
        """Return (ranks per group, groups): quantised gradients are summed in groups, then across; None: at once."""
        near = self.secondary_ranks
        if self.gradient_bits is None or near is None or near == self.data:
            return None
        return near, self.data // near

    @property
    def neighbours(self) -> int | None:
        """Return the size of groups of neighbouring data ranks, `shard_ranks` or `secondary_ranks`; None: one group."""
        return self.shard_ranks or self.secondary_ranks

    @property
    def replicas(self) -> int:
        """Return the number of groups of shard ranks; all groups hold the same values."""
        return self.data // self.shard

    @property
    def shard_axis(self) -> str:
        """Return the ledger's name of the axis over which states are sharded."""
        return "data" if self.replicas == 1 else "shard"

    @property
    def shards_parameters(self) -> bool:
        """True if parameters rest sharded, and are gathered where they are used (stage 3)."""
        return STAGES[self.stage].parameters is Placement.SHARD

    @property
    def shards_gradients(self) -> bool:
        """True if gradients rest sharded, and are reduced after each micro-batch (stages 2 and 3)."""
        return STAGES[self.stage].gradients is Placement.SHARD

    @property
    def shards_optimizer(self) -> bool:
        """True if each shard rank holds the optimizer state of its own shard and updates it (stages 1 to 3)."""
        return STAGES[self.stage].optimizer is Placement.SHARD

    @property
    def kinds_kept(self) -> tuple[str, ...]:
        """Return the names of the values that the run's optimizer keeps for an element."""
        return self.optimizers.states(self.optimizers.name)

    @property
    def kept(self) -> int:
        """Return the bytes of state that the run's optimizer keeps for an element."""
        return self.bytes.kept(self.kinds_kept)

    @property
    def uses_disks(self) -> bool:
        """True if anything rests on disks."""
        return "nvme" in (self.offload, self.offload_optimizer, self.offload_parameters)

    @property
    def offloaded(self) -> str:
        """Return the offloaded model states: none | optimizer | parameters | both; "nvme-" precedes those on disks."""
        rests = {"optimizer": self.offload_optimizer, "parameters": self.offload_parameters}
        words = []
        for home, prefix in (("cpu", ""), ("nvme", "nvme-")):
            there = [state for state, where in rests.items() if where == home]
            words += [prefix + ("both" if len(there) == 2 else there[0])] if there else []
        return "+".join(words) or "none"

    @property
    def optimizer_away(self) -> bool:
        """True if masters and moments are on the host or on disks; the host then runs the update."""
        return self.offload_optimizer != "none"

    @property
    def parameters_away(self) -> bool:
        """True if parameters are offloaded."""
        return self.offload_parameters != "none"

    @property
    def one_home(self) -> bool:
        """True if masters and parameters rest in the same tier; with one dtype they share the same memory."""
        return self.offload_optimizer == self.offload_parameters

    @property
    def gradients_home(self) -> Home:
        """Return where reduced gradients wait for the update: on the optimizer's tier, but on disks only if sharded."""
        if self.offload_optimizer == "nvme" and not self.shards_gradients:
            return "cpu" if self.apart else "none"
        return self.offload_optimizer

    @property
    def ties_ranks(self) -> bool:
        """True if the first and the last stage share a weight and are on different ranks."""
        return self.shape.tie_embeddings and self.layers.rank_of[0] != self.layers.rank_of[-1]

    @cached_property
    def at_rest(self) -> "Job":
        """Return the job with defaults for options that change neither the places of values at rest nor an update."""
        passes = {"micro_batch": 1, "global_batch": 1, "recompute": "none", "partition": False, "offload": "none"}
        return replace(self, **passes, loss_chunk=0, mask_eod=False, cuda_graphs=False)

    @property
    def alone(self) -> "Job":
        """Return the job of this model, precision and batch on one rank, with nothing recomputed or offloaded."""
        kept = ("micro_batch", "global_batch", "mask_eod", "optimizers", "norms", "muon_steps")
        return Job(self.shape, self.bytes, **{name: getattr(self, name) for name in kept})

    @property
    def omits_last(self) -> bool:
        """True if a replayed block leaves out its last product, whose result only a norm's backward would need."""
        return self.shape.norm_place == "pre"

    @cached_property
    def layers(self) -> Layers:
        """Return how the model is cut into stages."""
        return cut(self.schedule, self.pipeline, self.chunks, *block_costs(self.shape))
