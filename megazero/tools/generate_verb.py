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

_SAMPLING = ("tokens", "temperature", "top_k", "top_p", "repetition", "seed")


def add(verbs: Any) -> None:
    """Add both verbs."""
    generate = verbs.add_parser("generate", help="continue prompts with a run's weights")
    evaluate = verbs.add_parser("eval", help="compute a run's loss, perplexity and bits per byte on texts")
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
    generate.add_argument("--tokens", type=at_least(1, int), default=100, help="most new tokens (default: 100)")
    likeliest = "sampling temperature; 0 takes the likeliest token (default: 0.8)"
    generate.add_argument("--temperature", type=at_least(0, float), default=0.8, help=likeliest)
    generate.add_argument("--top-k", type=at_least(0, int), default=50, help="draw from the K likeliest; 0: all (50)")
    share = "draw from the likeliest tokens that together have P (default: 1)"
    generate.add_argument("--top-p", type=at_least(0, float, 1), default=1.0, help=share)
    penalty = "divide the logits of tokens that the text has (default: 1)"
    generate.add_argument("--repetition", type=at_least(0.01, float), default=1.0, metavar="R", help=penalty)
    generate.add_argument("--seed", type=at_least(0, int), default=0, help="seed of the sampling (default: 0)")
    generate.set_defaults(run=_generate)
    evaluate.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="files of text")
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
    with doing("loading torch"):
        from megazero.tools.evaluate import Request, as_json, as_text, evaluate

    given = options.run_folder, options.text, options.stride, options.nproc, options.tensor, options.batch
    asked = Request(*given, options.average)
    return evaluate(asked, lambda found: answer(as_json(found) if options.json else as_text(found)))
