"""A seed-made Kimi Linear as the hub has one: remote code, tiktoken ranks, special tokens, chat template."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch

from k3rl.checkpoint import save_checkpoint
from k3rl.model import K3Config, K3ForCausalLM, Origin
from k3rl.tokens import K2_SPECIAL_IDS, Tokenizer

RANKS = 499
SHIFT = RANKS - 163_584
VOCABULARY = RANKS + 256
# The format as it is described, written for Jinja by the tests: heads and ends of turns, one section of calls, the id
# before a result. DEFAULT stands for the part in which templates differ.
TEMPLATE = """\
{%- macro said(m) -%}
{%- if m['content'] is string -%}{{ m['content'] }}
{%- elif m['content'] -%}{%- for part in m['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
DEFAULT
{%- for m in messages -%}
{%- set kind = m['role'] if m['role'] in ('user', 'assistant') else 'system' -%}
{{ '<|im_' + kind + '|>' + (m.get('name') or m['role']) + '<|im_middle|>' }}
{%- if m['role'] == 'tool' -%}{{ '## Return of ' + m['tool_call_id'] + '\\n' }}{%- endif -%}
{{- said(m) -}}
{%- if m.get('tool_calls') -%}
<|tool_calls_section_begin|>
{%- for c in m['tool_calls'] -%}
{%- set given = c['function']['arguments'] -%}
{{ '<|tool_call_begin|>' + c['id'] + '<|tool_call_argument_begin|>' }}
{{- given if given is string else given | tojson -}}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
SYSTEM = "Be brief,\n<|im_end|> and kind."


def template(default_system: str | None = None) -> str:
    """The chat template; with a system turn of its own where a conversation begins without one."""
    if default_system is None:
        return TEMPLATE.replace("DEFAULT\n", "")
    turn = json.dumps(f"<|im_system|>system<|im_middle|>{default_system}<|im_end|>")
    guarded = f"{{%- if messages and messages[0]['role'] != 'system' -%}}{{{{ {turn} }}}}{{%- endif -%}}\n"
    return TEMPLATE.replace("DEFAULT\n", guarded)


def strings() -> dict[str, str]:
    """Special names to how they are written, as the released configuration has them."""
    brackets = {"bos": "[BOS]", "eos": "[EOS]", "eot": "[EOT]", "unk": "[UNK]", "pad": "[PAD]"}
    return {name: brackets.get(name, f"<|{name}|>") for name in K2_SPECIAL_IDS}


def files(default_system: str | None = None) -> dict[str, bytes]:
    """What lies beside weights and configuration."""
    small = Tokenizer.builtin("k2")
    ranks = b"".join(base64.b64encode(small.decode_bytes([n])) + b" %d\n" % n for n in range(RANKS))
    added = {str(K2_SPECIAL_IDS[name] + SHIFT): {"content": text, "special": True} for name, text in strings().items()}
    return {
        "tiktoken.model": ranks,
        "tokenizer_config.json": json.dumps(
            {
                "added_tokens_decoder": added,
                "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                "bos_token": "[BOS]",
                "eos_token": "<|im_end|>",
                "pad_token": "[PAD]",
            }
        ).encode(),
        "chat_template.jinja": template(default_system).encode(),
        "modeling_kimi.py": b"# remote code\n",
        "tokenization_kimi.py": b"# remote code\n",
    }


def write_tokenizer(folder: Path, default_system: str | None = None, **others: bytes) -> Path:
    """The files of `files` in a folder; others: of more files, or in the place of those, dots as underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files(default_system).items():
        (folder / name).write_bytes(others.pop(name.replace(".", "_"), content))
    return folder


def config() -> K3Config:
    """The nano size with this vocabulary."""
    ids = {key: K2_SPECIAL_IDS[name] + SHIFT for key, name in
           {"bos_token_id": "bos", "eos_token_id": "im_end", "pad_token_id": "pad"}.items()}  # fmt: skip
    return K3Config.named("kimi-linear-nano").replace(vocab_size=VOCABULARY, **ids)


def write_checkpoint(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """A checkpoint with all of it; fields: of the configuration, instead of those of `config`."""
    model = K3ForCausalLM(config().replace(**fields), dtype=torch.bfloat16)
    model.init_weights(seed)
    model.origin = Origin(files(), {})
    save_checkpoint(model, folder)
    return folder
