"""Seconds by phase are all the time that has passed, each second in one phase."""

from megazero.observe.phases import PHASES, PhaseSeconds

SAID = {
    "data": "data",
    "forward of micro-batch 0": "forward",
    "forward of micro-batch 3 in stage 1": "forward",
    "backward of micro-batch 0": "backward",
    "backward (input) of micro-batch 1": "backward",
    "backward (weight) of micro-batch 1 in stage 0": "backward",
    "reduction of micro-batch 1": "backward",
    "tied sum of micro-batch 1": "backward",
    "update": "update",
    "save": "save",
    "validation": "validation",
}


def test_each_word_counts_to_its_phase_and_nothing_is_lost():
    clock = [100.0]
    phases = PhaseSeconds(lambda: clock[0])
    expected = dict.fromkeys(PHASES, 0.0)
    phases.take()
    for number, (said, phase) in enumerate(SAID.items()):
        phases.now(said)
        clock[0] += 2.0**number
        expected[phase] += 2.0**number
    assert phases.take() == expected and sum(expected.values()) == clock[0] - 100.0
    clock[0] += 0.5
    assert phases.take() == {**dict.fromkeys(PHASES, 0.0), "validation": 0.5}, "the phase under way goes on"


def test_what_is_no_phase_counts_to_the_one_before():
    clock = [0.0]
    phases = PhaseSeconds(lambda: clock[0])
    phases.now("save")
    phases.now("something new")
    clock[0] = 3.0
    assert phases.take()["save"] == 3.0
