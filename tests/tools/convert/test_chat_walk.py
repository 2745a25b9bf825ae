"""The walk of docs/fine_tuning.md for each family: in from the hub's files, fine-tuned on chats, out, generated."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import megazero
from data_tools import preprocess
from megazero.__main__ import main
from megazero.config.file import load
from megazero.data.tokenizer import open_tokenizer
from megazero.generation.decode import Decoder
from megazero.generation.sampling import Sampling
from megazero.generation.text import Writer
from megazero.tools.training.launch import launch
from tests.data_tools.chats import CHATS, MARKED, make_tokenizer, turns, write_chats
from tests.tools.convert.models import FAMILIES, model_of

QUICK = ("gemma3_text",)
TEXT = "What is argparse? A parser, of arguments."


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in FAMILIES])
def test_a_chat_model_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    model_of(name).save_pretrained("theirs")
    make_tokenizer(Path("theirs"), MARKED)
    assert main(["import", "--from", "hf", "--model", "theirs", "--out", "runs/imported"]) == 0
    chats = write_chats(Path("chats.jsonl"), [*CHATS, *(turns("a parser", "of arguments") for _ in range(20))])
    line = ["--chat", "--input", str(chats), "--tokenizer", "runs/imported/tokenizer.json", "--output", "data/chats"]
    assert preprocess.main(line) == 0
    options = ["checkpoint.resume=runs/imported", "checkpoint.load=weights", "data.train=data/chats", "data.valid=0.2"]
    options += ["data.mask_eod=true", "data.pack=true", "run.steps=2", "batch.global=2", "run.dir=runs/chats"]
    assert launch(load("runs/imported/config.yaml", options), "chats", 1) == 0
    assert main(["export", "--to", "hf", "--run", "runs/chats", "--out", "exported"]) == 0
    assert f" as {name}," in capsys.readouterr().out

    tokenizer = transformers.AutoTokenizer.from_pretrained("exported", local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained("exported", local_files_only=True)
    own = open_tokenizer(Path("runs/imported/tokenizer.json"))
    assert tokenizer.encode(TEXT, add_special_tokens=False) == own.encode(TEXT)
    chat = [{"role": "user", "content": "What is argparse?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(ids["input_ids"][0]).endswith("<|im_start|>assistant\n")
    length = ids["input_ids"].shape[1]
    with torch.no_grad():
        theirs = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, length:]
    opened = megazero.load("runs/chats", torch.float32)
    assert opened.tokenizer is not None
    writer = Writer(Decoder(opened.model), opened.tokenizer, Sampling(tokens=12, temperature=0.0), chat=True)
    prompt = writer.ids_of("What is argparse?", where="the question")
    assert prompt == ids["input_ids"][0].tolist()
    assert opened.generate(prompt, tokens=12, temperature=0.0) == [id_ for id_ in theirs.tolist() if id_ != own.eod]
    (answer,) = writer.texts([chat])
    assert answer == opened.generate("What is argparse?", chat=True, tokens=12, temperature=0.0)
    before, after = (json.loads((Path(at) / "config.json").read_text()) for at in ("theirs", "exported"))
    assert before["model_type"] == after["model_type"] and after["eos_token_id"] == own.eod
