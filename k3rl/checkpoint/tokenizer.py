"""The tokenizer of a checkpoint directory, checked against the model that it belongs to."""

from __future__ import annotations

from pathlib import Path

from k3rl.checkpoint.adapter import weights_of
from k3rl.checkpoint.official import CheckpointError
from k3rl.model import K3Config
from k3rl.tokens import Tokenizer, TokenizerError, chat_format


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint or an adapter, whose conversations have a chat form.

    Raises CheckpointError where there is none, its files are broken or of two tokenizers, its chat template renders
    another form, or it is not the model's: it has ids that the model lacks, or the model's texts begin or its turns end
    with another token.
    """
    path = Path(directory)
    try:
        tokenizer = Tokenizer.load(path)
        chat = chat_format(tokenizer)
    except TokenizerError as error:
        raise CheckpointError(str(error)) from error
    file = weights_of(path) / "config.json"
    config = K3Config.from_json(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path} has a tokenizer of {tokenizer.vocab_size} ids, and {file} says vocab_size {config.vocab_size}: "
            "some ids have no embedding. Put the tokenizer files of this model there"
        )
    wanted = {"eos_token_id": (chat.stop_id, tokenizer.special("eos")), "bos_token_id": (tokenizer.special("bos"),)}
    for key, ids in wanted.items():
        value = getattr(config, key)
        if value not in ids:
            found = tokenizer.decode([value]) if 0 <= value < tokenizer.vocab_size else "no token"
            raise CheckpointError(
                f"{file} says {key} {value}, which is {found!r} to the tokenizer of {path}; wanted "
                f"{tokenizer.decode(ids[:1])!r}, id {ids[0]}. Put the tokenizer files of this model there"
            )
    return tokenizer
