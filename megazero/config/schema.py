"""The configuration: one frozen model per section, unknown keys refused.

    run      model    parallel   zero       memory     pipeline   precision
    optimizer  schedule  batch    data       checkpoint  observe

A file is YAML 1.2 (3e-4 is a number, `no` is a string, a key given twice is an error); `section.key=value` on the
command line overrides it. Whatever is wrong is found here, before torch is imported: an unknown key is answered with
the nearest valid one and its line, wrong types and all broken relations between options are reported together.

Only `config/`, `build/`, `run/` and `tools/` ever see it; every object below receives plain values. How files
are read is `config/file.py`; which options go together is `config/rules.py`.
"""

import re
from pathlib import PurePath
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megazero.config.sections import (
    IN_NAMES,
    Layers,
    NonNegative,
    Positive,
    Ranks,
    Section,
    Sequences,
    Source,
    Sources,
    Text,
    Tokens,
    ValidationSet,
)
from megazero.config.stage_sections import Stage


class Run(Section):
    dir: Text | None = Field(
        default=None, description="Run directory, from the current folder; null: runs/<config name>."
    )
    steps: Positive = Field(default=1000, description="Training steps (batches consumed, skipped or not).")
    seed: NonNegative = Field(default=0, description="Decides initial weights, dropout masks and the order of samples.")
    time_limit: Positive | None = Field(default=None, description="Seconds after which the run saves and exits 75.")
    deterministic: bool = Field(
        default=False,
        description="The same bits in every run on a GPU, at some speed; on a CPU they always are.",
    )


class Model(Section):
    layers: Layers = Field(default=12, description="Transformer blocks, L.")
    hidden: Positive = Field(default=768, description="Hidden size, h.")
    heads: Positive = Field(default=12, description="Query heads, a.")
    kv_heads: Positive | None = Field(default=None, description="Key-value heads (grouped queries); null: heads.")
    ffn: Positive | None = Field(
        default=None,
        description="Feed-forward size; null: 4 hidden (gelu), 8/3 hidden rounded up to a multiple of 256 (swiglu).",
    )
    vocab: Positive = Field(default=50257, description="Vocabulary size, V.")
    seq_len: Tokens = Field(default=1024, description="Sequence length in tokens, s.")
    position: Literal["learned", "rotary"] = Field(default="learned", description="Position embedding.")
    norm: Literal["layernorm", "rmsnorm"] = Field(
        default="layernorm",
        description="Norm; linear layers carry biases exactly with layernorm (GPT), not with rmsnorm (Llama).",
    )
    activation: Literal["gelu", "swiglu"] = Field(
        default="gelu", description="Feed-forward kind; gelu is the tanh form."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropped share at the embedding and residual sites; attention is never dropped."
    )
    tie_embeddings: bool = Field(
        default=True, description="One weight for the token embedding and the output projection."
    )
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="Added to the variance in norms.")
    rope_theta: Annotated[float, Field(ge=1)] = Field(default=10000.0, description="Base of the rotary angles.")


class Parallel(Section):
    tensor: Ranks = Field(default=1, description="Ranks that each matrix is split over, t.")
    pipeline: Ranks = Field(
        default=1, description="Ranks that the blocks are split over, p. The rest is data parallel."
    )
    sequence: bool = Field(
        default=False, description="Sequence parallelism on the tensor axis; the identity with tensor 1."
    )
    tensor_chunks: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1,
        description="Chunks of rows in which forward sums (and gathers) over the tensor axis beside its products.",
    )
    timeout: Positive = Field(default=120, description="Seconds after which a rank that does not answer ends the run.")
    start_timeout: Positive = Field(default=900, description="Seconds to wait for all ranks to come to the roll call.")


class Offload(Section):
    optimizer: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Where optimizer states and update live."
    )
    parameters: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Where stage 3 parameter shards rest."
    )
    path: Annotated[Text | tuple[Text, ...] | None, Field(union_mode="left_to_right")] = Field(
        default=None, description="Folder on the disk for nvme, or a list: one on each disk."
    )
    host_mb: Annotated[int, Field(ge=160, le=2**24)] = Field(
        default=1024, description="MiB of a rank's host memory for what is on its way to nvme or back."
    )
    delayed: bool = Field(default=False, description="The host updates beside the next step, which is one update late.")


def _tier(value: object) -> object:
    """Return true as cpu and false as none, which is what they once were."""
    return {True: "cpu", False: "none"}[value] if isinstance(value, bool) else value


def _whole(value: object) -> object:
    """Refuse 3.0 and True where 3 and 1 are meant: literals are compared with ==, which does not tell them apart."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


class Quantize(Section):
    parameters: Literal["none", "int8"] = Field(
        default="none", description="Integers as which stage 3 gathers parameters, in blocks of 256 with a scale."
    )
    gradients: Literal["none", "int8", "int4"] = Field(
        default="none", description="Integers as which gradients are sent to the rank that sums them."
    )
    error_feedback: bool = Field(
        default=False, description="What rounding gradients loses is kept, as large as they, and sent with the next."
    )


class Zero(Section):
    stage: Annotated[Literal[0, 1, 2, 3] | None, BeforeValidator(_whole)] = Field(
        default=None,
        description="What rests sharded over data ranks: 1 optimizer state, 2 + gradients, 3 + parameters; null: 1.",
    )
    shard_ranks: Annotated[int, Field(ge=1, le=2**14)] | None = Field(
        default=None,
        description="Neighbouring data ranks over which that is sharded, replicated over the rest; null: all.",
    )
    grad_dtype: Literal["param", "fp32"] = Field(
        default="fp32", description="Gradients in the parameter's dtype or fp32."
    )
    reduce_dtype: Literal["param", "fp32", "bf16"] | None = Field(
        default=None,
        description="Dtype in which gradients are summed over ranks; null: as they accumulate (grad_dtype).",
    )
    bucket_mb: Annotated[float, Field(gt=0, le=2**20)] = Field(
        default=64.0,
        description="Memory for what an operation receives through sockets, and to widen 16-bit gradients, MiB.",
    )
    secondary_ranks: Annotated[int, Field(ge=2, le=2**14)] | None = Field(
        default=None,
        description="Neighbouring data ranks that keep a second shard of parameters (hpZ); null: none do.",
    )
    quantize: Quantize = Field(default_factory=Quantize, description="What is rounded to integers on its way (ZeRO++).")
    offload: Offload = Field(default_factory=Offload, description="ZeRO-Offload.")


Recompute = Literal["none", "selective", "full"]


class Memory(Section):
    recompute: Recompute = Field(
        default="none",
        description="What is computed again in backward instead of kept: the core of attention (selective), or blocks.",
    )
    partition: bool = Field(default=False, description="Pa: kept block inputs are split over the tensor axis.")
    offload: Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_tier)] = Field(
        default="none", description="Pa+cpu, Pa+nvme: where they rest; true is cpu."
    )
    cuda_graphs: bool = Field(
        default=False, description="Recomputed blocks are recorded once and replayed; not measured on a GPU yet."
    )


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = Field(
        default="1f1b", description="Pipeline schedule."
    )
    chunks: Layers | None = Field(
        default=None, description="Model chunks per rank; null: 2 for interleaved and zb-v, else 1."
    )


class Precision(Section):
    dtype: Literal["fp32", "fp64", "bf16", "fp16"] = Field(default="fp32", description="Of parameters and activations.")
    kernels: Literal["auto", "fused", "reference", "apex"] = Field(
        default="auto",
        description="Which kernels to prefer; auto: fused where they can be had, then apex's, then plain torch.",
    )


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = Field(default=3e-4, description="Peak learning rate of AdamW.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay rates of the moments.", strict=False
    )
    eps: Annotated[float, Field(ge=1e-20)] = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled decay of matmul weights and the token embedding; nothing else decays."
    )
    clip: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Largest global gradient norm; 0: no clipping."
    )


class LrSchedule(Section):
    warmup: NonNegative = Field(default=100, description="Updates of linear warm-up.")
    decay: Literal["cosine", "linear", "wsd", "constant"] = Field(default="cosine", description="After the warm-up.")
    min_lr: Annotated[float, Field(ge=0)] = Field(default=3e-5, description="Learning rate at the end.")
    cooldown: NonNegative | None = Field(
        default=None, description="Last updates in which wsd falls; null: schedule.steps // 5."
    )
    steps: Positive | None = Field(
        default=None, description="Updates until min_lr, which then stays; null: run.steps. Keep it in a longer run."
    )


class Batch(Section):
    global_: Sequences = Field(default=8, alias="global", description="Sequences in a step, over all ranks.")
    micro: Sequences | None = Field(
        default=None,
        description="Sequences in one forward pass of one data rank; null: the largest that divides and fits.",
    )

    @property
    def rows(self) -> int:
        """Return the sequences of a micro-batch, which `run/micro_batch.py` has chosen where the config does not."""
        assert self.micro is not None
        return self.micro


class Data(Section):
    train: Text | None = Field(
        default=None,
        description="Token files to train on: a path without .bin/.idx, or X.ds, X.npy, X.bin; null: data.sources, "
        "else data/quickstart/train.",
    )
    sources: Sources | None = Field(
        default=None,
        description="Instead of data.train, token files that are mixed: a list of {path, weight, name}.",
    )
    max_epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="A run that would go through a source more often is refused; null: none is."
    )
    valid: Annotated[Text | Annotated[float, Field(gt=0, lt=1)] | None, Field(union_mode="left_to_right")] = Field(
        default=None,
        description="Validation: token files as in data.train, or the share of all documents held out; null: none.",
    )
    validation: Annotated[tuple[ValidationSet, ...], Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="More validation sets, each with metrics of its own: a list of {path, name}."
    )
    valid_every: Positive | None = Field(default=None, description="Steps between validations; null: only at the end.")
    valid_samples: Positive | None = Field(default=None, description="Sequences per validation; null: all.")
    tokenizer: Text | None = Field(
        default=None,
        description="*.model, tokenizer.json, *.tiktoken, from the current folder, or bytes; for text, bits per byte.",
    )
    mask_eod: bool = Field(default=False, description="Attention, positions and loss stop at document ends.")
    pack: bool = Field(default=False, description="A sequence is whole documents, as many as fit, and padding.")


QUICKSTART = "data/quickstart/train"  # what is trained on where nothing else is said
NamedFiles = TypeVar("NamedFiles", Source, ValidationSet)


class Checkpoint(Section):
    every: Positive | None = Field(default=None, description="Steps between checkpoints; null: only at the end.")
    keep: Positive | None = Field(default=None, description="Newest checkpoints kept; null: all.")
    async_: bool = Field(default=False, alias="async", description="Write in the background.")
    resume: Text = Field(
        default="none",
        description="none, auto (newest verified of the run directory), or a path from the current folder.",
    )
    load: Literal["all", "weights", "optimizer"] = Field(
        default="all",
        description="What a run takes of the path it begins from: all (goes on), weights, or weights with moments.",
    )


class Observe(Section):
    every: Positive = Field(default=10, description="Steps between logged rows.")
    wandb: Text | None = Field(default=None, description="wandb project to log to.")
    tensorboard: bool = Field(default=False, description="Also write tensorboard events.")
    profile: Positive | None = Field(
        default=None, description="Step at which a torch profiler trace of 3 steps begins."
    )
    table: bool = Field(
        default=False, description="With each row, a table of rank 0's units: gathered, released, reduced, waited for."
    )


class Config(Section):
    """All sections of a config; `name` is that of the file, not an option."""

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    parallel: Parallel = Field(default_factory=Parallel)
    zero: Zero = Field(default_factory=Zero)
    memory: Memory = Field(default_factory=Memory)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    schedule: LrSchedule = Field(default_factory=LrSchedule)
    batch: Batch = Field(default_factory=Batch)
    data: Data = Field(default_factory=Data)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    observe: Observe = Field(default_factory=Observe)
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=100)] | None = Field(
        default=None,
        description="Parts of the run in which some options are others, one after the other: a list of {until_step or "
        "until_tokens, data, model, batch, optimizer, schedule}. Behind the last one the config holds.",
    )

    @property
    def uses_disks(self) -> bool:
        """Return whether anything rests on disks."""
        return "nvme" in (self.zero.offload.optimizer, self.zero.offload.parameters, self.memory.offload)


def resolved(config: Config) -> Config:
    """Return the config with every default that depends on other options filled in, as a run's config.yaml shows it."""
    model, data, chunks = config.model, config.data, config.pipeline.chunks
    kv_heads = model.kv_heads if model.kv_heads is not None else model.heads
    ffn = model.ffn if model.ffn is not None else default_ffn(model.hidden, model.activation)
    if chunks is None:
        chunks = 2 if config.pipeline.schedule in ("interleaved", "zb-v") else 1
    if (cooldown := config.schedule.cooldown) is None:
        cooldown = (config.schedule.steps or config.run.steps) // 5
    return config.model_copy(
        update={
            "model": model.model_copy(update={"kv_heads": kv_heads, "ffn": ffn}),
            "zero": config.zero.model_copy(update={"stage": 1 if config.zero.stage is None else config.zero.stage}),
            "pipeline": config.pipeline.model_copy(update={"chunks": chunks}),
            "stages": config.stages and tuple(_stage(each, config.schedule.cooldown) for each in config.stages),
            "data": data.model_copy(
                update={
                    "train": QUICKSTART if data.train is None and data.sources is None else data.train,
                    "sources": data.sources and tuple(map(_named, data.sources)),
                    "validation": data.validation and tuple(map(_named, data.validation)),
                }
            ),
            "schedule": config.schedule.model_copy(update={"cooldown": cooldown}),
        }
    )


def _named(given: NamedFiles) -> NamedFiles:
    """Return token files with a name: the end of their path, where none is given."""
    name = re.sub(f"[^{IN_NAMES}]", "_", PurePath(given.path).name or given.path)[-64:]
    return given.model_copy(update={"name": given.name or name})


def _stage(stage: Stage, cooldown: int | None) -> Stage:
    """Return a stage with names of its sources, and the cooldown of its own course where the config gives none."""
    data, schedule = stage.data, stage.schedule
    if data is not None and data.sources is not None:
        data = data.model_copy(update={"sources": tuple(map(_named, data.sources))})
    if schedule is not None and schedule.steps is not None and schedule.cooldown is None and cooldown is None:
        schedule = schedule.model_copy(update={"cooldown": schedule.steps // 5})
    return stage.model_copy(update={"data": data, "schedule": schedule})


def default_ffn(hidden: int, activation: str) -> int:
    """Return the default ffn: 4 h (GPT), or for SwiGLU 8/3 h rounded up to a multiple of 256 (Llama).

    Both give about as many parameters.
    """
    return 4 * hidden if activation == "gelu" else -(-(8 * hidden) // (3 * 256)) * 256
