"""Text generation: tokens per second by the length of the context, beside the same model of plain torch modules.

    python scripts/bench/generate.py [--contexts 64 256 1024] [--tokens 8] [--threads 1] [--launches 3] [--pairs 21]
                                     [--json] [--save]

What is timed is `python -m megazero generate` without its start and without reading weights: one sequence, the *small*
GPT (8 layers, hidden 512, 8 heads, vocabulary 8,192), fp32. Neither system keeps anything from one token to the next:
each new token runs the whole context again, which is how generate works. So tokens per second fall as the context
grows, and a system that keeps keys and values would be faster; that is not measured here.

The reference (1.000) is `scripts/bench/plain_gpt.py` with the logits of all positions, as ours computes them; `last
logits` computes those of the last position alone. All have the same weights and take the likeliest token: the tokens
must be the same, or the script fails. One process each; nothing is sent.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.builders.assemble import build_model
from megazero.config.schema import Config, Model, resolved
from megazero.tools.generate import Sampling, sample
from scripts.bench import figures
from scripts.bench.harness import AGAIN, Group, Measured, add_options, chosen, measure, rows_of
from scripts.bench.ours import VOCAB, initial_weights
from scripts.bench.plain_gpt import PlainGPT
from scripts.bench.processes import Call, System

SMALL = {"layers": 8, "hidden": 512, "heads": 8, "vocab": VOCAB}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 1024], help="tokens before the new ones")
    parser.add_argument("--tokens", type=int, default=8, help="new ones of a call (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    add_options(parser)
    options = parser.parse_args()
    return figures.tell(reports(options), as_json=options.json, save=options.save)


def reports(options: argparse.Namespace) -> Iterator[figures.Report]:
    """Yield a report for each number of threads and each length of the context."""
    model = Model.model_validate(SMALL | {"seq_len": max(options.contexts) + options.tokens})
    for threads in options.threads:
        for context in options.contexts:
            group = group_of(model, context, options.tokens, threads, options.only)
            measured = measure(group.systems, options.launches, -(-options.pairs // options.launches))
            require_same_tokens(measured)
            rows = rows_of(group, measured)
            for row in rows:
                row["columns"] = {"tokens/s": options.tokens / row["seconds"]}
            told = {"launches": options.launches, "rounds": len(measured.foreign) // options.launches}
            yield figures.report_of(group.title, rows, **told, foreign=measured.foreign)


def group_of(model: Model, context: int, tokens: int, threads: int, only: list[str]) -> Group:
    told = (model, context, tokens)
    plain = System("plain torch", plain_call, (*told, False), threads)
    systems = [
        plain,
        replace(plain, name=plain.name + AGAIN),
        System("plain torch, last logits", plain_call, (*told, True), threads),
        System("ours", our_call, told, threads),
    ]
    title = f"{tokens} tokens after {context:,}, {threads} thread{'s' * (threads > 1)}"
    return Group(title, chosen(systems, only), again=False)


def require_same_tokens(measured: Measured) -> None:
    """Refuse systems that have generated other tokens than the others: then they have not done the same work."""
    sums = {name: set(found) for launch in measured.losses for name, found in launch.items()}
    if len(set.union(*sums.values())) > 1:
        raise ValueError(f"the systems generate different tokens: {sums}")


def prompt_of(context: int) -> list[int]:
    return torch.randint(0, VOCAB, (context,), generator=torch.Generator().manual_seed(0)).tolist()


def sum_of(ids: list[int]) -> float:
    """Return a number that differs when an id, or the order of two, differs."""
    return float(sum(place * token for place, token in enumerate(ids, start=1)))


def our_call(shape: Model, context: int, tokens: int) -> Call:
    """Return a call that generates with `megazero.tools.generate`; it returns the sum of the tokens."""
    config = resolved(Config(model=shape))
    model, weight = build_model(config), initial_weights(config)
    for name, parameter in dict(model.named_parameters()).items():
        torch.utils.swap_tensors(parameter, nn.Parameter(weight(name)))
    prompt, sampling = prompt_of(context), Sampling(tokens, temperature=0)
    return lambda: sum_of(sample(model, prompt, sampling, window=shape.seq_len, vocab=VOCAB, stop=-1))


def plain_call(shape: Model, context: int, tokens: int, last: bool) -> Call:
    """Return a call that generates with plain torch; it returns the sum of the tokens."""
    plain = PlainGPT(shape.layers, shape.hidden, shape.heads, shape.vocab, shape.seq_len)
    plain.take_weights(initial_weights(resolved(Config(model=shape))))
    logits_of, prompt = logits_by(plain, last), prompt_of(context)

    @torch.no_grad()
    def call() -> float:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(logits_of(torch.tensor([ids])).argmax()))
        return sum_of(ids[context:])

    return call


def logits_by(plain: PlainGPT, last: bool) -> Callable[[Tensor], Tensor]:
    """Return the function from ids [1, S] to the last position's logits [vocabulary].

    Args:
        last: it computes no others.
    """

    def logits(ids_BS: Tensor) -> Tensor:
        x = plain.tokens(ids_BS) + plain.positions(torch.arange(ids_BS.shape[1]))
        for block in plain.blocks:
            x = block(x)
        return F.linear(plain.norm(x[:, -1:] if last else x), plain.tokens.weight)[0, -1]

    return logits


if __name__ == "__main__":
    sys.exit(main())
