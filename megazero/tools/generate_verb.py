"""`megazero generate` and `megazero eval`: their command lines. Imports torch only when they run."""

import argparse
import json
from pathlib import Path
from typing import Any

from megazero.base.answers import answer
from megazero.base.command_line import at_least
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.tools.train_verb import MOST_LOCAL

_SAMPLING = {  # option of `Sampling`: type, default, meaning
    "tokens": (at_least(1, int), 100, "most new tokens"),
    "temperature": (at_least(0, float), 0.8, "sampling temperature; 0 takes the likeliest token"),
    "top_k": (at_least(0, int), 50, "draw from the N likeliest; 0: all"),
    "top_p": (at_least(0, float, 1), 1.0, "draw from the likeliest tokens that together have probability N"),
    "repetition": (at_least(0.01, float), 1.0, "divide the logits of tokens that the text has by N"),
    "seed": (at_least(0, int), 0, "seed of the sampling"),
}


def add(verbs: Any) -> None:
    """Add both verbs."""
    generate = verbs.add_parser("generate", help="continue prompts with a run's weights")
    evaluate = verbs.add_parser("eval", help="evaluate a run on texts and on tasks of lm-eval")
    for parser, what in ((generate, "split the matrices"), (evaluate, "evaluate")):
        parser.add_argument("--run", dest="run_folder", type=Path, required=True, help="the run's folder")
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
    for name, (kind, default, what) in _SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        generate.add_argument(flag, type=kind, default=default, metavar="N", help=f"{what} (default: {default})")
    generate.set_defaults(run=_generate)
    evaluate.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="files of text")
    tasks = "tasks of lm-eval: names, or files that define one"
    evaluate.add_argument("--tasks", type=lambda text: text.split(","), default=[], metavar="A,B", help=tasks)
    stride = "new tokens that a window scores (default: half of model.seq_len)"
    evaluate.add_argument("--stride", type=at_least(1, int), help=stride)
    evaluate.add_argument("--tensor", type=at_least(1, int), default=1, help="ranks that split the matrices (1)")
    evaluate.set_defaults(run=_eval)


def _generate(options: argparse.Namespace) -> int:
    if (options.prompt is None) == (options.prompts is None) or (options.prompts is None) != (options.out is None):
        raise UserError(100, "expected --prompt TEXT, or --prompts FILE.jsonl with --out FILE.jsonl", where="generate")
    with doing("loading torch"):
        from megazero.tools.generate import Request, Sampling, generate

    sampling = Sampling(**{name: getattr(options, name) for name in _SAMPLING})
    given = options.run_folder, options.prompt, options.prompts, options.out, sampling
    asked = Request(*given, options.stop, options.chat, options.batch, options.nproc, options.average)

    def say(text: str) -> None:
        answer(json.dumps({"prompt": options.prompt, "text": text}) if options.json else text)

    return generate(asked, say)


def _eval(options: argparse.Namespace) -> int:
    if not options.text and not options.tasks:
        raise UserError(100, "expected --text FILE, --tasks A,B, or both", where="eval")
    with doing("loading torch"):
        from megazero.tools.evaluate import Request, as_text, evaluate

    given = options.run_folder, options.text, options.tasks, options.stride
    asked = Request(*given, options.nproc, options.tensor, options.batch, options.average)
    return evaluate(asked, lambda found: answer(json.dumps(found) if options.json else as_text(found)))
