"""Measure the mutation score: plant random one-line mutations, one at a time, and record which tests find them.

    python scripts/mutate.py --out mutations.jsonl --count 200      # a second run continues where the file ends
    python scripts/mutate.py --report mutations.jsonl               # the score by kind, and the survivors

Mutations are drawn with a seed from the packages (`ROOMS`) that compute, send or store numbers, evenly over all kinds
of mutation. Each is planted in a copy of the tree. Then the quick tests of the mutated module run, those that import
it, those of its package, and the certificate; the first that fails has found the mutation. A mutation that none finds
has survived: it needs a test, or a reason why no result differs.
"""

import argparse
import ast
import collections
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from megazero.data.indexed_dataset import IndexedDatasetWriter

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("zero", "optim", "comm", "library", "data", "memory", "pipeline", "model", "checkpoint")
AXES = ("tensor", "pipeline", "data", "shard", "replica", "world")
SENDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "redistribute", "wait", "join", "settle")
OTHER = {  # operator -> its replacement
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.And: "or",
    ast.Or: "and",
}
CERTIFY = ("certify", "--max-ranks", "2", "--layouts", "12")
CONFIG = """
run: {steps: 3}
model: {layers: 4, hidden: 32, heads: 4, vocab: 300, seq_len: 32, dropout: 0.1}
batch: {global: 4, micro: 1}
"""
LIMIT = 900.0  # seconds of one command; it finds mutations that make a test hang


@dataclass(frozen=True)
class Mutation:
    """A replacement text for the bytes of one line from `begin` to `end`."""

    path: str
    line: int
    begin: int
    end: int
    text: str
    kind: str

    def planted(self, source: str) -> str:
        """Return the file's text with the mutation."""
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.begin] + self.text.encode() + line[self.end :]).decode()
        return "".join(lines)


def of_expression(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield the mutations of one node: (node to replace, its new text, kind)."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div()):
            yield node, ast.unparse(left), "scale"
        case ast.BinOp(left=left, op=(ast.Add() | ast.Sub()) as op, right=right):
            yield node, f"({ast.unparse(left)}) {OTHER[type(op)]} ({ast.unparse(right)})", "sign"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield node, ast.unparse(operand), "sign"
        case ast.Constant(value=float(value)) if value:
            yield node, repr(2 * value), "scale"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield node, str(value + 1), "off by one"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OTHER:
            kind = "wrong branch" if isinstance(op, ast.Eq | ast.NotEq) else "off by one"
            yield node, f"{ast.unparse(left)} {OTHER[type(op)]} {ast.unparse(right)}", kind
        case ast.Constant(value=str(value)) if value in AXES:
            yield node, repr(AXES[(AXES.index(value) + 1) % len(AXES)]), "axis"
        case ast.keyword(arg="dim", value=ast.expr() as value):
            yield value, "0" if ast.unparse(value) != "0" else "-1", "axis"
        case ast.Expr(value=ast.Call()):
            yield node, "pass", "missing call"
        case ast.Call(func=ast.Attribute(attr=attribute), args=[first, *_]) if attribute in SENDS:
            yield node, ast.unparse(first), "missing call"
        case ast.IfExp(test=test, body=body, orelse=other):
            text = f"{ast.unparse(other)} if {ast.unparse(test)} else {ast.unparse(body)}"
            yield node, text, "wrong branch"
        case ast.BoolOp(op=op, values=values):
            yield node, f" {OTHER[type(op)]} ".join(f"({ast.unparse(v)})" for v in values), "wrong branch"
        case ast.If(test=test) | ast.While(test=test):
            yield test, f"not ({ast.unparse(test)})", "wrong branch"


def candidates(path: str, source: str) -> Iterator[Mutation]:
    """Yield all one-line mutations of a file outside of error messages, annotations, defaults and assertions."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                    yield from walk(child)

    for node in walk(ast.parse(source)):
        for at, text, kind in of_expression(node):
            docstring = isinstance(at, ast.Expr) and isinstance(at.value, ast.Constant)
            if at.lineno == at.end_lineno and at.end_col_offset is not None and not docstring:
                yield Mutation(path, at.lineno, at.col_offset, at.end_col_offset, text, kind)


def compiles(source: str) -> bool:
    """Return whether a text is valid Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def drawn(count: int, seed: int) -> list[Mutation]:
    """Return `count` mutations that are valid Python, in a random order in which the kinds alternate."""
    kinds = collections.defaultdict(list)
    files = (file for room in ROOMS for file in sorted((ROOT / "megazero" / room).rglob("*.py")))
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    for path, source in sources.items():
        for mutation in candidates(path, source):
            kinds[mutation.kind].append(mutation)
    pick = torch.Generator().manual_seed(seed)
    valid = []
    for kind in sorted(kinds):
        order = torch.randperm(len(kinds[kind]), generator=pick).tolist()
        shuffled = [kinds[kind][place] for place in order]
        valid.append(one for one in shuffled if compiles(one.planted(sources[one.path])))
    turns = (one for each in itertools.zip_longest(*valid) for one in each if one is not None)
    return list(itertools.islice(turns, count))


def nearest(path: str) -> list[list[str]]:
    """Return lists of test files: those with the module's name, those that import it, those of its package."""
    module, room = path.removesuffix(".py").replace("/", "."), Path(path).parts[1]
    folder = ROOT / "tests" / room
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    own = [file for file in (folder / f"test_{Path(path).stem}.py",) if file.exists()]
    users = [file for file in tests if f"{module} " in file.read_text(encoding="utf-8") and file not in own]
    rest = [file for file in tests if folder in file.parents and file not in own + users]
    return [[str(file.relative_to(ROOT)) for file in files] for files in (own, users, rest) if files]


def ended(command: list[str], tree: Path) -> int | None:
    """Run a command in a tree; return its exit code, or None if it took longer than `LIMIT`."""
    quiet = subprocess.DEVNULL
    command = ["env", f"PYTHONPATH={tree}", "OMP_NUM_THREADS=1", *command]
    running = subprocess.Popen(command, cwd=tree, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        return running.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return None


def verdict(mutation: Mutation, tree: Path, data: Path) -> str:
    """Return what finds the mutation that is planted in a tree: test files, "certify", or "survived"."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", "-p", "no:cacheprovider"]
    for files in nearest(mutation.path):
        if ended([*pytest, *files], tree) not in (0, 5):  # 5: no quick test there
            return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    train = f"data.train={data / 'train'}"
    command = [sys.executable, "-m", "megazero", *CERTIFY, "--config", str(data / "mutate.yaml"), train]
    return "survived" if ended(command, tree) == 0 else "certify"


def copied(folder: Path) -> Path:
    """Copy the files that git tracks to a folder; return the folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def prepare(folder: Path) -> Path:
    """Write token files and a config for the certificate, with the unmutated code."""
    draw = torch.Generator().manual_seed(0)
    with IndexedDatasetWriter(folder / "train", np.uint16) as writer:
        for _ in range(200):
            length = int(torch.randint(5, 90, (), generator=draw))
            writer.append(torch.randint(0, 300, (length,), generator=draw).numpy())
            writer.end_document()
    (folder / "mutate.yaml").write_text(CONFIG)
    return folder


def run(out: Path, count: int, seed: int, judge: Callable[[Mutation, Path, Path], str] = verdict) -> None:
    """Judge mutations and append one JSON line for each to a file; skip those that the file has."""
    done = {json.dumps(row["mutation"]) for row in rows(out)} if out.exists() else set()
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        tree, data = copied(Path(name) / "tree"), Path(name) / "data"
        data.mkdir()
        prepare(data)
        for mutation in drawn(count, seed):
            if json.dumps(asdict(mutation)) in done:
                continue
            file = tree / mutation.path
            source = file.read_text(encoding="utf-8")
            file.write_text(mutation.planted(source), encoding="utf-8")
            found = judge(mutation, tree, data)
            file.write_text(source, encoding="utf-8")
            before = source.splitlines()[mutation.line - 1].strip()
            after = mutation.planted(source).splitlines()[mutation.line - 1].strip()
            with out.open("a", encoding="utf-8") as lines:
                row = {"mutation": asdict(mutation), "found": found, "before": before, "after": after}
                lines.write(json.dumps(row) + "\n")
            print(f"{mutation.path}:{mutation.line} {mutation.kind}: {before} -> {after}: {found}", flush=True)


def rows(out: Path) -> list[dict]:
    """Return the rows of a results file."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def report(out: Path) -> None:
    """Print how many mutations of each kind were found, and every survivor."""
    counts = collections.defaultdict(collections.Counter)
    survivors = [row for row in rows(out) if row["found"] == "survived"]
    for row in rows(out):
        counts[row["mutation"]["kind"]][row["found"] == "survived"] += 1
    print("| kind | planted | survived |\n|---|---|---|")
    for kind, count in sorted(counts.items()):
        print(f"| {kind} | {count.total()} | {count[True]} |")
    print(f"| all | {len(rows(out))} | {len(survivors)} |\n")
    for row in survivors:
        at = row["mutation"]
        print(f"- `{at['path']}:{at['line']}` {at['kind']}: `{row['before']}` -> `{row['after']}`")


def main() -> None:
    """Run the command line: judge mutations, or report results."""
    parser = argparse.ArgumentParser(description="Measure the mutation score.")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    parser.add_argument("--report", type=Path, help="count the rows of this file")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.report:
        report(given.report)
    elif given.out:
        run(given.out, given.count, given.seed)
    else:
        parser.error("give --out or --report")


if __name__ == "__main__":
    main()
