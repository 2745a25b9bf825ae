"""Conversations, templates and a tokenizer with special tokens for the tests of --chat."""

import json
from pathlib import Path
from typing import Any

from tests.byte_level import byte_level_bpe

SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>", "<s>", "[INST]", "[/INST]")
# What most models are trained with; the role is behind a special token, the answer before one.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' and marked %}{% generation %}{{ message['content'] + '<|im_end|>' }}\
{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MARKED = CHATML.replace(" and marked", "")
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Llama 2's way: no role, the same rendering with and without a prompt, white space taken off.
INST = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}\
{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}
"""
# The ways of well-known families; ANSWER stands where an answer is rendered.
_FAMILIES = {
    "ChatML": "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "ANSWER{{ m.content + '<|im_end|>' }}END{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "Llama 3": "{{- bos_token }}{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_end|>\\n\\n' }}"
    "{%- if m.role == 'assistant' %}ANSWER{{ m.content | trim + '<|end|>' }}END{%- else %}"
    "{{- m.content | trim + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\\n\\n' }}{%- endif %}",
    "Mistral": "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "ANSWER{{ ' ' + m.content | trim + eos_token }}END{%- else %}{{- ' [INST] ' + m.content + ' [/INST]' }}"
    "{%- endif %}{%- endfor %}",
    "Gemma": "{{- bos_token }}{% set ns = namespace(first=true) %}{%- for m in messages %}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role %}{{- '<|im_start|>' + role + '\\n' }}"
    "{%- if role == 'model' %}ANSWER{{ m.content | trim + '<|im_end|>' }}END{%- else %}"
    "{{- m.content | trim + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{% set ns.first = false %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}",
    "Zephyr": "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{{ '<|assistant|>\\n' }}"
    "ANSWER{{ m.content + eos_token }}END{{ '\\n' }}{% else %}\n{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
}
FAMILIES = {  # with and without {% generation %} blocks
    name: (
        text.replace("ANSWER", "{% generation %}").replace("END", "{% endgeneration %}"),
        text.replace("ANSWER", "").replace("END", ""),
    )
    for name, text in _FAMILIES.items()
}
CHATS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\n argparse?"},
        {"role": "assistant", "content": "A parser of arguments."},
        {"role": "user", "content": "  And 'é\u4e2d'? "},
        {"role": "assistant", "content": "No.\n"},
    ],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "You said nothing."}],
    [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 7}],
    [{"role": "user", "content": "self.add_argument("}, {"role": "assistant", "content": "  "}],
]


def turns(*contents: str) -> list[dict[str, Any]]:
    """A conversation of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write_chats(path: Path, chats: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def make_tokenizer(folder: Path, template: str | None = None) -> Path:
    """A byte-level tokenizer.json with special tokens, and tokenizer_config.json beside it."""
    import argparse

    made = byte_level_bpe([Path(str(argparse.__file__)).read_text(encoding="utf-8")[:60_000]], 340, SPECIALS)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>"}
    told |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder / "tokenizer.json"
