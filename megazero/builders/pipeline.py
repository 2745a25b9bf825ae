"""Assign the layers of a config's model to pipeline stages, and check the config against the number of ranks."""

from __future__ import annotations  # no import of the config package: its types are only named here

from typing import TYPE_CHECKING, Any

from megazero.base.errors import UserError
from megazero.comm.sizes import shards_and_replicas
from megazero.plan.flops import block_costs
from megazero.plan.model import Kind, Rope, Shape
from megazero.schedules.layers import Layers, cut

if TYPE_CHECKING:
    from megazero.config.model import Model
    from megazero.config.schema import Config


MOST_PASSES = 2**17  # stages x micro-batches: a schedule is a list in memory; 64 x 1,536 are 98,304


def check_world(config: Config, size: int, given: str = "") -> None:
    """Check the config against the number of ranks, before the ranks connect.

    Args:
        given: the source of the number for error messages, such as `--gpus 4`; "" if it has none.

    Raises:
        UserError: 106, the sizes do not fit.
    """
    parallel, batch = config.parallel, config.batch
    shard, replicas = shards_and_replicas(size, parallel.tensor, parallel.pipeline, config.zero.shard_ranks)
    shards_and_replicas(
        size, parallel.tensor, parallel.pipeline, config.zero.secondary_ranks, key="zero.secondary_ranks"
    )
    data = shard * replicas
    if batch.global_ % (batch.rows * data):
        equation = "batch.global % (batch.micro * data ranks) == 0"
        got = f"{batch.global_} % ({batch.rows} * {data}) = {batch.global_ % (batch.rows * data)}"
        do = _divisible(config, batch.global_, batch.rows, data, given)
        raise UserError(106, f"expected {equation}, got {got}", do, where=given)
    micro_batches = batch.global_ // (batch.rows * data)
    stages = config.parallel.pipeline * (config.pipeline.chunks or 1)
    if config.parallel.pipeline > 1 and stages * micro_batches > MOST_PASSES:
        got = f"{stages} * {micro_batches} = {stages * micro_batches:,}"
        what = f"expected stages * micro-batches <= {MOST_PASSES:,} in a step, got {got}"
        raise UserError(106, what, "raise batch.micro or the number of data ranks", where=given)


def _divisible(config: Config, sequences: int, micro: int, data: int, given: str) -> str:
    """Return advice with the nearest valid values: of batch.micro, or else of batch.global and the number of ranks."""
    if sequences % data == 0:
        each = sequences // data
        return f"use batch.micro={max(n for n in range(1, min(micro, each) + 1) if each % n == 0)}, or null"
    least, most, zero = micro * data, sequences // micro, config.zero
    globals_ = [n for n in (sequences // least * least, sequences // least * least + least) if n]
    groups = [n for n in (zero.shard_ranks, zero.secondary_ranks) if n]
    sizes = [n for n in range(1, min(most, 8 * data) + 1) if most % n == 0 and not any(n % group for group in groups)]
    nearest = sorted(sorted(sizes, key=lambda n: abs(n - data))[:3])
    ranks = ", ".join(str(n * config.parallel.tensor * config.parallel.pipeline) for n in nearest)
    flag = given.partition(" ")[0] if given.startswith("--") else "ranks"
    return f"use batch.global={' or '.join(map(str, globals_))}" + (f", or {flag} {ranks}" if ranks else "")


def model_shape(config: Config) -> Shape:
    """Return the shape of a config's model, from its section `model` with all options resolved."""
    model = config.model
    fields: dict[str, Any] = {name: value for name, value in model if name in Shape.__dataclass_fields__}
    given = {"qkv": model.bias.qkv, "out": model.bias.out, "mlp": model.bias.mlp, "norm": model.norm_bias}
    biases = (place for place, value in given.items() if (model.norm == "layernorm" if value is None else value))
    fields |= {"head_size": model.head_dim, "biases": frozenset(biases), "kinds": _kinds(model)}
    fields |= {"attention_cap": model.softcap.attention, "logit_cap": model.softcap.logits}
    if model.query_scale is not None:
        fields["query_scale"] = model.query_scale.beta, model.query_scale.original
    return Shape(**fields)


def _kinds(model: Model) -> tuple[Kind, ...]:
    """Return the kinds of a model's first blocks; they repeat."""
    if model.layer_kinds is None:
        return (Kind(rope=Rope(model.rope_theta)),)
    theta: dict[str, Any] = {"theta": model.rope_theta}
    ropes = {name: kind.rope and Rope(**theta | kind.rope.given()) for name, kind in model.layer_kinds.items()}
    named = {name: Kind(kind.window, ropes[name]) for name, kind in model.layer_kinds.items()}
    return tuple(named[name] for name in model.layer_pattern or named)


def layers_of(config: Config) -> Layers:
    """Return the assignment of a config's layers to pipeline stages."""
    name, ranks, chunks = config.pipeline.schedule, config.parallel.pipeline, config.pipeline.chunks
    assert chunks is not None, "a resolved config"
    return cut(name, ranks, chunks, *block_costs(model_shape(config)))
