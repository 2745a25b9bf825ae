"""ZeRO-Infinity's bandwidth needs and tiers, and ZeRO++'s traffic, from the planner's formulas."""

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.plan.job import Bytes, Job
from megazero.plan.links import split_by_node
from megazero.plan.share import Share
from megazero.plan.states import units_of
from megazero.plan.traffic import flows
from tests.plan.infinity import (
    NEEDS,
    RANKS,
    TIERS,
    efficiency,
    intensities,
    largest,
    model,
    needed,
    needs,
    theirs,
    tiers,
)


@pytest.mark.parametrize("hidden", [2048, 8192, 65536])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_intensities_are_the_paper_s(hidden: int, batch: int) -> None:
    """Section 4.1, equations 9 to 11. There parameters are moved three times and gradients once, 4 x 2 bytes; here a
    backward's gather serves its recompute too, 3 x 2 bytes. There an update moves 4 x 4 bytes to and fro; here 28: the
    gradient comes in 16 bits, and only the parameter goes back. Block inputs are the same, but for biases and padding.
    """
    ours, paper = intensities(hidden, batch), theirs(hidden, batch)
    assert ours["parameters and gradients"] == pytest.approx(8 / 6 * paper["parameters and gradients"], rel=1e-4)
    assert ours["optimizer state"] == pytest.approx(32 / 28 * paper["optimizer state"], rel=1e-9)
    assert paper["block inputs"] < ours["block inputs"] < 1.001 * paper["block inputs"]


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.what} {need.hidden}")
def test_what_the_paper_asks_for_is_enough(need) -> None:
    """Section 4.2: at the bandwidth that it prints each share of the peak is reached, by its formula and by ours."""
    for found in (theirs, intensities):
        intensity = found(need.hidden, need.batch)[need.what]
        assert efficiency(intensity, need.printed) >= need.share
        assert efficiency(intensity, needed(intensity, need.share)) == pytest.approx(need.share)


def test_what_faster_devices_ask_for() -> None:
    """Table 3: 3, 30, 300 GB/s of slow memory and 70, 700, 7,000 between devices, for 1, 10, 100 times the peak. The
    first is the 1.5 TB/s of 512 devices; the second by formula 68.4, which is printed as 70.
    """
    assert round(1.5e12 / RANKS / 1e9) == 3
    assert round(needed(theirs(8192, 1)["parameters and gradients"], 0.5) / 1e10) == 7


def test_no_tier_held_more_than_its_states_fill() -> None:
    """Figure 6a: what was trained is three fifths to five sixths of it; the rest are activations and buffers."""
    for name, how, printed in TIERS:
        assert 0.55 <= printed / (largest(how) / 1e9) <= 0.85, name


def test_zero_plus_plus_sends_a_quarter() -> None:
    """Wang et al. 2023 (arXiv 2306.10209), table 1: between nodes 3 M become 0.5 M + 0 + 0.25 M, M the parameters in 16
    bits. Here so to the byte, scales apart (4 bytes for 256 values), of as many parts as cross: 63 of 64 ranks' of a
    gather, 7 of 8 nodes' of a sum.
    """
    plain = Job(model(4096, 36), Bytes(2, 2, 4), data=64, stage=3, global_batch=64)
    coded = replace(plain, secondary_ranks=8, quantize_parameters="int8", quantize_gradients="int4")

    def leaves(job: Job) -> dict[tuple[str, str], float]:
        """What leaves a node, by axis and purpose."""
        found: dict[str, dict[str, int]] = {}
        for flow in flows(Share(job, job.kinds(range(37)), False, False)):
            found.setdefault(flow.axis, {})[flow.purpose] = flow.bytes
        kept = {(axis, what): {axis: {what: size}} for axis, of in found.items() for what, size in of.items()}
        return {key: 8 * split_by_node(job, one, 8)[key[0]]["cross_node"] for key, one in kept.items()}

    elements = (
        sum(
            flow.bytes
            for flow in flows(Share(plain, plain.kinds(range(37)), False, False))
            if flow.purpose == "gradients"
        )
        // 2
        * 64
        // 63
    )
    block, M = units_of(plain, [range(1, 2)])[0], 2 * elements
    padding = units_of(coded, [range(1, 2)])[0].padded(64) / block.padded(
        64
    )  # so that parameters have blocks of their own
    assert 36 * block.padded(64) == elements and 1 <= padding < 1.0001
    before, after = leaves(plain), leaves(coded)
    assert before["data", "parameters"] == pytest.approx(2 * M * 63 / 64)
    assert before["data", "gradients"] == pytest.approx(M * 63 / 64)
    M *= padding
    assert after["data", "parameters"] == pytest.approx(0.5 * M * (1 + 1 / 64) * 63 / 64, rel=1e-5)
    assert after["shard", "parameters"] == after["shard", "gradients"] == 0
    assert after["replica", "gradients"] == pytest.approx(0.25 * M * (1 + 1 / 32) * 7 / 8, rel=1e-5)


def test_tables_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    for table in (needs, tiers):
        assert "\n".join(table()) in page, f"{table.__name__}: python -m tests.plan.infinity prints it anew"
