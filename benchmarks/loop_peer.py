"""The peer of the loop's benchmark: TRL's GRPO with plain `generate` on a dense model made from a seed.

    python benchmarks/loop_peer.py EPISODES STEPS TOKENS

Prints one line for each step: its number and seconds. The same prompts, sampled tokens and reward as `loop_env.py`, and
as plain as a first user has it: one process, bf16, no vLLM server. Needs trl, transformers, accelerate and datasets,
which no extra of k3rl brings. 76 M parameters, all of them active.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 512
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def tasks(count: int) -> list[dict[str, str]]:
    """The prompts of `loop_env.py`."""
    source = runpy.run_path(str(Path(__file__).with_name("loop_env.py")))["Letters"](1, 24)
    return [{"prompt": source.get("train", index).messages[0].content} for index in range(count)]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / max(24, len(text)) for text in completions]


def byte_tokenizer() -> Any:
    """A token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>"]
    inner = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def train(episodes: int, steps: int, tokens: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            torch.cuda.synchronize()
            print(f"step {state.global_step} {time.perf_counter() - self.began:.4f}", flush=True)

    tokenizer = byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=False, **SIZES, **ends)
    trainer = GRPOTrainer(
        model=Qwen3ForCausalLM(config).to(torch.bfloat16),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(tasks(episodes)),
        processing_class=tokenizer,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=os.path.join(os.environ.get("TMPDIR", "/tmp"), "loop_peer"),
            per_device_train_batch_size=episodes,
            num_generations=8,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-4,
            bf16=True,
            beta=0.0,
            temperature=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            gradient_checkpointing=False,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    train(*map(int, sys.argv[1:4]))
