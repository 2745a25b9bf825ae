"""Actions from the text that they print as."""

import re

from megazero.schedules.actions import Action, Kind


def parsed(text: str) -> Action:
    """Return the action that prints as `text`."""
    found = re.fullmatch(r"(\d+)(\D+)(\d+)", text)
    assert found is not None, f"{text} is no action"
    stage, kind, micro_batch = found.groups()
    return Action(int(stage), Kind(kind), int(micro_batch))
