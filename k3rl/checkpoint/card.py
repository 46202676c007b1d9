"""The model card of a checkpoint: a table of facts, written with it and added to later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3rl.checkpoint.official import CheckpointError
from k3rl.checkpoint.replace import flush
from k3rl.model import ABLATION_CHOICES, K3Config

CARD = "README.md"
_ROW = re.compile(r"\| ((?! ).*?) \| (.*) \|")


def card_text(name: str, config: K3Config, parameters: int, size: int, card: Mapping[str, Any]) -> str:
    """The card of checkpoint `name`; size: bytes of all tensors as stored; card: more facts, `title` and `summary`."""
    quantization = config.quantization
    experts = "MXFP4" if quantization.weights == "mxfp4" else "bf16"
    rows = {
        "parameters": f"{parameters:,}",
        "bytes as stored": f"{size:,}",
        "layers": f"{config.num_hidden_layers} ({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA)",
        "experts": f"{config.num_experts}, {config.num_experts_per_token} per token, stored as {experts}",
        "expert activations": "MXFP8" if quantization.activations == "mxfp8" else "unquantized",
        **{f"instead of K3's {ABLATION_CHOICES[key][0]}": value for key, value in config.ablation.to_dict().items()},
    }
    rows |= {key: value for key, value in card.items() if key not in ("title", "summary", *rows)}
    lines = [
        "---",
        "library_name: k3rl",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {card.get('title', name)}",
        "",
        str(card.get("summary", "A model of the Kimi K3 architecture in the official checkpoint layout.")),
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in rows.items()),
        "",
        "```python",
        "from k3rl.checkpoint import load_checkpoint",
        "",
        f'model = load_checkpoint("{name}")',
        "```",
        "",
    ]
    return "\n".join(lines)


def adapter_card_text(name: str, config: Mapping[str, Any], parameters: int, card: Mapping[str, Any]) -> str:
    """The card of adapter `name`; config: what `adapter_config.json` holds; card: more facts, `title`, `summary`."""
    rows = {
        "parameters": f"{parameters:,}",
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "modules": ", ".join(config["target_modules"]),
        "base": Path(config["base_model_name_or_path"]).name,
    }
    rows |= {key: value for key, value in card.items() if key not in ("title", "summary", *rows)}
    lines = [
        "---",
        "library_name: peft",
        "pipeline_tag: text-generation",
        "tags: [lora]",
        "---",
        "",
        f"# {card.get('title', name)}",
        "",
        str(card.get("summary", "A LoRA adapter for a model of the Kimi K3 architecture, in PEFT's format.")),
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in rows.items()),
        "",
    ]
    return "\n".join(lines)


def read_card(directory: str | Path) -> dict[str, str]:
    """The facts in the table of a checkpoint's model card; empty where there is no card."""
    path = Path(directory) / CARD
    if not path.is_file():
        return {}
    rows = (_ROW.fullmatch(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {row[1]: row[2].replace("\\|", "|") for row in rows if row is not None}


def add_to_card(directory: str | Path, facts: Mapping[str, Any]) -> None:
    """Adds facts, such as an evaluation made after saving, to a checkpoint's model card, or replaces older ones.

    The card is replaced as a whole. Raises CheckpointError when there is none.
    """
    path = Path(directory) / CARD
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; save_checkpoint writes it")
    lines = path.read_text(encoding="utf-8").splitlines()
    at = {row[1]: number for number, line in enumerate(lines) if (row := _ROW.fullmatch(line))}
    end = max(at.values(), default=lines.index("|---|---|")) + 1
    fresh: list[str] = []
    for key, value in facts.items():
        text = f"| {key} | {_cell(value)} |"
        if key in at:
            lines[at[key]] = text
        else:
            fresh.append(text)
    lines[end:end] = fresh
    part = path.with_name(f".{CARD}.writing")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flush(part)
    part.replace(path)
    flush(path.parent)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace("|", "\\|").replace("\n", " ")
