"""The tables of docs/configuration.md and docs/operations.md say what the code does.

python -m tests.test_documents      prints the tables of docs/configuration.md
"""

import re
from collections.abc import Iterator

from megazero.builders.assemble import build_model
from megazero.config.changes import CHANGEABLE, FREE
from megazero.config.file import CONFIGS, load
from megazero.config.flat import option_keys
from megazero.config.rules import EXCLUSIONS, RELATIONS
from megazero.config.schema import Config
from megazero.plan.machines import MACHINES
from megazero.tools.planning.job import plan
from scripts.site_links import on_page_markdown
from tests.tiny_run import ROOT


def shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def shipped() -> Iterator[str]:
    yield "| config | parameters | layers x hidden, heads | vocabulary | sequence | H100s |"
    yield "|---|---|---|---|---|---|"
    rows = []
    for path in CONFIGS.glob("*.yaml"):
        config = load(path.stem)
        count, m = sum(parameter.numel() for parameter in build_model(config).parameters()), config.model
        row = f"| `{path.stem}` | {count:,} | {m.layers} x {m.hidden:,}, {m.heads} | {m.vocab:,} | {m.seq_len:,} "
        row += f"| {fitting(config)} |"
        rows.append((count, row))
    yield from (row for _, row in sorted(rows))


def fitting(config: Config) -> int:
    """The fewest H100s with 80 GB that a config fits on as it is."""
    machine, split = MACHINES["h100-80gb"], config.parallel.tensor * config.parallel.pipeline
    most = config.batch.global_
    sizes = (split * data for data in range(1, most + 1) if most % data == 0)
    return next(size for size in sizes if plan(config, size, machine).fits)


def relations() -> Iterator[str]:
    yield "| must hold |"
    yield "|---|"
    yield from (f"| `{relation.equation}` |" for relation in RELATIONS)


def exclusions() -> Iterator[str]:
    yield "| with | only | because |"
    yield "|---|---|---|"
    for row in EXCLUSIONS:
        given, allowed = (" or ".join(shown(value) for value in side) for side in (row.values, row.allowed))
        yield f"| `{row.option}` {given} | `{row.other}` {allowed} | {row.reason} |"


def changeable() -> Iterator[str]:
    yield "| option | in a stage | on a resume |"
    yield "|---|---|---|"
    words = {"": "with `--allow-change`", FREE: "yes"}
    for row in CHANGEABLE:
        resumed = words.get(row.on_resume, f"no: {row.on_resume}")
        yield f"| `{row.keys}` | {f'no: {row.in_stage}' if row.in_stage else 'yes'} | {resumed} |"


TABLES = (shipped, relations, exclusions, changeable)


def tables() -> str:
    return "\n\n".join("\n".join(table()) for table in TABLES)


def test_tables_of_the_configuration_page():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for table in TABLES:
        assert "\n".join(table()) in page, f"{table.__name__}: python -m tests.test_documents prints it anew"


def test_every_error_code_has_a_row():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "megazero").rglob("*.py")]
    begins = r"(?:UserError\(\s*|\bcode = )"
    raised = {int(code) for text in sources for code in re.findall(begins + r"(\d{3})\b", text)}
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/operations.md", "docs/data.md")]
    told = {int(code) for page in pages for code in re.findall(r"^\| (\d{3}) \|.*\| \d \|$", page, re.MULTILINE)}
    assert {101, 301, 402} <= raised <= told
    assert told - raised <= {190, *range(200, 300)}, "rows of codes that nothing raises"


def test_every_exit_code_of_a_code_is_the_one_told():
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \|.*\| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) > 15 and all((exit_code == "2") == (code < "200") for code, exit_code in rows)


def test_options_that_pages_name_are_known():
    sections = {key.partition(".")[0] for key in option_keys()}
    for name in ("coming_from", "troubleshooting", "first_slurm_job", "fine_tuning", "glossary"):
        for line in (ROOT / f"docs/{name}.md").read_text(encoding="utf-8").splitlines():
            ours = line.split("|")[2] if name == "coming_from" and line.count("|") > 2 else line
            named = re.findall(r"\b([a-z]+\.[a-z_.]+[a-z])(?=[=`, ])", ours)
            of_config = {key for key in named if key.partition(".")[0] in sections and not key.endswith((".py", ".md"))}
            assert of_config <= {*option_keys()}, (name, of_config - {*option_keys()})


def test_links_of_pages_lead_to_sections():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
        for target, anchor in links:
            file = page.parent / target if target else page
            assert file.exists(), (page.name, target)
            heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^a-z0-9_ -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in anchors, (page.name, target, anchor)


if __name__ == "__main__":
    print(tables())


def test_the_site_has_every_page():
    """`make docs` builds it; a page that no menu names is not found."""
    named = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_links_to_code_are_paths_on_the_site():
    page = "[layers.py](../megazero/plan/layers.py), [the table](../megazero/zero/stage.py#L3), [zero](zero.md#a)"
    shown = "`megazero/plan/layers.py`, the table (`megazero/zero/stage.py`), [zero](zero.md#a)"
    assert on_page_markdown(page) == shown
