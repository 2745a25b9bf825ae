"""Which file is meant, overrides, dump and load as inverses, and that nothing at all makes `load` fall over."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megazero.base.errors import LINE_LIMIT, FaultList, UserError
from megazero.base.yaml_text import parse_yaml
from megazero.config.file import CONFIGS, find, load
from megazero.config.flat import dump, flatten, option_keys
from megazero.config.schema import Config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_names_and_paths(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert find("tiny") == find("tiny.yaml") == CONFIGS / "tiny.yaml" == find(str(CONFIGS / "tiny.yaml"))
    assert find("gpt2_1.5b").name == "gpt2_1.5b.yaml"
    monkeypatch.chdir(tmp_path)
    file.write_text("run: {steps: 3}")
    assert load("c.yaml").run.steps == load("c").run.steps == 3
    (tmp_path / "tiny.yaml").write_text("run: {steps: 4}")
    assert load("tiny").run.steps == load("tiny.yaml").run.steps == 4, "the current folder comes first"
    for name, hint in (("tny", "did you mean tiny"), ("no/where", "shipped configs: "), ("x" * 300, ""), (".", "")):
        with pytest.raises(UserError, match=rf"^MZ-101 .*{hint}"):
            find(name)


def test_overrides_win_in_their_order(file: Path):
    file.write_text("zero: {stage: 2, offload: {path: old}}")
    given = [
        "zero.offload.optimizer=cpu",
        "zero.offload.path=x=y",
        "run.steps=5",
        "run.steps=6",
        "optimizer.betas=[0,0]",
    ]
    config = load(str(file), [*given, "data.train=no", "optimizer.lr=3e-4", "zero.grad_dtype=param"])
    assert config.zero.stage == 2 and config.zero.offload.optimizer == "cpu" and config.zero.offload.path == "x=y"
    assert config.run.steps == 6 and config.optimizer.betas == (0.0, 0.0) and config.data.train == "no"
    assert load(str(file), ["zero.offload.path=null"]).zero.offload.path is None
    assert load(str(file), ["zero.offload={optimizer: cpu}"]).zero.offload.path is None  # a whole section


@pytest.mark.parametrize("text", ["steps=3", "run.steps", "run.steps=[", "run.steps=2020-13-45", "model=3", ""])
def test_malformed_override(file: Path, text: str):
    file.write_text("")
    with pytest.raises(UserError, match=r"^MZ-108 command line"):
        load(str(file), [text])


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_dump_reads_back_the_same(name: str, file: Path):
    config = load(name)
    dump(config, file)
    assert load(str(file)) == config
    assert "stage: null" not in file.read_text()


def test_dump_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(UserError, match=r"MZ-401 .*no/c.yaml: cannot be written"):
        dump(Config(), tmp_path / "no" / "c.yaml")


words = st.sampled_from(
    ["run", "model", "zero", "offload", "layers", ": ", "\n", "\n  ", "{", "}", "[", "? ", "&a ", "*a"]
)
words |= st.sampled_from(["<<: *a", "!!str ", "!!omap ", '"', "|", "3e-4", "2020-13-45", "null", ",", "%", "- ", "\t"])
anything = st.one_of(
    st.integers(), st.floats(), st.text(max_size=9), st.none(), st.booleans(), st.lists(words).map("".join)
)
fuzz = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def loads_or_says_why(file: Path, text: str, *overrides: str) -> None:
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        config = load(str(file), list(overrides))
    except UserError as error:
        assert all(line.startswith("MZ-10") and len(line) <= LINE_LIMIT for line in str(error).split("\n"))
        return
    dump(config, file)
    assert load(str(file)) == config


@fuzz
@given(text=st.lists(words, max_size=20).map("".join))
def test_any_text_loads_or_is_refused_in_lines(file: Path, text: str):
    loads_or_says_why(file, text)


@fuzz
@given(st.dictionaries(st.sampled_from(option_keys()), anything, max_size=6))
def test_any_values_load_or_are_refused_in_lines(file: Path, given: dict[str, object]):
    loads_or_says_why(file, "", *(f"{key}={value}" for key, value in given.items()))


sizes = st.fixed_dictionaries({key: st.integers(1, 40) for key in (
    "model.hidden", "model.heads", "model.kv_heads", "model.ffn", "model.seq_len", "batch.global", "batch.micro")}
    | {key: st.integers(1, 4) for key in ("model.layers", "parallel.tensor", "parallel.pipeline")})  # fmt: skip


@fuzz
@given(sizes, st.booleans(), st.booleans())
def test_sizes_load_exactly_when_the_equations_hold(file: Path, s: dict[str, int], rotary: bool, sequence: bool):
    options = [f"{key}={value}" for key, value in s.items()] + [f"parallel.sequence={str(sequence).lower()}"]
    options += [f"model.position={'rotary' if rotary else 'learned'}"]
    broken = [
        s["model.hidden"] % s["model.heads"] != 0,
        s["model.heads"] % s["model.kv_heads"] != 0,
        s["model.heads"] % s["parallel.tensor"] != 0,
        s["model.kv_heads"] % s["parallel.tensor"] != 0
        and (
            s["parallel.tensor"] % s["model.kv_heads"] != 0
            or 2 * (s["model.hidden"] // s["model.heads"]) % (s["parallel.tensor"] // s["model.kv_heads"]) != 0
        ),
        s["model.ffn"] % s["parallel.tensor"] != 0,
        s["batch.global"] % s["batch.micro"] != 0,
        rotary and s["model.hidden"] // s["model.heads"] % 2 != 0,
        sequence and s["model.seq_len"] % s["parallel.tensor"] != 0,
        s["model.layers"] < s["parallel.pipeline"],
    ]
    if any(broken):
        file.write_text("")
        with pytest.raises(UserError) as caught:
            load(str(file), options)
        found = str(caught.value).split("\n")
        assert len(found) == sum(broken) and all(line.startswith("MZ-106 command line: ") for line in found)
        return
    file.write_text("")
    found = flatten(load(str(file), options))
    assert {key: found[key] for key in s} == s


def test_an_option_that_is_gone_may_stay_only_where_it_changed_nothing(file: Path) -> None:
    file.write_text("zero:\n  tile_mb: null\n")
    assert "zero.tile_mb" not in flatten(load(str(file)))
    for overrides, where in (([], f"{file.name}:2"), (["zero.tile_mb=2"], "command line")):
        file.write_text(f"zero:\n  tile_mb: {'null' if overrides else '1.5'}\n")
        with pytest.raises(UserError) as caught:
            load(str(file), overrides)
        assert str(caught.value).startswith(f"MZ-104 {where}: unknown key zero.tile_mb; split")
    file.write_text("data:\n  train: null\n  sources: [{path: a, grows: null}, {path: b, grows: false}]\n")
    assert [source.path for source in load(str(file)).data.sources or ()] == ["a", "b"]
    with pytest.raises(UserError, match=r"^MZ-104 .*unknown key data\.sources\[0\]\.grows; name a folder"):
        load(str(file), ["data.sources=[{path: a, grows: true}]"])


def test_a_file_among_the_overrides_goes_over_what_was_given_before(tmp_path: Path) -> None:
    """Shipped ones are found by their names; messages name the file; later overrides win."""
    for name, stage, partition, offload in (("c1", 1, False, "none"), ("c4", 2, True, "none"), ("c5", 2, True, "cpu")):
        config = load("gpt2_124m", ["batch.global=4", f"{name}.yaml", "batch.micro=2"])
        assert config.zero.stage == stage and config.zero.grad_dtype == "param"
        assert (config.memory.partition, config.memory.offload) == (partition, offload)
        assert (config.batch.global_, config.batch.micro) == (4, 2) and config.model.layers == 12
    assert load("gpt2_124m", ["c5.yaml", "zero.stage=1"]).zero.stage == 1
    mine = tmp_path / "mine.yaml"
    mine.write_text("zero: {stage: 3}\nmodel: {layerz: 3}\n")
    with pytest.raises(UserError, match=r"MZ-104 mine\.yaml:2: unknown key model\.layerz"):
        load("gpt2_124m", [str(mine)])
    with pytest.raises(UserError, match=r"MZ-101 c6\.yaml: no such config"):
        load("gpt2_124m", ["c6.yaml"])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "a0: &a0 [" + "1, " * 9000 + "]\na1: &a1 [*a0, *a0, *a0]\nrun: [*a1, *a1, *a1]",
            "expected at most 10,000 values",
        ),
        ("# " + "x" * (33 << 10), "expected at most 32,768 bytes"),
        ("run: " + "[{a: " * 60, "expected at most 100 nested brackets"),
    ],
)
def test_texts_beyond_a_bound(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"MZ-102 c.yaml: cannot be read: .*{what}"):
        load(str(path))


@pytest.mark.parametrize("text", ["&a [*a]", "a: &a [*a]", "&a {b: *a}"])
def test_a_value_that_contains_itself(text: str) -> None:
    with pytest.raises(ValueError, match="an alias refers to a value that contains it"):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "%YAML 1.1\n---\nrun: {dir: on}\n",
            "MZ-102 c.yaml: cannot be read: expected YAML 1.2 without directives (%)…",
        ),
        ("a: &x 1\nb: &x 2\n", "MZ-104 c.yaml:1: unknown key a…"),
    ],
)
def test_the_library_says_nothing_of_its_own(tmp_path: Path, text: str, line: str, capfd) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert str(caught.value).startswith(line.rstrip("…")) and capfd.readouterr().err == ""


def test_a_key_of_two_thousand_sections() -> None:
    with pytest.raises(UserError, match=r"MZ-108 command line: .a\.a\..* is not section.key=value"):
        load("tiny", ["a." * 2000 + "b=1"])


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("optimizer.kindly", "see `megazero explain`"),  # not optimizer.betas: nothing but the section is alike
        ("parallel.context", "see `megazero explain`"),
        ("precision.rounding", "see `megazero explain`"),
        ("model.breadth", "see `megazero explain`"),
        ("optimizer.bettas", "did you mean optimizer.betas?"),
        ("optimizr.lr", "did you mean optimizer.lr?"),
        ("zero.stag", "did you mean zero.stage?"),
        ("model.steps", "did you mean run.steps or optimizer.muon.steps or schedule.steps?"),
        ("modle.hiden", "did you mean model.hidden?"),
    ],
)
def test_a_key_is_suggested_only_where_it_is_close(key: str, hint: str) -> None:
    with pytest.raises(FaultList) as caught:
        load("tiny", [f"{key}=muon"])
    assert str(caught.value.errors[0]) == f"MZ-104 command line: unknown key {key}; {hint}"
