"""`megazero explain`: complete, and read from what is checked."""

import json

import pytest

from megazero.__main__ import main
from megazero.config import changes, rules
from megazero.config.file import CONFIGS, load
from megazero.config.flat import flatten, option_keys
from megazero.config.schema import Config, resolved


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_every_option_with_type_default_meaning_and_relations(capsys):
    shown = json.loads(explained(capsys, "--json"))
    assert [option["key"] for option in shown] == option_keys()
    defaults, values = flatten(Config()), flatten(resolved(Config()))
    for option in shown:
        key = option["key"]
        assert set(option) == {"key", "type", "default", "value", "meaning", "relations"}
        assert option["type"] and len(option["meaning"]) > 5 and option["meaning"].endswith("."), key
        expected = [json.loads(json.dumps(given[key])) for given in (defaults, values)]
        assert [option["default"], option["value"]] == expected, key
        in_relations = [r for r in rules.RELATIONS if key in r.options]
        in_exclusions = [e for e in rules.EXCLUSIONS if key in (e.option, e.other)]
        may = changes.row_of(key)
        in_changes = (not may.in_stage) + (not may.on_resume)
        assert len(option["relations"]) == len(in_relations) + len(in_exclusions) + in_changes, key
        assert all(any(r.equation in text for text in option["relations"]) for r in in_relations), key
        assert all(any(e.reason in text for text in option["relations"]) for e in in_exclusions), key


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("run.steps", "integer >= 1"),
        ("run.dir", "text or null"),
        ("model.dropout", "number >= 0 < 1"),
        ("model.tie_embeddings", "true | false"),
        ("zero.stage", "0 | 1 | 2 | 3 or null"),
        ("pipeline.schedule", "gpipe | 1f1b | interleaved | zb-h1 | zb-v"),
        ("optimizer.betas", "[number >= 0 < 1, number >= 0 < 1]"),
        ("data.sources", "[{path, name, weight}, ...] or null"),
        ("data.valid", "text or number > 0 < 1 or null"),
    ],
)
def test_types_as_a_user_says_them(capsys, key: str, kind: str):
    (option,) = json.loads(explained(capsys, "--json", key))
    assert option["type"] == kind


def test_text_of_one_option(capsys):
    assert explained(capsys, "memory.partition").split("\n") == [
        "memory.partition = false   [true | false]",
        "    Pa: split saved block inputs over the tensor axis.",
        "    memory.partition true needs memory.recompute full (Pa splits inputs saved by full recompute)",
        "    memory.offload cpu or nvme needs memory.partition true (only inputs split by Pa are offloaded)",
        "",
    ]
    assert explained(capsys, "zero.offload.path").startswith(
        "zero.offload.path = null   [text or [text, ...] or null]\n"
    )


def test_sections_and_subsections(capsys):
    def keys(*arguments: str) -> list[str]:
        return [option["key"] for option in json.loads(explained(capsys, "--json", *arguments))]

    assert keys("batch") == ["batch.global", "batch.micro"]
    assert keys("zero.offload") == [
        f"zero.offload.{key}" for key in ("optimizer", "parameters", "path", "host_mb", "delayed")
    ]
    assert keys("data.valid") == ["data.valid"]  # not data.valid_every


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_values_of_a_config(capsys, path):
    shown = json.loads(explained(capsys, "--json", "--config", path.stem, "run.steps=77"))
    expected = json.loads(json.dumps(flatten(load(path.stem, ["run.steps=77"]))))
    assert {option["key"]: option["value"] for option in shown} == expected
    assert "run.steps = 77 (default 1000)   [integer >= 1]" in explained(capsys, "--config", path.stem, "run.steps=77")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["modle"], "MZ-104 explain: no option or section modle; did you mean model?\n"),
        (["model.layer"], "MZ-104 explain: no option or section model.layer; did you mean model.layers?\n"),
        (["model", "data"], "MZ-108 explain: expected one option or section, got model data\n"),
        (["run.steps=3"], "MZ-108 explain: run.steps=3 changes a config; give --config\n"),
        (["--config", "tiny", "run.stpes=3"], "MZ-104 command line: unknown key run.stpes; did you mean run.steps?\n"),
    ],
)
def test_refusals(capsys, arguments: list[str], line: str):
    assert main(["explain", *arguments]) == 2
    assert capsys.readouterr() == ("", line)
