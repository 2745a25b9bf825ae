"""`megazero generate` and `megazero eval`: their command lines. Imports torch only when they run."""

import argparse
import json
from pathlib import Path
from typing import Any

from megazero.base.answers import answer
from megazero.base.command_line import at_least
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.generation.sampling import Sampling
from megazero.tools.train_verb import MOST_LOCAL

_SAMPLING = {  # field of `Sampling`: its meaning
    "tokens": "most new tokens",
    "temperature": "divide the logits by N; 0: take the most probable token",
    "top_k": "draw from the N most probable tokens; 0: from all",
    "top_p": "draw from the fewest tokens whose probabilities sum to N",
    "repetition": "divide the logits of tokens that are in the text already by N",
    "seed": "seed of the random numbers; a text depends on it and on its number in the file",
}


def add(verbs: Any) -> None:
    """Add both verbs."""
    generate = verbs.add_parser("generate", help="continue prompts with a run's weights")
    evaluate = verbs.add_parser("eval", help="evaluate a run on texts and on tasks of lm-eval")
    for parser, what in ((generate, "split the matrices"), (evaluate, "evaluate")):
        parser.add_argument("--run", dest="folder", type=Path, required=True, help="the run's folder")
        parser.add_argument("--nproc", type=at_least(1, int, MOST_LOCAL), default=1, help=f"ranks that {what} (1)")
        parser.add_argument("--batch", type=at_least(1, int), default=8, help="texts at once (default: 8)")
        parser.add_argument("--average", action="store_true", help="use the averages of the weights")
        parser.add_argument("--json", action="store_true")
    generate.add_argument("--prompt", metavar="TEXT")
    lines = 'JSON lines {"prompt": ...} or {"messages": ...}'
    generate.add_argument("--prompts", type=Path, metavar="FILE", help=lines)
    out = "for --prompts: JSON lines with texts; an interrupted command goes on there"
    generate.add_argument("--out", type=Path, metavar="FILE", help=out)
    generate.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template; print the answer")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    for name, default in vars(Sampling()).items():
        flag, what = f"--{name.replace('_', '-')}", f"{_SAMPLING[name]} (default: {default})"
        generate.add_argument(flag, type=type(default), default=default, metavar="N", help=what)
    generate.set_defaults(run=_generate)
    evaluate.add_argument("--text", dest="texts", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts")
    tasks = "tasks of lm-eval: names, or .yaml files that define one"
    evaluate.add_argument("--tasks", type=lambda text: text.split(","), default=[], metavar="A,B", help=tasks)
    evaluate.add_argument("--stride", type=at_least(1, int), help="new tokens of a window (default: half of it)")
    evaluate.add_argument("--tensor", type=at_least(1, int), default=1, help="ranks that split the matrices (1)")
    evaluate.set_defaults(run=_eval)


def _generate(options: argparse.Namespace) -> int:
    if (options.prompt is None) == (options.prompts is None) or (options.prompts is None) != (options.out is None):
        raise UserError(100, "expected --prompt TEXT, or --prompts FILE.jsonl with --out FILE.jsonl", where="generate")
    options.sampling = Sampling(**{name: getattr(options, name) for name in _SAMPLING})
    with doing("loading torch"):
        from megazero.tools.generate import Request, generate

    def say(found: dict[str, Any]) -> None:
        text = found["text"] if "text" in found else "{out}: {texts:,} texts, {new:,} of them new".format(**found)
        answer(json.dumps(found) if options.json else text)

    return generate(Request(**{name: getattr(options, name) for name in Request.__annotations__}), say)


def _eval(options: argparse.Namespace) -> int:
    if not options.texts and not options.tasks:
        raise UserError(100, "expected --text FILE, --tasks A,B, or both", where="eval")
    with doing("loading torch"):
        from megazero.tools.evaluate import Request, as_text, evaluate

    asked = Request(**{name: getattr(options, name) for name in Request.__annotations__})
    return evaluate(asked, lambda found: answer(json.dumps(found) if options.json else as_text(found)))
