"""The verbs: `python -m megazero VERB`, also installed as `megazero`; `train.py` is the verb train.

    train      trains a config
    explain    shows every option, its type, default, meaning, and rules with other options
    generate   continues a prompt with a run's weights
    eval       evaluates a run on texts and on tasks of lm-eval
    certify    compares every layout of a config with one process
    export     writes a run's weights in the format of transformers
    import     makes a run's folder from weights in the format of transformers
    schedule   shows and draws the actions of every rank of a pipeline in a step
    plan       estimates memory, traffic, time and cost of a job, and finds the fastest layout that fits
    doctor     measures this machine, and reports what is missing
    data       shows the text that a step of a run trained on
    simulate   runs one rank of a job of any size without data: its memory and traffic, to the byte
    tokenizer, preprocess, inspect, merge   make token files from text, and check them (the commands of data_tools/)

Exit codes: docs/operations.md. A fault that a user can repair is one line on stderr; a traceback is a bug of megazero.
Configs are checked before torch is imported, so a typo costs a fraction of a second.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from megazero.base.answers import answer, fail, flush_output, leave, show, tell, warn
from megazero.base.command_line import OVERRIDES, Parser, at_least, tokens
from megazero.base.doing import doing
from megazero.base.errors import UserError, of_system
from megazero.base.heartbeat import HEART
from megazero.base.packages import missing
from megazero.base.picture import check_name
from megazero.base.stop_signals import end_at_once, handle
from megazero.base.version import __version__
from megazero.run.folder import RunFolder
from megazero.tools import certify_verb, data_verb, generate_verb, train_verb
from megazero.tools.train_verb import MOST_LOCAL

# Verbs that are commands of data_tools: verb: (module, help text).
_DATA_TOOLS = {
    "tokenizer": ("train_tokenizer", "train a vocabulary on text"),
    "preprocess": ("preprocess", "turn text into token files"),
    "inspect": ("inspect", "check token files and describe their contents"),
    "merge": ("merge", "join token files"),
}


def command(arguments: Sequence[str] | None = None) -> int:
    """Run one verb as the whole process, with signal handling and heartbeat; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:
        handle(end_at_once)
    # `train` logs to standard output; on other verbs' standard output is only their answer, which programs may parse.
    HEART.begin(sys.stdout if given[:1] == ["train"] else sys.stderr, " ".join(["starting megazero", *given[:1]]))
    try:
        code = main(given)
    finally:
        HEART.end()
    return leave(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] and given[0] in _DATA_TOOLS:
            return import_module(f"data_tools.{_DATA_TOOLS[given[0]][0]}").main(given[1:])
        parser = _parser()
        if given in ([], ["train"]):  # as train.py without arguments
            with suppress(SystemExit):
                parser.parse_args([*given, "--help"])
            return 2
        options, unknown = parser.parse_known_args(given)
        if hasattr(options, "overrides") and not any(word.startswith("-") for word in unknown):
            options.overrides += unknown  # argparse takes only overrides before the first flag
            unknown = []
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options.run(options)
    except UserError as error:
        return fail(error, error.exit_code)
    except OSError as error:
        return fail(said := of_system(error), said.exit_code)
    except ModuleNotFoundError as error:
        if (said := missing(error.name)) is None:
            raise
        return fail(said, said.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    finally:
        flush_output()


def _explain(options: argparse.Namespace) -> int:
    from megazero.config.explain import as_text, explain
    from megazero.config.file import is_file_name, load, shipped
    from megazero.config.schema import Config, resolved

    given = [text for text in options.overrides if "=" in text or is_file_name(text)]
    selections = [text for text in options.overrides if text not in given]
    if len(selections) > 1:
        raise UserError(108, f"expected one option or section, got {' '.join(selections)}", where="explain")
    if given and not options.config:
        raise UserError(108, f"{given[0]} changes a config", "give --config", where="explain")
    config = load(options.config, given) if options.config else resolved(Config())
    shown = explain(config, selections[0] if selections else None)
    names = "" if selections else f"shipped configs, for --config: {', '.join(shipped())}"
    return show([asdict(option) for option in shown], "\n".join([as_text(shown), names]).rstrip(), as_json=options.json)


def _schedule(options: argparse.Namespace) -> int:
    from megazero.builders.job import job_of
    from megazero.builders.pipeline import check_world
    from megazero.config.file import load
    from megazero.plan.schedule_report import as_text, report
    from megazero.schedules.draw import draw
    from megazero.tools.planning.micro_batch import sized

    config = load(options.config, options.overrides)
    check_name(options.draw, "schedule")
    world = options.nproc or config.parallel.tensor * config.parallel.pipeline
    config = sized(config, world)
    check_world(config, world)
    with doing("making the schedule"):
        found, schedule, timeline = report(job_of(config, world))
    if options.draw is not None:
        try:
            with doing("drawing"):
                draw(schedule, timeline, options.draw)
        except OSError as error:
            do = "give another path to --draw"
            raise UserError(405, f"{options.draw}: {error.strerror}", do, where="schedule") from None
    return show(found, as_text(found, every=options.all), as_json=options.json)


def _plan(options: argparse.Namespace) -> int:
    from megazero.config.file import load
    from megazero.config.flat import flatten
    from megazero.config.stages import Course
    from megazero.plan.systems import SYSTEMS
    from megazero.run.fitting import check_parts
    from megazero.tools.planning.job import as_json, find, plan, search_as_json
    from megazero.tools.planning.machine_file import machine_of
    from megazero.tools.planning.micro_batch import sized
    from megazero.tools.planning.report import as_text, search_as_text

    config = load(options.config, options.overrides)
    machine, system = machine_of(options.hardware), SYSTEMS[options.system]
    if options.search:
        if (options.tokens, options.system) != (None, "ours"):
            raise UserError(100, "--search takes neither --tokens nor --system", "leave them out", where="plan")
        with doing("searching layouts"):
            found = find(config, options.gpus, machine)
        shown = search_as_json(found, machine)
        return show(shown, search_as_text(shown, flatten(config)), as_json=options.json)
    check_parts(Course(sized(config, options.gpus, machine)), options.gpus, f"--gpus {options.gpus}")
    if options.parameters:
        from megazero.tools.planning.parameters import rows, table

        return show(found := rows(config), table(found), as_json=options.json)
    with doing("planning"):
        planned = plan(config, options.gpus, machine, options.tokens, system)
    return show(as_json(planned), as_text(planned), as_json=options.json)


def _simulate(options: argparse.Namespace) -> int:
    from megazero.config.file import load, name_of

    config, name = load(options.config, options.overrides), name_of(options.config)
    if options.rank >= options.gpus:
        raise UserError(100, f"--rank {options.rank}: expected a rank of 0 to {options.gpus - 1}", where="simulate")
    with doing("loading torch"):
        from megazero.builders.pipeline import check_world
        from megazero.tools.dry_run.dry_run import simulate
        from megazero.tools.dry_run.report import as_json, as_text
    from megazero.tools.planning.micro_batch import gpu, sized

    config = sized(config, options.gpus, gpu(80 * 2**30) if options.device == "cuda" else None)
    check_world(config, options.gpus, f"--gpus {options.gpus}")
    shown = simulate(config, options.rank, options.gpus, options.device), name, options.device
    return show(as_json(*shown), as_text(*shown), as_json=options.json)


def _export(options: argparse.Namespace) -> int:
    with doing("loading torch"):
        from megazero.tools.convert.transformers_files import export_run

    folder, how = RunFolder(options.run_folder), {"proven": options.proof, "average": options.average}
    return answer(export_run(folder, options.out, options.part_mb, options.family, warn, **how))


def _import(options: argparse.Namespace) -> int:
    with doing("loading torch"):
        from megazero.tools.convert.transformers_files import import_run

    return answer(import_run(options.model, RunFolder(options.out), warn, proven=options.proof))


def _doctor(options: argparse.Namespace) -> int:
    from megazero.tools.doctor.doctor import BUSY, as_json, as_text, diagnose, json_of, lines_of, time_kernels, write

    if options.kernels != (options.config is not None):
        raise UserError(100, "--kernels and --config need each other", "give both or neither", where="doctor")
    if options.kernels:
        times = time_kernels(options.config, options.overrides)
        return show(json_of(times), "\n".join(lines_of(times)), as_json=options.json)
    found = diagnose(options.run_folder, options.nproc)
    show(as_json(found), as_text(found), as_json=options.json)
    if options.write is not None:
        write(found, options.write)
        if found.is_busy:
            tell(f"warning: {options.write}: {BUSY}")
    return 1 if found.missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megazero", description="ZeRO-100B and Megatron-style 3D parallelism for GPT training.")
    parser.add_argument("--version", action="version", version=f"megazero {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    train_verb.add_options(_with_config(verbs, train_verb.run, "train", "train a config"))
    certify_verb.add_options(_with_config(verbs, certify_verb.run, "certify", "compare many layouts with one process"))
    _add_planning(verbs)
    _add_run_folders(verbs)
    for verb, (_, what) in _DATA_TOOLS.items():
        verbs.add_parser(verb, help=what)  # only for --help: `main` starts the command, which saves its imports here
    return parser


def _add_planning(verbs: Any) -> None:
    """Add the verbs that need no run's folder."""
    explain = verbs.add_parser("explain", help="show options, their types, defaults and meaning")
    explain.add_argument("--config", help="show this config's values")
    explain.add_argument("overrides", nargs="*", metavar="section[.key] | section.key=value")
    explain.set_defaults(run=_explain)
    ranks = at_least(1, int, 2**20)  # more than any job has
    schedule = _with_config(verbs, _schedule, "schedule", "show and draw what each rank of a pipeline does in a step")
    schedule.add_argument("--nproc", type=ranks, help="ranks of the run (default: parallel.tensor * parallel.pipeline)")
    schedule.add_argument("--draw", type=Path, metavar="FILE", help="write a timeline, .svg or .png")
    schedule.add_argument("--all", action="store_true", help="show all actions of all ranks, not only the first")
    plan = _with_config(verbs, _plan, "plan", "predict memory, traffic, time and cost of a run")
    plan.add_argument("--gpus", type=ranks, required=True, help="number of devices")
    hardware = "v100-32gb, a100-80gb, h100-80gb, h200, b200, or a file written by `doctor --write`"
    plan.add_argument("--hardware", required=True, metavar="NAME|FILE.yaml", help=hardware)
    systems = ("ours", "megatron-2021", "megatron-core", "deepspeed", "fsdp")
    plan.add_argument("--system", choices=systems, default="ours", help="training system to plan for (default: ours)")
    listed = "list the parameters with their optimizer, learning rate and weight decay instead"
    plan.add_argument("--parameters", action="store_true", help=listed)
    plan.add_argument("--search", action="store_true", help="find the fastest layouts that fit instead")
    budget = "training tokens, such as 300B or 5e9 (default: those of the config's steps)"
    plan.add_argument("--tokens", type=tokens, help=budget)
    simulate = _with_config(verbs, _simulate, "simulate", "run one of any number of ranks without data; count bytes")
    simulate.add_argument("--gpus", type=ranks, required=True, help="ranks of the run")
    simulate.add_argument("--rank", type=at_least(0, int), default=0, help="the rank to run (default: 0)")
    simulate.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="the ranks' device (default: cuda)")
    doctor = verbs.add_parser("doctor", help="measure this machine and report what is missing")
    doctor.add_argument("--run", dest="run_folder", type=Path, default=Path("runs"), help="where runs are written")
    measure = "ranks that measure at the same time (default: one per GPU; two without a GPU)"
    doctor.add_argument("--nproc", type=at_least(1, int, MOST_LOCAL), help=measure)
    doctor.add_argument("--kernels", action="store_true", help="time the kernels at the sizes of --config instead")
    doctor.add_argument("--config", help="for --kernels: a shipped config's name, or a path")
    doctor.add_argument("overrides", nargs="*", metavar="section.key=value", help="options to change in the config")
    doctor.add_argument("--write", type=Path, metavar="FILE.yaml", help="write the results here, for plan --hardware")
    doctor.set_defaults(run=_doctor)
    for parser in (explain, schedule, plan, simulate, doctor):
        parser.add_argument("--json", action="store_true")


def _add_run_folders(verbs: Any) -> None:
    """Add the verbs that read or make a run's folder."""
    data_verb.add(verbs)
    generate_verb.add(verbs)
    export = verbs.add_parser("export", help="export a run's weights in the format of transformers")
    export.add_argument("--to", choices=["hf"], required=True)
    export.add_argument("--run", dest="run_folder", type=Path, required=True, help="the run's folder")
    export.add_argument("--out", type=Path, required=True, help="folder to create")
    export.add_argument("--part-mb", type=at_least(1, int), default=5000, help="rough size of a file (default: 5000)")
    family = "a family of transformers, where several fit (default: that of the import)"
    export.add_argument("--as", dest="family", metavar="FAMILY", help=family)
    unproven = "do not compare the logits with transformers'"
    export.add_argument("--no-proof", dest="proof", action="store_false", help=unproven)
    export.set_defaults(run=_export)
    export.add_argument("--average", action="store_true", help="export the averages of the weights")
    import_ = verbs.add_parser("import", help="make a run's folder from weights of transformers")
    import_.add_argument("--from", dest="source", choices=["hf"], required=True)
    import_.add_argument("--model", type=Path, required=True, help="a folder with config.json and safetensors")
    import_.add_argument("--out", type=Path, required=True, help="the run's folder, created")
    import_.add_argument("--no-proof", dest="proof", action="store_false", help=unproven)
    import_.set_defaults(run=_import)


def _with_config(verbs: Any, run: Callable[[argparse.Namespace], int], name: str, what: str) -> argparse.ArgumentParser:
    """Return the parser of a verb that takes a config and overrides."""
    parser = verbs.add_parser(name, help=what, epilog=OVERRIDES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a shipped config's name, or a path")
    overrides = "options to change in the config, see below"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value | FILE.yaml", help=overrides)
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(command())
