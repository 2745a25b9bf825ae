"""State how the tokens of a text are drawn.

temperature   divides the logits; 0 takes the most probable token
top_k         draw from the K most probable tokens; 0: from all                Fan et al. 2018, arXiv 1805.04833
top_p         draw from the fewest tokens whose probabilities sum to P         Holtzman et al. 2020, arXiv 1904.09751
repetition    divides the logits of tokens that are in the text already, multiplies negative ones
                                                                               Keskar et al. 2019, arXiv 1909.05858
"""

from dataclasses import dataclass

from megazero.base.errors import UserError

_LEAST, _MOST = {"tokens": 1, "repetition": 0.01}, {"top_p": 1}  # of the others: 0, and any number of 63 bits


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing tokens.

    Attributes:
        tokens: the most new tokens of a text.
        seed: of the random numbers.

    Raises:
        UserError: 100, a setting is out of its range.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    repetition: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least, most = _LEAST.get(name, 0), _MOST.get(name, 2**63 - 1)
            if not least <= value <= most:
                raise UserError(100, f"{name} is {value}, expected {least} to {most:.3g}", where="generate")
