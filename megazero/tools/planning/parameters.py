"""List the parameters of a config with the optimizer, learning rate and weight decay that each group gives them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megazero.builders.job import groups_of
from megazero.builders.pipeline import model_shape
from megazero.config.schema import Config
from megazero.plan.optimizers import WHOLE
from megazero.plan.states import units


def rows(config: Config) -> list[dict[str, Any]]:
    """Return a row for each parameter of the whole model, in the order of units."""
    groups, found = groups_of(config.optimizer), []
    for unit in units(model_shape(config), 1):
        for weight in unit.weights:
            name = unit.full_name(weight)
            own = groups.of(name, decays=weight.decays, hidden=weight.matrix is not None)
            match = groups.asked[own.number].match if own.number >= 0 else None
            row = {"name": name, "shape": [weight.rows, weight.columns] if weight.columns > 1 else [weight.rows]}
            matrices = len(weight.matrix.shapes) if weight.matrix and own.optimizer in WHOLE else None
            row |= {"optimizer": own.optimizer, "lr": config.optimizer.lr * own.lr_factor, "weight_decay": own.decay}
            found.append(row | {"group": match, "clip": match if own.clip else None, "matrices": matrices})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as text, equal parameters of different blocks in one line."""
    alike: Counter[str] = Counter()
    for row in found:
        name = re.sub(r"^blocks\.\d+\.", "blocks.*.", row["name"])
        several = f" ({row['matrices']} matrices)" if (row["matrices"] or 1) > 1 else ""
        shape = " x ".join(map(str, row["shape"])) + several
        numbers = f"{row['lr']:<10.3g}{row['weight_decay']:<7.3g}"
        alike[f"{name:<34}{shape:<28}{row['optimizer']:<10}{numbers}{row['group'] or '-'}"] += 1
    head = f"count  {'parameter':<34}{'shape':<28}{'optimizer':<10}{'lr':<10}{'decay':<7}group"
    return "\n".join([head, *(f"{count:>5}  {line}" for line, count in alike.items())])
