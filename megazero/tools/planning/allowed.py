"""Say which layouts the rules of options allow, for those who try all layouts."""

from collections.abc import Callable

from megazero.builders.job import options_of
from megazero.config.flat import flatten
from megazero.config.rules import broken_rules
from megazero.config.schema import Config
from megazero.plan.job import Job


def allowed_by_rules(config: Config) -> Callable[[Job], bool]:
    """Return a function that says whether the rules allow the config to be laid out as a job is."""
    values = flatten(config)

    def allowed(layout: Job) -> bool:
        return not broken_rules(values | options_of(layout))

    return allowed
