"""Define the configuration: one frozen pydantic model per section; unknown keys are errors.

    run      model    parallel   zero       memory     pipeline   precision
    optimizer  schedule  batch    data       checkpoint  observe

A file is YAML 1.2 (3e-4 is a number, `no` is a string, a key given twice is an error); `section.key=value` on the
command line overrides it. All faults are found here, before torch is imported: the error for an unknown key names its
line and the most similar valid key; wrong types, and all broken relations between options, are reported together.

Only `config/`, `builders/`, `run/` and `tools/` use the config; lower packages receive plain values.
`config/file.py` reads files; `config/rules.py` has the rules between options.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetPydanticSchema, create_model
from pydantic_core import PydanticCustomError

from megazero.config.changes import row_of
from megazero.config.model import AtLeast0, Model
from megazero.config.sections import (
    Above0,
    Decay,
    Layers,
    NonNegative,
    Positive,
    Ranks,
    Section,
    Sequences,
    Sources,
    Text,
    TokenFiles,
    option,
)

Share = Annotated[float, Field(gt=0, lt=1)]
Neighbours = Annotated[int, Field(ge=2, le=2**14)]
Tier = Literal["none", "cpu", "nvme"]


class Run(Section):
    dir: Text | None = option(None, "Folder of the run; null: runs/<config name>.")
    steps: Positive = option(1000, "Training steps. A step whose update is skipped counts too.")
    seed: NonNegative = option(0, "Seed of initial weights, dropout masks and the order of samples.")
    time_limit: Positive | None = option(None, "Seconds after which the run saves and exits with code 75.")
    on_spike: Literal["log", "skip"] = option("log", "What to do with a step whose gradient norm is a spike.")
    spike_factor: Annotated[float, Field(gt=1)] = option(
        10.0, "A spike: the gradient norm is more than this times the median of the last 128 steps."
    )
    deterministic: bool = option(False, "Use deterministic GPU operations: slower, but bitwise reproducible.")


class Parallel(Section):
    tensor: Ranks = option(1, "Tensor-parallel ranks, t: each matrix is split over them.")
    pipeline: Ranks = option(1, "Pipeline-parallel ranks, p, which share the blocks; data ranks: all / (t * p).")
    sequence: bool = option(False, "Sequence parallelism on the tensor axis; no effect with tensor 1.")
    tensor_chunks: Annotated[int, Field(ge=1, le=16)] = option(
        1, "Split matrix products into this many chunks to overlap them with reductions over the tensor axis."
    )
    timeout: Positive = option(120, "Seconds after which a rank that does not answer ends the run.")
    start_timeout: Positive = option(900, "Seconds within which all ranks must have started and connected.")


class Offload(Section):
    optimizer: Tier = option("none", "Where optimizer state is kept (none: device); cpu, nvme: updated on the host.")
    parameters: Tier = option("none", "Where stage 3 parameter shards are kept (none: device).")
    path: Annotated[Text | tuple[Text, ...] | None, Field(union_mode="left_to_right")] = option(
        None, "Folder on the disk for nvme, or a list of folders, one on each disk."
    )
    host_mb: Annotated[int, Field(ge=160, le=2**24)] = option(
        1024, "MiB of host memory per rank for transfers to and from nvme."
    )
    delayed: bool = option(False, "Update on the host during the next step; parameters lag by one update.")


def _tier(value: object) -> object:
    """Convert a boolean of an earlier version: true to cpu, false to none."""
    return {True: "cpu", False: "none"}[value] if isinstance(value, bool) else value


def _whole(value: object) -> object:
    """Refuse 3.0 and True for 3 and 1: pydantic compares literals with ==, for which they are equal."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


class Quantize(Section):
    parameters: Literal["none", "int8"] = option(
        "none", "Integer type in which stage 3 gathers parameters; blocks of 256 values share a scale."
    )
    gradients: Literal["none", "int8", "int4"] = option("none", "Integers in which gradients are sent for summation.")
    error_feedback: bool = option(False, "Add the rounding error of gradients to the next reduction (one more buffer).")


class Zero(Section):
    stage: Annotated[Literal[0, 1, 2, 3] | None, BeforeValidator(_whole)] = option(
        None, "Sharded over data ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters; null: 1."
    )
    shard_ranks: Annotated[int, Field(ge=1, le=2**14)] | None = option(
        None, "Number of neighbouring data ranks in a shard group; each group holds a replica; null: all data ranks."
    )
    grad_dtype: Literal["param", "fp32"] = option("fp32", "Dtype of accumulated gradients: the parameter's or fp32.")
    reduce_dtype: Literal["param", "fp32", "bf16"] | None = option(
        None, "Dtype in which gradients are summed over ranks; null: grad_dtype."
    )
    bucket_mb: Annotated[float, Field(gt=0, le=2**20)] = option(
        64.0, "MiB of the buffers that receive through sockets and that widen 16-bit gradients."
    )
    secondary_ranks: Neighbours | None = option(
        None, "Number of neighbouring data ranks that hold a second shard of the parameters (hpZ); null: none."
    )
    quantize: Quantize = Quantize()  # ZeRO++
    offload: Offload = Offload()  # ZeRO-Offload


Recompute = Literal["none", "selective", "full"]


class Memory(Section):
    recompute: Recompute = option(
        "none", "What backward recomputes: the attention core (selective), whole blocks (full)."
    )
    partition: bool = option(False, "Pa: split saved block inputs over the tensor axis.")
    offload: Annotated[Tier, BeforeValidator(_tier)] = option(
        "none", "Where Pa keeps saved block inputs (none: device); true means cpu."
    )
    cuda_graphs: bool = option(False, "Capture recomputed blocks as CUDA graphs once, and replay them.")


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = option("1f1b", "Pipeline schedule.")
    chunks: Layers | None = option(None, "Model chunks per rank; null: 2 for interleaved and zb-v, else 1.")


class Precision(Section):
    dtype: Literal["fp32", "fp64", "bf16", "fp16"] = option("fp32", "Dtype of parameters and activations.")
    masters: Literal["fp32", "none"] = option(
        "fp32", "Masters of 16-bit parameters; none: bf16 parameters are updated with stochastic rounding."
    )
    kernels: Literal["auto", "fused", "reference", "apex", "compile"] = option(
        "auto",
        "Kernels; reference: plain torch; compile: norms and activations through torch.compile; auto: for each family "
        "the first available of fused, apex, reference.",
    )


Update = Literal["adamw", "muon", "lion", "sgd"]


class Muon(Section):
    momentum: Decay = option(0.95, "Decay rate of the momentum.")
    nesterov: bool = option(True, "Orthogonalise the momentum of the next step.")
    steps: Annotated[int, Field(ge=1, le=20)] = option(5, "Newton-Schulz iterations.")
    scale: Literal["rms", "spectral"] = option(
        "rms", "Factor of updates: rms: 0.2 sqrt(longer side), as large as AdamW's; spectral: sqrt(outputs / inputs)."
    )
    lr_factor: Above0 = option(1.0, "Multiplies the learning rate of the matrices that Muon updates.")


class Average(Section):
    kind: Literal["none", "ema"] = option("none", "Averages of parameters that are kept; ema: exponential.")
    decay: Decay = option(0.999, "Decay rate of the averages; the first 1 / (1 - decay) updates count equally.")
    for_validation: bool = option(False, "Validate with the averages.")


class OptimizerGroup(Section):
    """Options of the parameters whose full name matches a pattern; null: those of the optimizer."""

    match: Text = Field(description="Pattern of full parameter names, with * and ?.")
    name: Update | None = option(None, "Optimizer.")
    lr_factor: AtLeast0 | None = option(None, "Multiplies the learning rate.")
    weight_decay: AtLeast0 | None = option(None, "Weight decay of all parameters of the group.")
    clip: Above0 | None = option(None, "Largest norm of the group's gradients, which leave the global norm's clip.")


class Optimizer(Section):
    name: Update = option("adamw", "Optimizer; muon: of the matrices inside of blocks, and adamw of all others.")
    lr: Above0 = option(3e-4, "Peak learning rate.")
    betas: tuple[Decay, Decay] = option(
        (0.9, 0.95), "Decay rates of the moments of adamw and lion; the first is sgd's momentum.", strict=False
    )
    eps: Annotated[float, Field(ge=1e-20)] = option(1e-8, "Added to the square root of the second moment.")
    weight_decay: AtLeast0 = option(0.1, "Decoupled weight decay, of matmul weights and the token embedding only.")
    clip: AtLeast0 = option(1.0, "Largest allowed global gradient norm; 0 disables clipping.")
    clip_value: Above0 | None = option(None, "Largest magnitude of each gradient, after clip; null: any.")
    moments: Literal["fp32", "bf16"] = option(
        "fp32", "Dtype of optimizer state; bf16: rounded stochastically. With precision.dtype fp64 it is fp64."
    )
    muon: Muon = Muon()
    average: Average = Average()
    groups: Annotated[tuple[OptimizerGroup, ...], Field(min_length=1, max_length=100)] | None = option(
        None,
        "Options of some parameters, the first match counts: a list of {match, name, lr_factor, weight_decay, clip}.",
    )


Point = tuple[NonNegative, AtLeast0]


class LrSchedule(Section):
    warmup: NonNegative = option(100, "Number of updates of linear warm-up.")
    warmup_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = option(
        None, "Alternative to warmup: number of tokens of linear warm-up."
    )
    decay: Literal["cosine", "linear", "wsd", "wsd-sqrt", "constant", "piecewise"] = option(
        "cosine", "After warm-up; wsd, wsd-sqrt: at the end, linear or 1 - sqrt; piecewise: through points."
    )
    points: Annotated[tuple[Point, ...], Field(min_length=1, max_length=100)] | None = option(
        None, "For decay piecewise: [update, factor of optimizer.lr] pairs, joined by lines.", strict=False
    )
    min_lr: AtLeast0 = option(3e-5, "Learning rate at the end of the decay.")
    cooldown: NonNegative | None = option(None, "Number of last updates, in which wsd decay; null: steps // 5.")
    steps: Positive | None = option(None, "Number of updates until min_lr, which then stays constant; null: run.steps.")


class Batch(Section):
    global_: Sequences = option(8, "Sequences per step, over all ranks.", alias="global")
    micro: Sequences | None = option(None, "Sequences per micro-batch of a data rank; null: the largest that fits.")

    @property
    def rows(self) -> int:
        """Return `micro`, a number of sequences; `tools/planning/micro_batch.py` must have replaced null before."""
        assert self.micro is not None
        return self.micro


class Data(Section):
    train: Text | None = option(
        None,
        "Token files to train on: a path without .bin/.idx, or X.ds, X.npy, X.bin; null: data.sources, "
        "else data/quickstart/train.",
    )
    sources: Sources | None = option(None, "Token files to mix, instead of data.train: a list of {path, weight, name}.")
    max_epochs: Above0 | None = option(None, "Refuse a run that would read a source more often than this.")
    valid: Annotated[Text | Share | None, Field(union_mode="left_to_right")] = option(
        None, "Validation: token files as in data.train, or a share of all documents; null: none."
    )
    validation: Annotated[tuple[TokenFiles, ...], Field(min_length=1, max_length=100)] | None = option(
        None, "More validation sets, each with its own metrics: a list of {path, name}."
    )
    valid_every: Positive | None = option(None, "Steps between validations; null: only at the end.")
    valid_samples: Positive | None = option(None, "Sequences per validation; null: all.")
    tokenizer: Text | None = option(
        None, "Tokenizer, for text and bits per byte: *.model, tokenizer.json, *.tiktoken or bytes."
    )
    mask_eod: bool = option(False, "Attention, positions and loss stop at document ends.")
    pack: bool = option(False, "Fill each sequence with as many whole documents as fit, and padding.")


QUICKSTART = "data/quickstart/train"  # the default training data


class Checkpoint(Section):
    every: Positive | None = option(None, "Steps between checkpoints; null: only at the end.")
    keep: Positive | None = option(None, "Number of newest checkpoints to keep; null: all.")
    async_: bool = option(False, "Write checkpoints in the background.", alias="async")
    resume: Text = option("none", "Checkpoint to start from: none, auto (newest step of the run's folder), or a path.")
    load: Literal["all", "weights", "optimizer"] = option(
        "all", "Load from `resume`: all (continue the run), weights, or weights and optimizer state."
    )


class Evaluate(Section):
    """Evaluations of the model during training, on the run's ranks."""

    every: Positive | None = option(None, "Steps between evaluations; null: only at the end.")
    texts: tuple[Text, ...] = option((), "Files of UTF-8 text: loss and bits per byte of each.")
    tasks: tuple[Text, ...] = option((), "Tasks of lm-eval, by name, or files that define one.")
    samples: tuple[Text, ...] = option((), "Texts that are continued, into the run's folder samples/.")


class Observe(Section):
    every: Positive = option(10, "Steps between logged rows.")
    wandb: Text | None = option(None, "wandb project to log to.")
    tensorboard: bool = option(False, "Also write tensorboard events.")
    profile: Positive | None = option(None, "Step at which a torch profiler trace of 3 steps begins.")
    check_replicas: NonNegative = option(0, "Steps between comparisons of values that several ranks hold; 0: none.")
    evaluate: Evaluate = Evaluate()


def _some_of(name: str, section: type[Section]) -> GetPydanticSchema:
    """Return a section's schema in a stage: the options that a stage may change; null keeps the config's value."""
    fields: dict[str, Any] = {}
    for own, field in section.model_fields.items():
        if not row_of(f"{name}.{field.alias or own}").in_stage:
            kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            fields[own] = (kind | None, Field(default=None, alias=field.alias, description=field.description))
    partial = create_model(f"Stage{name.title()}", __base__=Section, **fields)
    return GetPydanticSchema(lambda _, handler: handler(partial))


class Stage(Section):
    """Options that differ during one stage of the run, by section; null keeps the config's value."""

    until_step: Positive | None = option(None, "The last step of the stage, from 1.")
    until_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = option(
        None, "Alternative to until_step: the stage ends when the run has seen this many tokens."
    )
    data: Annotated[Section, _some_of("data", Data)] | None = None
    model: Annotated[Section, _some_of("model", Model)] | None = None
    batch: Annotated[Section, _some_of("batch", Batch)] | None = None
    optimizer: Annotated[Section, _some_of("optimizer", Optimizer)] | None = None
    schedule: Annotated[Section, _some_of("schedule", LrSchedule)] | None = None


class Config(Section):
    """All sections of a config."""

    run: Run = Run()
    model: Model = Model()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    memory: Memory = Memory()
    pipeline: PipelineConfig = PipelineConfig()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    schedule: LrSchedule = LrSchedule()
    batch: Batch = Batch()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=100)] | None = option(
        None,
        "Consecutive parts of the run with different options: a list of {until_step or "
        "until_tokens, data, model, batch, optimizer, schedule}. After the last one, the config applies.",
    )

    @property
    def uses_disks(self) -> bool:
        """Return True if any state or activations are kept on disks."""
        return "nvme" in (self.zero.offload.optimizer, self.zero.offload.parameters, self.memory.offload)


def resolved(config: Config) -> Config:
    """Return the config with all defaults that depend on other options filled in, as in a run's config.yaml."""
    model, data, schedule, chunks = config.model, config.data, config.schedule, config.pipeline.chunks
    kv_heads = model.kv_heads if model.kv_heads is not None else model.heads
    ffn = model.ffn if model.ffn is not None else default_ffn(model.hidden, model.activation)
    pattern = model.layer_pattern or (model.layer_kinds and tuple(model.layer_kinds))  # the order of names, as a list
    chunks = chunks or (2 if config.pipeline.schedule in ("interleaved", "zb-v") else 1)
    sections: dict[str, dict[str, Any]] = {
        "model": {"kv_heads": kv_heads, "ffn": ffn, "layer_pattern": pattern},
        "zero": {"stage": 1 if config.zero.stage is None else config.zero.stage},
        "pipeline": {"chunks": chunks},
        "data": {"train": QUICKSTART if data.train is None and data.sources is None else data.train},
    }
    changed: dict[str, Any] = {name: getattr(config, name).model_copy(update=new) for name, new in sections.items()}
    if schedule.cooldown is None:
        changed["schedule"] = schedule.model_copy(update={"cooldown": (schedule.steps or config.run.steps) // 5})
        changed["stages"] = config.stages and tuple(map(_with_cooldown, config.stages))
    return config.model_copy(update=changed)


def _with_cooldown(stage: Stage) -> Stage:
    """Return a stage with the default cooldown for its own `schedule.steps`, if it sets these and no cooldown."""
    given = stage.schedule.given() if stage.schedule is not None else {}
    if stage.schedule is None or "steps" not in given or "cooldown" in given:
        return stage
    schedule = stage.schedule.model_copy(update={"cooldown": given["steps"] // 5})
    return stage.model_copy(update={"schedule": schedule})


def default_ffn(hidden: int, activation: str) -> int:
    """Return the default ffn: 4 h (GPT), or for SwiGLU 8/3 h rounded up to a multiple of 256 (Llama).

    Both give about as many parameters.
    """
    return -(-(8 * hidden) // (3 * 256)) * 256 if activation in ("swiglu", "geglu") else 4 * hidden
