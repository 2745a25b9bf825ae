"""Reading a config: YAML 1.2, closed keys, one line for each fault, and the same config back from its dump."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from megazero.base.errors import LINE_LIMIT, FaultList, UserError
from megazero.config.file import load
from megazero.config.flat import dump, flatten, option_keys
from megazero.config.schema import Config, default_ffn, resolved

# What scripts and users rely on, with the value that a resolved config has when nobody says otherwise.
DEFAULTS = {
    "run": {"dir": None, "steps": 1000, "seed": 0, "time_limit": None, "on_spike": "log", "spike_factor": 10.0}
    | {"deterministic": False},
    "model": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": None, "ffn": 3072, "vocab": 50257}
    | {"seq_len": 1024, "position": "learned", "norm": "layernorm", "norm_place": "pre", "norm_bias": None}
    | {"norm_offset": 0, "norm_cast": "before", "norm_eps": 1e-5, "residual": "serial", "activation": "gelu"}
    | {"dropout": 0.0, "tie_embeddings": True, "bias.qkv": None, "bias.out": None, "bias.mlp": None}
    | {"rope_theta": 10000.0, "layer_kinds": None, "layer_pattern": None, "qk_norm": "none", "qk_norm_at": "before"}
    | {"attention_scale": None, "query_scale": None, "embedding_scale": 1.0, "residual_scale": 1.0}
    | {"logit_scale": 1.0, "softcap.attention": None, "softcap.logits": None, "init_std": 0.02, "init_depth": True}
    | {"z_loss": 0.0, "loss_chunk": None},
    "parallel": {"tensor": 1, "pipeline": 1, "sequence": False, "tensor_chunks": 1, "timeout": 120}
    | {"start_timeout": 900},
    "zero": {"stage": 1, "shard_ranks": None, "grad_dtype": "fp32", "reduce_dtype": None, "bucket_mb": 64.0}
    | {"secondary_ranks": None, "quantize.parameters": "none", "quantize.gradients": "none"}
    | {"quantize.error_feedback": False}
    | {"offload.optimizer": "none", "offload.parameters": "none", "offload.path": None, "offload.host_mb": 1024}
    | {"offload.delayed": False},
    "memory": {"recompute": "none", "partition": False, "offload": "none", "cuda_graphs": False},
    "pipeline": {"schedule": "1f1b", "chunks": 1},
    "precision": {"dtype": "fp32", "masters": "fp32", "kernels": "auto"},
    "optimizer": {"name": "adamw", "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    | {"clip_value": None, "moments": "fp32"}
    | {"muon.momentum": 0.95, "muon.nesterov": True, "muon.steps": 5, "muon.scale": "rms", "muon.lr_factor": 1.0}
    | {"average.kind": "none", "average.decay": 0.999, "average.for_validation": False, "groups": None},
    "schedule": {"warmup": 100, "warmup_tokens": None, "decay": "cosine", "points": None, "min_lr": 3e-5}
    | {"cooldown": 200, "steps": None},
    "batch": {"global": 8, "micro": None},
    "data": {
        "train": "data/quickstart/train",
        "sources": None,
        "max_epochs": None,
        "valid": None,
        "validation": None,
        "valid_every": None,
        "valid_samples": None,
        "tokenizer": None,
    }
    | {"mask_eod": False, "pack": False},
    "checkpoint": {"every": None, "keep": None, "async": False, "resume": "none", "load": "all"},
    "observe": {"every": 10, "wandb": None, "tensorboard": False, "profile": None, "check_replicas": 0}
    | {"evaluate.every": None, "evaluate.texts": (), "evaluate.tasks": (), "evaluate.samples": ()},
}
MAX_OPTIONS = 130
STAGE = "stages: [{{until_step: 3, data: {}}}]"
SOURCE = "data: {{sources: [{}]}}"


def lines(path: Path, text: str, *overrides: str) -> list[str]:
    """What is said about this file, one line per fault."""
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(str(path), list(overrides))
    return str(caught.value).split("\n")


def value(path: Path, text: str, key: str):
    path.write_text(text)
    return flatten(load(str(path)))[key]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_every_option_and_its_default():
    expected = {f"{section}.{key}": value for section, keys in DEFAULTS.items() for key, value in keys.items()}
    expected["stages"] = None
    assert flatten(resolved(Config())) == expected
    assert option_keys() == list(expected)
    assert len(option_keys()) <= MAX_OPTIONS


def test_what_null_stands_for(file: Path):
    swiglu = "model: {hidden: 4096, activation: swiglu, heads: 32, kv_heads: null}"
    assert value(file, swiglu, "model.ffn") == default_ffn(4096, "swiglu") == 11008  # Llama's 8/3 h, in 256s
    assert value(file, swiglu, "model.kv_heads") == 32
    assert default_ffn(768, "gelu") == 3072 and default_ffn(96, "swiglu") == 256 and default_ffn(97, "swiglu") == 512
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
        assert value(file, f"pipeline: {{schedule: {schedule}}}", "pipeline.chunks") == chunks
    assert value(file, "zero: {stage: 0}", "zero.stage") == 0
    assert value(file, "run: {steps: 99}", "schedule.cooldown") == 19
    assert value(file, "{run: {steps: 99}, schedule: {steps: 50}}", "schedule.cooldown") == 10


@pytest.mark.parametrize(("cooldown", "expected"), [("", 20), (", cooldown: 7", None)])
def test_a_stage_with_a_course_of_its_own_has_its_cooldown(file: Path, cooldown: str, expected: int | None):
    """A fifth of it; null: as it is in the config."""
    stages = "stages: [{until_step: 100, schedule: {steps: 100}}]"
    file.write_text(f"run: {{steps: 1000}}\nschedule: {{decay: wsd{cooldown}}}\n{stages}\n")
    config = resolved(resolved(load(str(file), [])))
    assert config.stages is not None and config.stages[0].schedule is not None
    assert config.stages[0].schedule.cooldown == expected


def test_names_of_sources_are_the_ends_of_their_paths(file: Path):
    text = SOURCE.format("{path: a/web-1.5}, {path: b/, name: x}, {path: c/größe}, {path: /}, {path: " + "p" * 99 + "}")
    file.write_text(text)
    sources = load(str(file)).data.sources
    assert sources is not None
    assert [source.name for source in sources] == ["web-1.5", "x", "gr__e", "_", "p" * 64]
    dump(load(str(file)), file)
    assert load(str(file)).data.sources == sources
    assert value(file, SOURCE.format("{path: a}"), "data.train") is None
    (line,) = lines(file, SOURCE.format(", ".join(["{path: a}"] * 101)))
    assert line.startswith("MZ-105 c.yaml:1: data.sources: ")


def test_sections_are_frozen():
    config = Config()
    with pytest.raises(ValidationError):
        config.run.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.run = config.run  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("optimizer: {lr: 3e-4}", "optimizer.lr", 3e-4),
        ("optimizer: {lr: 1}", "optimizer.lr", 1.0),
        ("data: {train: no}", "data.train", "no"),
        ("data: {train: on}", "data.train", "on"),
        ("run: {steps: 012}", "run.steps", 12),
        ("data: {train: 12:30:00}", "data.train", "12:30:00"),
        ("data: {valid: 0.25}", "data.valid", 0.25),
        ("data: {valid: a/b}", "data.valid", "a/b"),
        ("optimizer: {betas: [0.5, 0.75]}", "optimizer.betas", (0.5, 0.75)),
        ("run: {seed: &s 7}\nbatch: {global: 7, micro: *s}", "batch.micro", 7),
        ("", "run.steps", 1000),
        ("# nothing\nrun: {}", "run.steps", 1000),
    ],
)
def test_yaml_as_1_2_reads_it(file: Path, text: str, key: str, expected: object):
    found = value(file, text, key)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run:\n  steps: 3\n\n  steps: 4", 'MZ-103 c.yaml:4: duplicate key "steps"; remove one of the two'),
        ("run: {steps: 3}\nrun: {seed: 4}", 'MZ-103 c.yaml:2: duplicate key "run"; remove one of the two'),
        ("\nrun: {stpes: 3}", "MZ-104 c.yaml:2: unknown key run.stpes; did you mean run.steps?"),
        ("modle:\n  layers: 3", "MZ-104 c.yaml:2: unknown key modle.layers; did you mean model.layers?"),
        ("modle: 3", "MZ-104 c.yaml:1: unknown key modle; did you mean model?"),
        ("zero: {ofload: cpu}", "MZ-104 c.yaml:1: unknown key zero.ofload; did you mean zero.offload?"),
        ("obsrve: {every: 3}", "MZ-104 c.yaml:1: unknown key obsrve.every; did you mean observe.every?"),
        ("batch: {global_: 3}", "MZ-104 c.yaml:1: unknown key batch.global_; did you mean batch.global?"),
        ("optimizer: {kindly: 8}", "MZ-104 c.yaml:1: unknown key optimizer.kindly; see `megazero explain`"),
        (
            "model: {steps: 3}",
            "MZ-104 c.yaml:1: unknown key model.steps; did you mean run.steps or optimizer.muon.steps or schedule.step",
        ),
        ("wholly: {}", "MZ-104 c.yaml:1: unknown key wholly; see `megazero explain`"),
        ("model.layers: 3", "MZ-104 c.yaml:1: unknown key model.layers; nest the key in its section"),
        ("run:\n\n  steps: many", "MZ-105 c.yaml:3: run.steps: expected a valid integer, got many"),
        ("run: {steps: 3.0}", "MZ-105 c.yaml:1: run.steps: expected a valid integer, got 3.0"),
        ("run: {steps: true}", "MZ-105 c.yaml:1: run.steps: expected a valid integer, got true"),
        ("zero: {stage: 3.0}", "MZ-105 c.yaml:1: zero.stage: expected a valid integer, got 3.0"),
        ("zero: {stage: true}", "MZ-105 c.yaml:1: zero.stage: expected a valid integer, got true"),
        ("run: {steps: 0}", "MZ-105 c.yaml:1: run.steps: expected greater than or equal to 1, got 0"),
        ("data: {mask_eod: no}", "MZ-105 c.yaml:1: data.mask_eod: expected a valid boolean, got no"),
        ("data:\n  valid: 1", "MZ-105 c.yaml:2: data.valid: expected less than 1, got 1"),
        ("run: {time_limit: 12:30:00}", "MZ-105 c.yaml:1: run.time_limit: expected a valid integer, got 12:"),
        ("optimizer: {lr: '3e-4'}", "MZ-105 c.yaml:1: optimizer.lr: expected a valid number, got 3e-4"),
        ("optimizer: {lr: .inf}", "MZ-105 c.yaml:1: optimizer.lr: expected a finite number, got inf"),
        ("optimizer:\n  betas: 0.9", "MZ-105 c.yaml:2: optimizer.betas: expected a list, got 0.9"),
        ("zero: {offload: cpu}", "MZ-105 c.yaml:1: zero.offload is a section, got cpu"),
        ("model:", "MZ-105 c.yaml:1: model is a section, got null"),
        ('run: {dir: "a\\0b"}', "MZ-105 c.yaml:1: run.dir: String should match pattern"),
        (
            SOURCE.format("{path: a, weight: 0}"),
            "MZ-105 c.yaml:1: data.sources[0].weight: expected greater than 0, got 0",
        ),
        (
            SOURCE.format("{path: a, weight: -1}"),
            "MZ-105 c.yaml:1: data.sources[0].weight: expected greater than 0, got",
        ),
        (SOURCE.format("{path: a, weight: .nan}"), "MZ-105 c.yaml:1: data.sources[0].weight: expected a finite number"),
        (SOURCE.format("{path: a, weight: .inf}"), "MZ-105 c.yaml:1: data.sources[0].weight: expected a finite number"),
        (
            SOURCE.format("{path: a, weight: much}"),
            "MZ-105 c.yaml:1: data.sources[0].weight: expected a valid number, got mu",
        ),
        (
            SOURCE.format("{path: a, weight: true}"),
            "MZ-105 c.yaml:1: data.sources[0].weight: expected a valid number, got tr",
        ),
        (SOURCE.format("{path: a}, {weight: 2}"), "MZ-105 c.yaml:1: data.sources[1].path is missing"),
        (SOURCE.format("{path: a, wieght: 2}"), "MZ-104 c.yaml:1: unknown key data.sources[0].wieght"),
        (SOURCE.format("a"), "MZ-105 c.yaml:1: data.sources[0]: expected a section, got a"),
        (SOURCE.format(""), "MZ-105 c.yaml:1: data.sources: Tuple should have at least 1 item"),
        (
            SOURCE.format("{path: x/a}, {path: y/a}"),
            "MZ-106 c.yaml:1: names of data.sources differ is broken: two ",
        ),
        (
            SOURCE.format("{path: a, weight: 1.0000001}, {path: b}"),
            "MZ-106 c.yaml:1: smallest whole weights of data.sources sum ",
        ),
        ("data: {train: b, sources: [{path: a}]}", "MZ-106 c.yaml:1: data.train == null with data.sources is broken: "),
        (
            "data: {valid: 0.1, validation: [{path: x/a}, {path: a}]}",
            "MZ-106 c.yaml:1: names of data.validation differ ",
        ),
        ("stges: []", "MZ-104 c.yaml:1: unknown key stges; did you mean stages?"),
        (
            "stages: [{until_step: 3, zero: {stage: 3}}]",
            "MZ-109 c.yaml:1: stages[0].zero cannot change: state keeps its ",
        ),
        (
            "stages: [{until_step: 3, model: {layers: 4}}]",
            "MZ-109 c.yaml:1: stages[0].model.layers cannot change: the weights have this shape, or were trained with ",
        ),
        (
            "stages: [{until_step: 3, optimizer: {lrr: 4}}]",
            "MZ-104 c.yaml:1: unknown key stages[0].optimizer.lrr; did you mean optimizer.lr?",
        ),
        (
            "stages: [{until_stp: 3}]",
            "MZ-104 c.yaml:1: unknown key stages[0].until_stp; did you mean until_step?",
        ),
        (
            "stages: [{until_step: 3, batch: {global: 0}}]",
            "MZ-105 c.yaml:1: stages[0].batch.global: expected greater than or equal to 1, got 0",
        ),
        ("stages: [{until_step: 3, batch: 4}]", "MZ-105 c.yaml:1: stages[0].batch: expected a section, got 4"),
        (
            "stages: [{until_step: 3, batch: {micro: 3}}]",
            "MZ-106 c.yaml:1: in stages[0] batch.global % batch.micro == 0 is broken: 8 % 3 = 2; change ",
        ),
        (
            "stages: [{until_step: 3000}]",
            "MZ-106 c.yaml:1: stages end by run.steps is broken: they end at steps 3000, run.steps is 1000; raise ",
        ),
        (
            "stages: [{until_step: 0}]",
            "MZ-105 c.yaml:1: stages[0].until_step: expected greater than or equal",
        ),
        ("stages: [3]", "MZ-105 c.yaml:1: stages[0]: expected a section, got 3"),
        (
            STAGE.format("{sources: [{path: a, weight: x}]}"),
            "MZ-105 c.yaml:1: stages[0].data.sources[0].weight: e",
        ),
        (
            STAGE.format("{sources: [{path: a}], train: a}"),
            "MZ-109 c.yaml:1: stages[0].data.train cannot change: a stage names its sources",
        ),
        ("run: {steps: 3\n", "MZ-102 c.yaml:2: not YAML: "),
        ("- a", "MZ-102 c.yaml: expected sections, got "),
        ("data: {train: 2020-13-45}", "MZ-102 c.yaml: cannot be read: month must be in 1..12"),
        ("run: {seed: " + "9" * 5000 + "}", "MZ-102 c.yaml: cannot be read: Exceeds the limit"),
        ("[" * 500, "MZ-102 c.yaml:"),
    ],
)
def test_each_fault_is_one_line_with_its_place(file: Path, text: str, expected: str):
    (line,) = lines(file, text)
    assert line.startswith(expected) and len(line) <= LINE_LIMIT


def _typos(key: str) -> set[str]:
    """One character deleted, or two neighbours swapped, the dots left alone."""
    deleted = {key[:i] + key[i + 1 :] for i in range(len(key)) if key[i] != "."}
    pairs = [i for i in range(len(key) - 1) if "." not in key[i : i + 2] and key[i] != key[i + 1]]
    return deleted | {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in pairs}


def test_every_typo_of_every_key_is_refused_with_the_right_key(file: Path):
    checked = 0
    for key in option_keys():
        if "." not in key:  # a typo of it has no section
            continue
        typos = sorted(_typos(key))[::5]
        found = lines(file, "", *(f"{typo}=1" for typo in typos))
        assert sorted(found) == sorted(
            f"MZ-104 command line: unknown key {typo}; did you mean {key}?" for typo in typos
        )
        checked += len(typos)
    assert checked > 200


def test_every_typo_in_a_file_is_refused_with_its_line(file: Path):
    for key in option_keys()[::5]:
        section, _, name = key.rpartition(".")
        if not section:
            continue
        outer = [f"{'  ' * depth}{part}:" for depth, part in enumerate(section.split("."))]
        typos = sorted(typo.rpartition(".")[2] for typo in _typos(key) if typo.startswith(f"{section}."))
        typos = [typo for typo in typos if typo]
        text = "\n".join([*outer, *(f"{'  ' * len(outer)}{typo}: 1" for typo in typos)])
        first = len(outer) + 1
        assert lines(file, text) == [
            f"MZ-104 c.yaml:{first + i}: unknown key {section}.{typo}; did you mean {key}?"
            for i, typo in enumerate(typos)
        ], name


def test_all_faults_at_once(file: Path):
    found = lines(file, "run: {steps: x}\nmodel:\n  laers: 3\n  hidden: y", "batch.micor=3", "batch.global=z")
    assert [line.split(":")[0] + ":" + line.split(":")[1] for line in found[2:]] == [
        "MZ-105 c.yaml:1", "MZ-105 c.yaml:4", "MZ-105 command line: batch.global"
    ]  # fmt: skip
    assert "model.laers" in found[0] and "batch.micor" in found[1] and len(found) == 5


def test_all_broken_relations_at_once_with_their_numbers(file: Path):
    text = (
        "model: {hidden: 100, heads: 3, kv_heads: 2}\nparallel: {tensor: 7, pipeline: 20}\nbatch: {global: 5, micro: 2}"
    )
    found = lines(file, text + "\nschedule: {min_lr: 1}", "model.ffn=400", "zero.stage=0", "zero.offload.optimizer=cpu")
    assert found == [
        "MZ-106 c.yaml:1: model.hidden % model.heads == 0 with model.head_dim null is broken: 100 % 3 = 1; "
        "change model.heads or model.hidden, or give model.head_dim",
        "MZ-106 c.yaml:1: model.heads % model.kv_heads == 0 is broken: 3 % 2 = 1; change model.kv_heads or model.heads",
        "MZ-106 c.yaml:1: model.heads % parallel.tensor == 0 is broken: 3 % 7 = 3; "
        "lower parallel.tensor: a head is never split",
        "MZ-106 c.yaml:1: model.kv_heads % parallel.tensor == 0, or parallel.tensor % model.kv_heads == 0 without "
        "model.qk_norm full is broken: 2 key-value heads on 7 ranks; change parallel.tensor: it divides "
        "model.kv_heads, or as many ranks share each key-value head",
        "MZ-106 command line: model.ffn % parallel.tensor == 0 is broken: 400 % 7 = 1; "
        "change parallel.tensor or model.ffn",
        "MZ-106 c.yaml:3: batch.global % batch.micro == 0 is broken: 5 % 2 = 1; change batch.global or batch.micro",
        "MZ-106 c.yaml:2: model.layers >= parallel.pipeline * pipeline.chunks is broken: model.layers 12, "
        "parallel.pipeline 20, pipeline.chunks 1; lower parallel.pipeline or pipeline.chunks",
        "MZ-106 c.yaml:4: schedule.min_lr <= optimizer.lr is broken: schedule.min_lr 1.0, optimizer.lr 0.0003; "
        "lower schedule.min_lr",
        "MZ-107 command line: zero.offload.optimizer cpu with zero.stage 0: only sharded state is offloaded; "
        "zero.stage must be 1 or 2 or 3",
    ]


def test_error_list_has_the_code_and_exit_code_of_its_first(file: Path):
    file.write_text("run: {steps: x, stpes: 1}")
    with pytest.raises(FaultList) as caught:
        load(str(file))
    assert [error.code for error in caught.value.errors] == [104, 105]
    assert (caught.value.code, caught.value.exit_code) == (104, 2)
