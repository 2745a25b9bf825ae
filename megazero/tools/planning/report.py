"""Show a plan and a search, as tables and sentences."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.config.flat import spelt
from megazero.plan.layers import parameters
from megazero.plan.search import usable
from megazero.plan.systems import OURS, UNCERTAINTY
from megazero.tools.planning.job import Plan, as_json

_BESIDE = 4  # pipeline ranks side by side in a table


def as_text(plan: Plan) -> str:
    """Return everything in a plan as tables and sentences."""
    found = as_json(plan)
    blocks = (_head(plan), _memory(plan, found["memory"]), _settings(found["memory"]), _traffic(found), _time(found))
    return "\n\n".join("\n".join(block) for block in blocks)


def search_as_text(found: Mapping[str, Any], given: Mapping[str, object]) -> str:
    """Return the best layouts of a search, from its JSON object.

    Args:
        given: the config's options by name; a layout shows only options that differ from these.
    """
    chosen = "the search sets parallel, pipeline, stage, micro-batch, recompute and offload; "
    lines = [f"{found['tried']} layouts tried; {chosen}shown: options that differ from the config", "", UNCERTAINTY, ""]
    lines += ["the fastest that fit:", "     step       per device    MFU  data ranks"]
    for one in found["best"]:
        rate = f"{one['step_s']:9.3f} s  {one['tflops_per_device']:6.1f} TFLOP/s  {one['mfu']:5.1%}"
        others = (f"{name}={spelt(value)}" for name, value in one["options"].items() if given.get(name) != value)
        lines += [f"{rate}  {one['data']:10}", f"    {one['why']}", f"    {' '.join(others) or 'as in the config'}"]
    return "\n".join(lines)


def rounded(value: float) -> str:
    """Format a figure that is derived from a time, with the two digits that its uncertainty allows."""
    return f"{float(f'{value:.2g}'):,.15g}"


def _head(plan: Plan) -> Iterator[str]:
    job = plan.job
    shards = f" over {job.shard} ranks" if job.replicas > 1 else ""
    trained = "" if plan.system == OURS else f", as {plan.system.name} trains"
    yield f"{parameters(plan.job.shape) / 1e9:,.3f}B parameters on {job.ranks} {plan.machine.name}{trained}: " + (
        f"tensor {job.tensor}, pipeline {job.pipeline} ({job.schedule}), data {job.data}, "
        f"ZeRO stage {job.stage}{shards}, {job.micro_batches} micro-batches of {job.micro_batch}"
    )
    if plan.stage:
        yield f"the plan is for {plan.stage}"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    need, machine = plan.fullest, plan.machine
    words = f"{verdict}: {need.peak / 1e9:,.2f} GB of {usable(machine) / 1e9:,.2f} on the fullest rank"
    if need.host:
        words += f", {need.host / 1e9:,.2f} GB of {machine.host_memory_bytes / 1e9:,.2f} on the host"
    if need.disk:
        words += f", {need.disk / 1e9:,.2f} GB of {machine.disk_bytes / 1e9:,.2f} on disks"
    yield words


def _memory(plan: Plan, found: Mapping[str, Any]) -> Iterator[str]:
    categories = list(dict.fromkeys(category for rank in plan.ranks for category in rank.held))
    for first in range(0, len(plan.ranks), _BESIDE):
        some = plan.ranks[first : first + _BESIDE]
        yield f"{'GB, pipeline rank':<18}" + "".join(f"{first + place:>10}" for place in range(len(some)))
        for category in categories:
            cells = "".join(f"{rank.held.get(category, 0) / 1e9:>10,.3f}" for rank in some)
            yield f"  {category.replace('_', ' '):<16}{cells}"
        yield f"  {'on the device':<16}" + "".join(f"{rank.peak / 1e9:>10,.3f}" for rank in some)
    yield f"memory is highest in backward, while the fullest rank computes the gradient of the {plan.fullest.cause}"
    yield f"logits of a micro-batch, in the last rank's activations: {found['logits_bytes'] / 1e9:,.3f} GB"
    yield f"in generation the cache of a text of model.seq_len tokens takes {found['cache_bytes'] / 1e9:,.4f} GB"
    if made := found["communicators"]:
        yield f"{len(made)} NCCL communicators on the fullest rank; their memory is estimated, not measured"


def _settings(found: Mapping[str, Any]) -> Iterator[str]:
    yield "GB, recompute  activations    inputs  on device"
    for words, rank in found["settings"].items():
        kept, inputs = (rank["categories"].get(category, 0) / 1e9 for category in ("activations", "inputs"))
        too_much = "" if rank["peak_bytes"] <= found["available_bytes"] else "  too much"
        yield f"{words:<14}{kept:>12,.3f}{inputs:>10,.3f}{rank['peak_bytes'] / 1e9:>11,.3f}{too_much}"


def _traffic(found: Mapping[str, Any]) -> Iterator[str]:
    yield "GB sent in a step by the rank that sends most"
    for axis, purposes in found["traffic"].items():
        crossing = found["traffic_by_node"].get(axis, {})
        where = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:,.3f}" for name, size in crossing.items() if size)
        for purpose, size in purposes.items():
            if size:
                yield f"  {axis:<9} {purpose:<18} {size / 1e9:>10,.4f}"
        if where:
            yield f"  {axis:<9} in all: {where}"


def _time(found: Mapping[str, Any]) -> Iterator[str]:
    time, budget = found["time"], found["budget"]
    yield UNCERTAINTY
    yield f"a step: {rounded(time['step_s'])} s; bubble {found['bubble']:.1%} of the work"
    for name, part in time["parts"].items():
        if part > 0:
            yield f"  {name:<17}{rounded(part):>10} s  {part / time['step_s']:>4.0%}"
    for name, part in time["hidden"].items():
        if part > 0:
            yield f"  {name + ' traffic':<17}{rounded(part):>10} s  in parallel with the computation"
    tokens, tflops = time["tokens_per_second_per_device"], time["tflops_per_device"]
    yield f"{rounded(tokens)} tokens/s and {rounded(tflops)} TFLOP/s per device"
    yield f"MFU {time['mfu']:.0%}, HFU {time['hfu']:.0%}"
    cost = "" if budget["dollars"] is None else f", {rounded(budget['dollars'])} dollars"
    yield f"{budget['tokens']:.3g} tokens: {budget['steps']:,} steps,"
    yield f"{rounded(budget['hours'])} hours, {rounded(budget['days'])} days{cost}"
    yield _checkpoint(found["checkpoint"])


def _checkpoint(found: Mapping[str, Any]) -> str:
    rate = f"{found['rate'] / 1e9:.3g} GB/s from each node{'' if found['measured'] else ' (assumed)'}"
    size = f"{found['bytes'] / 1e9:,.0f}" if found["bytes"] > 1e11 else f"{found['bytes'] / 1e9:.4g}"
    what = f"a checkpoint: {size} GB, saved in {rounded(found['save_s'])} s at {rate}"
    return f"{what}; under SLURM give sbatch --signal=USR1@{found['lead_s']}"
