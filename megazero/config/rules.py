"""Define the rules between options as data, for the config checks, `explain` and the documents.

- `RELATIONS`: conditions, mostly equations between sizes.
- `EXCLUSIONS`: options that require or exclude each other.

Rules receive a resolved config (`config.resolved`) as `Values` (`relation.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megazero.config.flat import spelt
from megazero.config.model_rules import MODEL_RELATIONS, head_dim
from megazero.config.relation import Relation, Values, divides
from megazero.config.stages import ends_of, values_of_stages
from megazero.config.weights import MOST_PERIOD, whole_weights


@dataclass(frozen=True)
class Exclusion:
    """A rule: if `option` is one of `values`, `other` must be one of `allowed`. A broken one is error 107."""

    code = 107
    option: str
    values: tuple[Any, ...]
    other: str
    allowed: tuple[Any, ...]
    reason: str

    @property
    def options(self) -> list[str]:
        """Return the two options."""
        return [self.option, self.other]

    @property
    def do(self) -> str:
        """Return what to change."""
        return f"{self.other} must be {_either(self.allowed)}"

    def holds(self, values: Values) -> bool:
        """Return True if the rule holds."""
        return values[self.option] not in self.values or values[self.other] in self.allowed

    def broken(self, values: Values) -> str:
        """Return a message: the values that break the rule, and its reason."""
        got = " with ".join(f"{key} {spelt(values[key])}" for key in self.options)
        return f"{got}: {self.reason}"

    def __str__(self) -> str:
        return f"{self.option} {_either(self.values)} needs {self.other} {_either(self.allowed)} ({self.reason})"


Rule = Relation | Exclusion


def broken_rules(values: Values) -> list[Rule]:
    """Return the rules that do not hold. No rule divides by zero, because sizes are at least 1."""
    return [rule for rule in (*RELATIONS, *EXCLUSIONS) if not rule.holds(values)]


def _either(values: Sequence[Any]) -> str:
    return " or ".join(map(spelt, values))


def _homes(v: Values) -> tuple[str, str, str]:
    return v["zero.offload.optimizer"], v["zero.offload.parameters"], v["memory.offload"]


def _names(v: Values, option: str) -> list[str]:
    return [each["name"] for each in v[option] or ()]


def _alike(v: Values) -> bool:
    """Return whether one optimizer updates all parameters, element by element."""
    named = {v["optimizer.name"], *(group["name"] for group in v["optimizer.groups"] or ())} - {None}
    return len(named) == 1 and "muon" not in named


def _doubled_sets(v: Values) -> list[str]:
    """Return names used by two validation sets. If `data.valid` is a share, each source is a validation set too."""
    held_out = {*_names(v, "data.sources")} if isinstance(v["data.valid"], float) else {}
    return _doubled([*held_out, *_names(v, "data.validation")])


def _lists(v: Values) -> list[Sequence[Any]]:
    """Return all lists of sources: the config's and its stages'."""
    return [sources for sources in (v["data.sources"], *values_of_stages(v, "data.sources")) if sources]


def _doubled_sources(v: Values) -> list[str]:
    return [name for sources in _lists(v) for name in _doubled([source["name"] for source in sources])]


def _moved(v: Values) -> list[str]:
    """Return source names that have different paths in different lists; `_doubled_sources` finds those in one list."""
    places = {(s["name"], s["path"]) for sources in _lists(v) for s in sources}
    return sorted({*_doubled([name for name, _ in places])} - {*_doubled_sources(v)})


def _doubled(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _period(v: Values) -> int:
    return max((sum(whole_weights([source["weight"] for source in sources])) for sources in _lists(v)), default=1)


def _shares_heads(v: Values) -> bool:
    """Return whether as many tensor ranks share each key-value head, and parts of the projection are equal."""
    sharing, rest = divmod(v["parallel.tensor"], v["model.kv_heads"])
    return rest == 0 and 2 * head_dim(v) % sharing == 0 and v["model.qk_norm"] != "full"


RELATIONS: tuple[Relation, ...] = (
    *MODEL_RELATIONS,
    divides("parallel.tensor", "model.heads", "lower parallel.tensor: a head is never split"),
    Relation(
        "model.kv_heads % parallel.tensor == 0, or parallel.tensor % model.kv_heads == 0 without model.qk_norm full",
        lambda v: v["model.kv_heads"] % v["parallel.tensor"] == 0 or _shares_heads(v),
        "change parallel.tensor: it divides model.kv_heads, or as many ranks share each key-value head",
        lambda v: f"{v['model.kv_heads']} key-value heads on {v['parallel.tensor']} ranks",
    ),
    divides("parallel.tensor", "model.ffn", "change parallel.tensor or model.ffn"),
    divides("batch.micro", "batch.global", "change batch.global or batch.micro"),
    divides("parallel.tensor", "model.seq_len", "change model.seq_len or parallel.tensor", "parallel.sequence"),
    Relation(
        "parallel.tensor_chunks <= model.seq_len / parallel.tensor",
        lambda v: v["parallel.tensor_chunks"] <= max(1, v["model.seq_len"] // v["parallel.tensor"]),
        "lower parallel.tensor_chunks",
    ),
    Relation(
        "model.loss_chunk == 0 with pipeline.schedule zb-h1 or zb-v",
        lambda v: not v["model.loss_chunk"] or not v["pipeline.schedule"].startswith("zb"),
        "set model.loss_chunk=0: the delayed weight gradient needs all logits",
    ),
    Relation(
        "model.layers >= parallel.pipeline * pipeline.chunks",
        lambda v: v["model.layers"] >= v["parallel.pipeline"] * v["pipeline.chunks"],
        "lower parallel.pipeline or pipeline.chunks",
    ),
    Relation(
        "pipeline.chunks >= 2 with pipeline.schedule interleaved",
        lambda v: v["pipeline.schedule"] != "interleaved" or v["pipeline.chunks"] >= 2,
        "use pipeline.schedule=1f1b for one chunk",
    ),
    Relation(
        "schedule.min_lr <= optimizer.lr", lambda v: v["schedule.min_lr"] <= v["optimizer.lr"], "lower schedule.min_lr"
    ),
    Relation(
        "schedule.points given, in the order of updates, with schedule.decay piecewise, and only then",
        lambda v: (
            (v["schedule.decay"] == "piecewise") == bool(v["schedule.points"])
            and all(a[0] < b[0] for a, b in pairwise(v["schedule.points"] or ()))
        ),
        "give schedule.points=[[0, 1.0], [1000, 0.1]] in growing order, or another schedule.decay",
    ),
    Relation(
        "one optimizer other than muon in optimizer.name and optimizer.groups "
        "with zero.offload.delayed, or zero.offload.optimizer nvme",
        lambda v: not (v["zero.offload.delayed"] or v["zero.offload.optimizer"] == "nvme") or _alike(v),
        "use zero.offload.optimizer=cpu or none without zero.offload.delayed, or another optimizer",
    ),
    Relation(
        "observe.profile <= run.steps",
        lambda v: v["observe.profile"] is None or v["observe.profile"] <= v["run.steps"],
        "lower observe.profile or raise run.steps",
    ),
    Relation(
        "zero.stage >= 1 with zero.shard_ranks",
        lambda v: v["zero.shard_ranks"] is None or v["zero.stage"] >= 1,
        "use zero.stage=1, 2 or 3, or zero.shard_ranks=null",
    ),
    Relation(
        "zero.stage == 3 and zero.shard_ranks == null with zero.secondary_ranks",
        lambda v: v["zero.secondary_ranks"] is None or (v["zero.stage"] == 3 and v["zero.shard_ranks"] is None),
        "use zero.secondary_ranks=null: only parameters sharded over all data ranks are gathered again",
    ),
    Relation(
        "zero.offload.path given with nvme in zero.offload.optimizer, zero.offload.parameters or memory.offload",
        lambda v: bool(v["zero.offload.path"]) or "nvme" not in _homes(v),
        "give zero.offload.path=FOLDER on a local NVMe disk, or a list of folders",
    ),
    Relation(
        "data.train == null with data.sources",
        lambda v: v["data.train"] is None or v["data.sources"] is None,
        "set one of the two to null",
    ),
    Relation(
        "names of data.sources differ",
        lambda v: not _doubled_sources(v),
        "give each its own name; list a path only once, with the sum of its weights",
        lambda v: f"two are called {', '.join(_doubled_sources(v))}",
    ),
    Relation(
        "names of data.validation differ",
        lambda v: not _doubled_sets(v),
        "give each its own name (if data.valid is a share, each source is a validation set too)",
        lambda v: f"two are called {', '.join(_doubled_sets(v))}",
    ),
    Relation(
        "smallest whole weights of data.sources sum to at most 1,000,000",
        lambda v: _period(v) <= MOST_PERIOD,
        "give weights with fewer digits",
        lambda v: f"{_period(v):,}, after which the order repeats",
    ),
    Relation(
        "data.sources given if a stage gives data.sources",
        lambda v: not values_of_stages(v, "data.sources") or v["data.sources"] is not None,
        "give data.sources for the steps in which no stage sets them",
    ),
    Relation(
        "a name of data.sources has one path in all stages",
        lambda v: not _moved(v),
        "give each path its own name",
        lambda v: f"two paths are called {', '.join(_moved(v))}",
    ),
    Relation(
        "each of stages has until_step or until_tokens",
        lambda v: all((s["until_step"] is None) != (s["until_tokens"] is None) for s in v["stages"] or ()),
        "give one of the two to each",
        lambda v: "a stage has both or neither",
    ),
    Relation(
        "each of stages ends after the one before",
        lambda v: all(before < after for before, after in pairwise([0, *ends_of(v)])),
        "change until_step or until_tokens",
        lambda v: f"they end at steps {', '.join(map(str, ends_of(v)))}",
    ),
    Relation(
        "stages end by run.steps",
        lambda v: max([0, *ends_of(v)]) <= v["run.steps"],
        "raise run.steps, or change until_step or until_tokens",
        lambda v: f"they end at steps {', '.join(map(str, ends_of(v)))}, run.steps is {v['run.steps']}",
    ),
    Relation(
        "model.position rotary with another model.seq_len in stages",
        lambda v: v["model.position"] == "rotary" or {*values_of_stages(v, "model.seq_len")} <= {v["model.seq_len"]},
        "use model.position=rotary, or one length",
        lambda v: f"{values_of_stages(v, 'model.seq_len')[0]}, but learned positions are a weight of one length",
    ),
    Relation(
        "checkpoint.load == all with checkpoint.resume none",
        lambda v: v["checkpoint.load"] == "all" or v["checkpoint.resume"] != "none",
        "give checkpoint.resume=PATH of a run, a step or an import",
    ),
)

_CODES = ("int8", "int4")
_JOINT = ("gpipe", "1f1b", "interleaved")  # schedules with one backward of inputs and weights

EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion("pipeline.schedule", ("gpipe", "1f1b", "zb-h1"), "pipeline.chunks", (1,), "one chunk per rank"),
    Exclusion("pipeline.schedule", ("zb-v",), "pipeline.chunks", (2,), "zb-v has two chunks per rank"),
    Exclusion("zero.offload.optimizer", ("cpu", "nvme"), "zero.stage", (1, 2, 3), "only sharded state is offloaded"),
    Exclusion("zero.offload.parameters", ("cpu", "nvme"), "zero.stage", (3,), "only stage 3 shards parameters"),
    Exclusion("zero.offload.delayed", (True,), "zero.offload.optimizer", ("cpu",), "only the host updates late"),
    Exclusion("precision.masters", ("none",), "precision.dtype", ("bf16",), "only bf16 is rounded stochastically"),
    Exclusion("precision.masters", ("none",), "optimizer.average.kind", ("none",), "averages need more digits"),
    Exclusion("optimizer.average.kind", ("ema",), "zero.offload.optimizer", ("none", "cpu"), "averages are in memory"),
    Exclusion("optimizer.average.for_validation", (True,), "optimizer.average.kind", ("ema",), "there are no others"),
    Exclusion("zero.quantize.parameters", ("int8",), "zero.stage", (3,), "stages 1 and 2 would keep rounded values"),
    Exclusion("zero.quantize.gradients", _CODES, "zero.stage", (1, 2, 3), "the all-reduce of stage 0 is exact"),
    Exclusion("zero.quantize.gradients", _CODES, "zero.reduce_dtype", (None,), "they are summed in zero.grad_dtype"),
    Exclusion(
        "zero.quantize.error_feedback", (True,), "zero.quantize.gradients", _CODES, "it corrects the codes' rounding"
    ),
    Exclusion("zero.reduce_dtype", ("bf16",), "precision.dtype", ("fp32", "bf16"), "fp16 and fp64 have more digits"),
    Exclusion("zero.reduce_dtype", ("fp32",), "precision.dtype", ("fp32", "bf16", "fp16"), "fp64 is summed in fp64"),
    Exclusion("memory.partition", (True,), "memory.recompute", ("full",), "Pa splits inputs saved by full recompute"),
    Exclusion("memory.offload", ("cpu", "nvme"), "memory.partition", (True,), "only inputs split by Pa are offloaded"),
    Exclusion("memory.cuda_graphs", (True,), "memory.recompute", ("full",), "only recomputed blocks are captured"),
    Exclusion("memory.cuda_graphs", (True,), "parallel.tensor", (1,), "sums over ranks are not captured"),
    Exclusion("memory.cuda_graphs", (True,), "model.dropout", (0.0,), "a graph would repeat its dropout mask"),
    Exclusion("memory.cuda_graphs", (True,), "data.mask_eod", (False,), "document lengths change from batch to batch"),
    Exclusion("memory.cuda_graphs", (True,), "parallel.pipeline", (1,), "capture would wait for messages in flight"),
    Exclusion("memory.cuda_graphs", (True,), "pipeline.schedule", _JOINT, "a split backward is not captured"),
    Exclusion("data.pack", (True,), "data.mask_eod", (True,), "packed documents must not see each other"),
)
