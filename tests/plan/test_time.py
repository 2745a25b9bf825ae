"""The time of a step: its parts against the simulator and the papers' formulas, and what it must never do."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.plan.bubble import bubble_of
from megazero.plan.compute import Compute, PassTimes
from megazero.plan.flops import flops_per_token
from megazero.plan.job import Bytes, Job
from megazero.plan.layers import parameters
from megazero.plan.links import Links
from megazero.plan.machines import MACHINES, Link, Machine
from megazero.plan.model import Shape
from megazero.plan.optimizers import Optimizers
from megazero.plan.share import Share
from megazero.plan.systems import OURS, System
from megazero.plan.time import step_time
from megazero.plan.traffic import flows
from megazero.schedules.catalogue import make
from megazero.schedules.simulate import Costs, simulate

GPT3 = Shape(96, 12288, 96, 96, 4 * 12288, 51200, 2048)
LLAMA = Shape(32, 4096, 32, 8, 14336, 128256, 8192, "rotary", "rmsnorm", "swiglu", tie_embeddings=False)
MIXED = Bytes(2, 2, 4)
A100 = MACHINES["a100-80gb"]
HOST_MEMORY = 50e9  # bytes a second of an A100 in its node
WHOLE = System(replays_all=True)
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("costs", [(1, 1, 1), (4, 5, 3), (14, 20, 9), (1, 2, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_bubble_is_the_simulator_s(schedule: str, chunks: int, costs: tuple[int, int, int], ranks: int) -> None:
    """Costs of a rank are those of all its stages."""
    each = [cost / chunks for cost in costs]
    found = simulate(make(schedule, ranks, 4 * ranks, chunks), [Costs(*each)] * (ranks * chunks))
    waits = found.makespan - max(found.work)
    assert bubble_of(schedule, ranks, chunks, PassTimes(*costs)) == pytest.approx(waits, abs=1e-6)


layouts = st.builds(
    lambda shape, tensor, pipeline, data, stage, micro, more, recompute, sequence, chunks: Job(
        shape,
        MIXED,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        stage=stage,
        micro_batch=micro,
        global_batch=micro * data * more,
        recompute=recompute,
        sequence=sequence,
        tensor_chunks=chunks,
        partition=recompute == "full",
    ),
    st.sampled_from([GPT3, LLAMA]),
    st.sampled_from([1, 2, 8, 16]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 64]),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 32),
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
    st.sampled_from([1, 2, 5]),
)
machines = st.sampled_from(list(MACHINES.values()))


@settings(max_examples=60)
@given(layouts, machines)
def test_parts_add_up_and_no_rate_is_beyond_the_peak(layout: Job, machine: Machine) -> None:
    found = step_time(layout, machine)
    assert found.step_s == pytest.approx(sum(found.parts.values())) and min(found.parts.values()) >= 0
    assert min(found.hidden.values()) >= -1e-12
    assert 0 < found.mfu <= found.hfu < 1
    tokens = layout.global_batch * layout.shape.seq_len
    assert found.tokens_per_second_per_device * layout.ranks * found.step_s == pytest.approx(tokens)
    per_token = flops_per_token(layout.shape)
    assert found.tflops_per_device * 1e12 == pytest.approx(found.tokens_per_second_per_device * per_token)


@settings(max_examples=40)
@given(layouts, machines, st.sampled_from(["memory", "in_node", "cross_node"]))
def test_a_faster_machine_is_never_slower(layout: Job, machine: Machine, what: str) -> None:
    share = getattr(machine.reached, what)
    faster = replace(machine, reached=replace(machine.reached, **{what: 2 * share}))
    assert step_time(layout, faster).step_s <= step_time(layout, machine).step_s * (1 + 1e-12)


@settings(max_examples=40)
@given(layouts, machines)
def test_more_is_computed_again_for_more_recompute(layout: Job, machine: Machine) -> None:
    times = [
        step_time(replace(layout, recompute=how), machine).parts["recompute"] for how in ("none", "selective", "full")
    ]
    assert times[0] == 0 and times[0] < times[1] < times[2]


def test_hardware_flops_are_the_papers() -> None:
    """Narayanan et al. 2021, eq. 3: with full recompute 96 B s l h^2 (1 + s / 6 h + V / 16 l h); here a replay leaves
    its last product out. Korthikanti et al. 2022, appendix A, print 72 B L s h^2 (1 + s / 3 h + v / 12 h L) with
    selective, all 12 s h of attention once more; what is computed again is its forward, a third of that.
    """
    L, h, s, V = GPT3.layers, GPT3.hidden, GPT3.seq_len, GPT3.vocab
    layout = Job(GPT3, MIXED, recompute="selective")
    assert Compute(layout, A100).flops()[1] == pytest.approx(
        72 * L * h**2 * (1 + 4 / 3 * s / (6 * h) + V / (12 * h * L))
    )
    layout = replace(layout, recompute="full")
    paper = 96 * L * h**2 * (1 + s / (6 * h) + V / (16 * h * L))
    assert Compute(layout, A100, WHOLE).flops()[1] == pytest.approx(paper)
    assert Compute(layout, A100, OURS).flops()[1] == pytest.approx(paper - 8 * L * h**2)


def test_rings_are_as_fast_as_their_slowest_link() -> None:
    """8 devices a node: tensor 8 in the node; tensor 16 through two, with the cards of all 8; data with those of as
    many ranks as it has in a node.
    """
    reached, card = A100.reached, A100.cross_node.bandwidth
    node = A100.in_node.bandwidth * reached.in_node

    def rate(axis: str, **sizes: int) -> float:
        return Links(Job(GPT3, MIXED, **sizes), A100).bandwidth(axis)

    assert rate("tensor", tensor=8) == node
    assert rate("tensor", tensor=16) == min(node, 8 * card * reached.cross_node)
    assert rate("data", tensor=8, data=4) == card * reached.cross_node
    assert rate("data", tensor=2, data=8) == min(node, 4 * card * reached.cross_node)
    assert rate("pipeline", tensor=2, data=2, pipeline=2) == node


def test_traffic_hides_behind_computation() -> None:
    """In stage 3, until there is more of it: SC21's second table, where devices double and micro-batches halve."""
    layout = Job(GPT3, MIXED, data=384, stage=3, micro_batch=4, global_batch=1536, recompute="full")
    slow = replace(A100, cross_node=replace(A100.cross_node, bandwidth=A100.cross_node.bandwidth / 4))
    waited = [
        step_time(replace(layout, data=ranks, micro_batch=micro), slow).parts["data traffic"]
        for ranks, micro in ((384, 4), (768, 2), (1536, 1))
    ]
    found = step_time(layout, slow)
    assert waited[0] < waited[1] < waited[2] and found.hidden["data"] > 5 * waited[0]
    alone = step_time(layout, slow, replace(OURS, overlaps=False))
    assert alone.hidden["data"] == 0
    assert alone.parts["data traffic"] == pytest.approx(waited[0] + found.hidden["data"])


@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_hide_forward_s_sums_behind_its_products(sequence: bool) -> None:
    """One n-th is left of what is shorter than the products; of what is longer, all that products do not hide."""
    layout = Job(GPT3, MIXED, tensor=8, sequence=sequence, micro_batch=1, global_batch=1)
    node = A100.in_node.bandwidth
    ideal = replace(A100, in_node=Link(100 * node, 0.0), launch=0.0, memory_bandwidth=1e30)

    def waits(machine: Machine) -> list[float]:
        jobs = (replace(layout, tensor_chunks=chunks) for chunks in (1, 2, 4, 16))
        return [step_time(job, machine).parts["tensor traffic"] for job in jobs]

    one, two, four, _ = waits(ideal)
    assert one - two == pytest.approx(2 * (two - four)) and one - two > 0
    links = Links(layout, ideal)
    sums = 4 if sequence else 2
    each = links.seconds("tensor", 2 * layout.shape.seq_len * layout.shape.hidden * 7 / 8 * (4 / sums), 1)
    assert one - two == pytest.approx(GPT3.layers * sums * each / 2)
    slow = replace(ideal, in_node=Link(node / 100, 0.0))
    products = Compute(layout, slow).products()
    one, two, *_ = waits(slow)
    assert one - two == pytest.approx(GPT3.layers * sum(products if sequence else products[1::2]) / 2)
    costs = waits(replace(A100, in_node=replace(A100.in_node, bandwidth=1e15)))
    assert costs == sorted(costs), "where there is nothing to hide, pieces only cost: they read their matrices again"


def test_what_rests_on_the_host_is_updated_there() -> None:
    layout = Job(LLAMA, MIXED, data=8, stage=2, global_batch=8)
    there = step_time(replace(layout, offload_optimizer="cpu"), A100)
    here = step_time(layout, A100)
    assert here.parts["offload"] == there.parts["update"] == 0 < here.parts["update"] < there.parts["offload"]
    states = parameters(LLAMA) / 8 * (2 * 12 + 2 + 2) / HOST_MEMORY
    assert there.parts["offload"] >= states


def test_a_delayed_update_has_the_next_step_beside_it() -> None:
    layout = Job(LLAMA, MIXED, data=8, stage=2, global_batch=8, offload_optimizer="cpu")
    slow = replace(A100, host_memory_bandwidth=HOST_MEMORY / 100)
    at_once, delayed = (step_time(replace(layout, delayed=delayed), slow) for delayed in (False, True))
    spared = at_once.parts["offload"] - delayed.parts["offload"]
    assert spared == pytest.approx(at_once.parts["compute"], rel=0.2) and delayed.parts["offload"] > 0
    quick = step_time(replace(layout, delayed=True), replace(A100, host_memory_bandwidth=1e13))
    assert quick.parts["offload"] < step_time(layout, A100).parts["offload"]


def test_each_iteration_of_muon_takes_equal_time() -> None:
    layout = Job(GPT3, MIXED, optimizers=Optimizers("muon"))
    two, five, eight = (step_time(replace(layout, muon_steps=n), A100).parts["update"] for n in (2, 5, 8))
    assert eight - five == pytest.approx(five - two) and five > two


def test_an_unknown_peak_is_said() -> None:
    blind = replace(A100, peak_flops={"fp32": 1e13})
    with pytest.raises(ValueError, match="a100-80gb has no peak for matrix products of 2 bytes"):
        step_time(Job(GPT3, MIXED), blind)


def test_an_exchange_crosses_nodes_by_itself() -> None:
    """Of 64 ranks, 8 in a node: 56 of 63 parts leave through a rank's own link; of a ring, an eighth of all, through
    the links of all 8."""
    node, card = (replace(link, latency=0.0) for link in (A100.in_node, A100.cross_node))
    links = Links(Job(GPT3, MIXED, data=64, stage=3), replace(A100, in_node=node, cross_node=card))
    card = card.bandwidth * A100.reached.cross_node
    assert links.exchange("data", 63e9, 1) == pytest.approx(56e9 / card)
    assert links.seconds("data", 63e9, 1) == pytest.approx(63e9 / (8 * card))
    near = Links(Job(GPT3, MIXED, data=64, stage=3, secondary_ranks=8), links.machine)
    node = A100.in_node.bandwidth * A100.reached.in_node
    assert near.exchange("shard", 7e9, 1) == pytest.approx(7e9 / node)
    assert near.exchange("replica", 7e9, 1) == pytest.approx(7e9 / card)
    on_cpus = Links(links.job, replace(links.machine, nccl_channels=0))  # whose messages go from each to each
    assert on_cpus.seconds("data", 63e9, 1) == on_cpus.exchange("data", 63e9, 1) == links.exchange("data", 63e9, 1)


def test_codes_are_passes_over_the_memory() -> None:
    """Codes with their scales, a 64th of a byte each, and values, by the bandwidth that training reaches."""
    job = Job(GPT3, MIXED, data=64, stage=3, micro_batch=1, global_batch=128)
    job = replace(job, quantize_parameters="int8", quantize_gradients="int4")
    machine = replace(A100, launch=0.0)
    share = Share(job, job.kinds(range(97)), True, True)
    own, gathered, reduced = list(flows(share)), 2 * sum(share.gathers), 2 * 64 * share.updated
    bandwidth = A100.memory_bandwidth * A100.reached.memory
    parameters, gradients = Compute(job, machine).codes(own, gathered, reduced)
    assert parameters == pytest.approx((2 + 1 + 1 / 64) * gathered * 65 / 64 / bandwidth)
    assert gradients == pytest.approx((3 * 2 + 2 * (1 / 2 + 1 / 64)) * reduced * 63 / 64 / bandwidth)
    fed = replace(job, error_feedback=True)
    assert Compute(fed, machine).codes(own, gathered, reduced)[1] > 2 * gradients
    plain = replace(job, quantize_parameters="none", quantize_gradients="none")
    assert Compute(plain, machine).codes(own, gathered, reduced) == (0.0, 0.0)
    # A kernel for each part: of a gather its own and all 64, of a reduction those of 63 others, there and back.
    late = Compute(job, replace(machine, launch=1.0)).codes(own, gathered, reduced)
    gathers_of_a_micro_batch = 2 * 96 + 4  # blocks twice, two units at each end once
    assert late[0] - parameters == pytest.approx(2 * gathers_of_a_micro_batch * 65)
    assert late[1] - gradients == pytest.approx(2 * (96 + 3) * 63 * 2)


def test_quantised_traffic_costs_less_where_links_are_slow_and_more_where_they_are_not() -> None:
    job = Job(GPT3, MIXED, data=64, stage=3, micro_batch=1, global_batch=64, recompute="full", secondary_ranks=8)
    coded = replace(job, quantize_parameters="int8", quantize_gradients="int4")
    slow, fast = (replace(A100, cross_node=Link(rate, 1e-5), in_node=Link(1e14, 1e-5)) for rate in (1e9, 1e14))
    assert step_time(coded, slow).step_s < 0.6 * step_time(job, slow).step_s
    alone = replace(OURS, overlaps=False)
    assert step_time(coded, fast, alone).step_s > step_time(job, fast, alone).step_s
