"""What is wrong before the first step: command line, config, data, folder."""

import os
import shutil

from megazero.data.origin import Origin
from tests.faults.site import (
    Site,
    fault,
    usage,
)

usage(
    "an option misspelt",
    "MZ-104 command line: unknown key optimizer.lrr; did you mean optimizer.lr?",
    "optimizer.lrr=1",
)
usage("a word for a number", "MZ-105 command line: run.steps…", "run.steps=many")
usage(
    "sizes that do not divide",
    "MZ-106 …model.hidden % model.heads == 0 with model.head_dim null is broken: 40 % 3 = 1…",
    "model.heads=3",
)
usage("an override without a value", "MZ-108 …", "run.steps")
usage(
    "a batch that the ranks do not divide",
    "MZ-106 --nproc 3: expected batch.global % (batch.micro * data ranks) == 0, got "
    "4 % (2 * 3) = 4; use batch.global=6, or --nproc 1, 2",
    "--nproc",
    "3",
)
usage(
    "a tokenizer with more pieces than the model",
    "MZ-112 …the tokenizer has 400 pieces, model.vocab is 300…",
    "model.vocab=300",
)


@fault("no such config", "MZ-101 …nowhere.yaml…", code=2)
def _(site: Site) -> list[str]:
    return ["train", "--config", "nowhere.yaml"]


@fault("a key twice in a config", "MZ-103 twice.yaml:3: …", code=2)
def _(site: Site) -> list[str]:
    path = site.folder / "twice.yaml"
    path.write_text("run: {steps: 1}\n\nrun: {steps: 2}\n")
    return ["train", "--config", str(path)]


@fault(
    "RANK without WORLD_SIZE",
    "MZ-111: RANK set, WORLD_SIZE and LOCAL_RANK not; unset them or start through torchrun",
    code=2,
)
def _(site: Site) -> list[str]:
    site.patch.setenv("RANK", "0")
    return site.train()


@fault("a folder that holds a run", "MZ-110 RUN: holds a run already (metrics.jsonl); give another run.dir=…", code=2)
def _(site: Site) -> list[str]:
    return site.train()


@fault("no token files", "MZ-201 …gone.idx…")
def _(site: Site) -> list[str]:
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={site.folder / 'gone'}")


@fault("the index of a data set cut off", "MZ-20… DATA.idx: …")
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 500)
    os.truncate(f"{data}.idx", 30)
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={data}", "data.valid=null")


@fault("the tokens of a data set cut off", "MZ-204 DATA.bin: expected 1,000 bytes… got 900…")
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 500)
    os.truncate(f"{data}.bin", 900)
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={data}", "data.valid=null")


@fault(
    "a token that the model does not know",
    "MZ-205 …DATA.bin: token 50 of document 1 is 999, expected 0 <= id < 400; …",
)
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 100, [2] * 50 + [999] + [2] * 50)
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={data}", "data.valid=null", "run.steps=9")


@fault("less text than one sequence", "MZ-207 DATA.bin: expected at least seq_len + 1 = 33 tokens, got 9…")
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 9)
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={data}", "data.valid=null")


@fault("no tokenizer", "MZ-209 …gone.model…")
def _(site: Site) -> list[str]:
    return site.train("run.dir=" + str(site.folder / "new"), f"data.tokenizer={site.folder / 'gone.model'}")


@fault(
    "token files of another tokenizer with as many ids", "MZ-221 DATA.bin: was made by the tokenizer 0123456789abcdef…"
)
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 500)
    Origin("0123456789abcdef", 400, 1, 500, 500, 500, 500).write(data)
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={data}", "data.valid=null")


@fault("a mask that is gone", "MZ-225 …DATA.mask: is missing, but data.json names it: …")
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 500)
    Origin("0123456789abcdef", 400, 1, 500, 500, 500, 500, mask="0123456789abcdef").write(data)
    options = (f"data.train={data}", "data.valid=null", "data.tokenizer=null")
    return site.train("run.dir=" + str(site.folder / "new"), *options)


@fault(
    "a source that is read too often",
    "MZ-219 DATA: 4 steps read it 1.067 times, data.max_epochs is 1; use more text, lower its weight or …",
)
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 500)
    new = "run.dir=" + str(site.folder / "new")
    return site.train(new, f"data.train={data}", "data.valid=null", "data.max_epochs=1")


@fault(
    "a validation set with a document that is trained on",
    "MZ-220 DATA: document 0 of validation set data is trained on: it is document 0 of DATA; remove it from one of …",
)
def _(site: Site) -> list[str]:
    data = site.dataset([1] * 500)
    sets = f'data.validation=[{{"path": "{data}"}}]'
    return site.train("run.dir=" + str(site.folder / "new"), f"data.train={data}", "data.valid=null", sets)


usage(
    "a stage after the end of its run",
    "MZ-106 command line: stages end by run.steps is broken: they end at steps 9, run.steps is 4; raise run.steps, …",
    "stages=[{until_step: 9}]",
)
usage(
    "a stage without a batch",
    "MZ-105 command line: stages[0].batch.global: expected greater than or equal to 1, got 0",
    "stages=[{until_step: 2, batch: {global: 0}}]",
)
usage(
    "a stage with another model",
    "MZ-109 command line: stages[0].model.layers cannot change: the weights have this shape, or were trained with this "
    "value; a stage may change data.sources, data.mask_eod, batch.global, batch.micro, model.seq_len, optimizer.lr, "
    "optimizer.clip, optimizer.*, schedule.*",
    "stages=[{until_step: 2, model: {layers: 3}}]",
)
usage(
    "an option of a stage misspelt",
    "MZ-104 command line: unknown key stages[0].optimizer.lrr; did you mean optimizer.lr?",
    "stages=[{until_step: 2, optimizer: {lrr: 3}}]",
)
usage(
    "a stage with sequences longer than learned positions",
    "MZ-106 command line: model.position rotary with another model.seq_len in stages is broken: 64, but learned "
    "positions are a weight of one length; use model.position=rotary, or one length",
    "stages=[{until_step: 2, model: {seq_len: 64}}]",
)


@fault("a file where the run's folder should be", "MZ-401 …: cannot be written: …; choose another run.dir")
def _(site: Site) -> list[str]:
    (site.folder / "file").touch()
    return site.train("run.dir=" + str(site.folder / "file"))


@fault(
    "a disk without room for a checkpoint",
    "MZ-403 …/checkpoints: expected room for 0.00136 GB of checkpoints (0.000682 GB each), got 1e-06 GB; …",
)
def _(site: Site) -> list[str]:
    site.patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1000))
    return site.train("run.dir=" + str(site.folder / "new"), "checkpoint.every=2")


@fault(
    "a FIFO for a config",
    "MZ-101 …fifo.yaml: is not a regular file; give a YAML file, or a shipped config",
    code=2,
)
def _(site: Site) -> list[str]:
    os.mkfifo(site.folder / "fifo.yaml")
    return ["train", "--config", str(site.folder / "fifo.yaml")]


@fault(
    "a config that stands for 2^40 values",
    "MZ-102 many.yaml: cannot be read: expected at most 10,000 values, got 8,796,093,022,164 with aliases "
    "expanded; correct the file",
    code=2,
)
def _(site: Site) -> list[str]:
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 41))]
    (site.folder / "many.yaml").write_text("\n".join(lines))
    return ["train", "--config", str(site.folder / "many.yaml")]


usage(
    "a million layers",
    "MZ-105 command line: model.layers: expected less than or equal to 4096, got 1000000",
    "model.layers=1000000",
)
usage(
    "a number of 5,000 digits",
    "MZ-108 command line, run.steps: '999…",
    "run.steps=" + "9" * 5000,
)
