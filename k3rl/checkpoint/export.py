"""What `k3rl export` does once it knows from where to where."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3rl.checkpoint.adapter import check_base, load_adapter, save_adapter, weights_of
from k3rl.checkpoint.card import read_card
from k3rl.checkpoint.fingerprint import weights_fingerprint
from k3rl.checkpoint.hf import StoredFiles, carried_code, carried_files, load_checkpoint, save_checkpoint, stored_files
from k3rl.checkpoint.official import official_tensors
from k3rl.checkpoint.state_writer import refuse_foreign, restore
from k3rl.checkpoint.train_state import TrainState, TrainStateError
from k3rl.config import K3Error
from k3rl.model import K3Config, K3ForCausalLM, Origin, adapted, merge
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import RANKS_FILE, SMALL_FILE, Tokenizer

_ONE_PROCESS = {
    "expert_parallel": 1, "context_parallel": 1, "shard_frozen": 1, "packed_experts": False, "capture": "off",
    "recompute": (), "exact": False,
}  # fmt: skip


def copy_checkpoint(source: Path, target: Path) -> tuple[int, int]:
    """Load, save, load again and compare every stored tensor. Returns (tensors, bytes of the folder).

    Raises K3Error, naming the tensor, when what was written does not read back as what was loaded.
    """
    model = load_checkpoint(source)
    return _save(model, source, target), _size(target)


def copy_adapter(source: Path, target: Path) -> tuple[int, int]:
    """The same for an adapter alone, checked against the weights that it belongs to."""
    base = weights_of(source)
    check_base(source, base)
    model = load_checkpoint(base)
    adapter = load_adapter(source, model)
    save_adapter(
        dict(adapter.stored_tensors()),
        adapter.config,
        target,
        base=base,
        tokenizer=_tokenizer(source),
        card=read_card(source),
    )
    written = dict(load_adapter(target, model).stored_tensors())
    for name, tensor in adapter.stored_tensors():
        if not written[name].equal(tensor):
            raise K3Error(f"{target}: {name} does not read back as it was written")
    return len(written), _size(target)


def export_state(state: TrainState, target: Path, *, merged: bool = False) -> tuple[int, int]:
    """The policy of a training state as its run would write it: a checkpoint, or an adapter unless `merged`.

    One process holds the model with masters and optimizer state, 16 bytes a number and more. An adapter that is trained
    beside fresh weights gets those in a folder `TARGET-base`. Returns (tensors, bytes of the folder). Raises
    TrainStateError for a state that is damaged, or does not say which model it is of.
    """
    about = state.extra.get("learner")
    if about is None:
        raise TrainStateError(
            f"{state.directory} does not say which model it is of: an older k3rl wrote it. Resume its run and let it "
            "save again"
        )
    settings = TrainerConfig.model_validate(about["trainer"]).replace(**_ONE_PROCESS)
    start, seed, config = (about["model"][key] for key in ("start", "seed", "config"))
    built = K3Config.from_dict(config)
    if start is not None and (settings.lora is not None or built.vision_config is not None):
        refuse_foreign(state, built, settings.lora, (start, weights_fingerprint(start, seed)))
        # whatever is not trained is there alone
        model = load_checkpoint(start, quantization=asdict(built.quantization))
    else:
        model = K3ForCausalLM(built)
        if start is None:
            model.init_weights(seed)
        elif settings.lora is None:
            _keep_stored_bytes(model, Path(start))
            _keep_origin(model, Path(start))
    trainer = Trainer(model, settings)
    restore(trainer, state)
    if about.get("rounded_to") == "bfloat16":  # by the program that trained it, before anything else
        masters = trainer.native.optimizer.masters(trainer.native.optimizer.names)
        trainer.native.optimizer.set_masters({name: value.bfloat16() for name, value in masters.items()})
    tokenizer = Tokenizer.builtin() if start is None else _tokenizer(Path(start))
    card = {"stage": state.directory.parent.name, "steps": state.extra.get("step", trainer.steps)}
    if merged and model.adapter is not None:
        merge(model)
    if model.adapter is None:
        save_checkpoint(model, target, tokenizer=tokenizer, card=card)
        return _compared(model, target), _size(target)
    if start is None:
        start = str(target.with_name(f"{target.name}-base"))
        with adapted(model, None):
            save_checkpoint(model, start, tokenizer=tokenizer)
    tensors = dict(model.adapter.stored_tensors())
    activations = built.quantization.activations
    save_adapter(
        tensors, model.adapter.config, target, base=start, activations=activations, tokenizer=tokenizer, card=card
    )
    return len(tensors), _size(target)


def _keep_origin(model: K3ForCausalLM, start: Path) -> None:
    """What the start had beside its tensors, for an export. Warns where the start is gone."""
    if not (start / "config.json").is_file():
        reason = f"{start}, from which the weights came, is gone, and with it what an export carries over from there"
        warnings.warn(reason, stacklevel=3)
        return
    if model.config.flat:
        model.origin = Origin(carried_files(start), stored_files(start, model.config).shards)
    elif code := carried_code(start):
        model.origin = Origin(code, {})


def _keep_stored_bytes(model: K3ForCausalLM, start: Path) -> None:
    """Blocks of experts that training left as they were keep the bytes of the start, as its run keeps them.

    Another program may have chosen other scales for the same values. Warns where the start is gone.
    """
    if model.config.quantization.weights != "mxfp4":
        return
    if not (start / "config.json").is_file():
        warnings.warn(
            f"{start}, from which the weights came, is gone. Values are those of the run; blocks of experts that it "
            "did not change may be stored by other scales than there",
            stacklevel=3,
        )
        return
    stored = StoredFiles(start)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.official_parameters()}
    for name in (key.removesuffix("_packed") for key in stored if key.endswith("_packed")):
        packed, scale = stored[f"{name}_packed"], stored[f"{name}_scale"]
        if shapes.get(name) == (packed.shape[0], 2 * packed.shape[1]):
            model.stored_blocks[name] = packed, scale


def merge_adapter(source: Path, target: Path) -> tuple[int, int, dict[str, dict[str, Any]]]:
    """One checkpoint of an adapter and its weights; also, by stored format, what rounding to it left of the change.

    Matrices that the adapter does not touch keep their bytes. The sums are rounded as a checkpoint stores them, so the
    result is another policy than the adapter beside its weights, above all where routed experts are adapted.
    """
    model = load_checkpoint(source)
    merged = {form: asdict(about) | {"error": about.error} for form, about in merge(model).items()}
    return _save(model, source, target), _size(target), merged


def _tokenizer(source: Path) -> Tokenizer | None:
    has_tokenizer = any((source / name).is_file() for name in (RANKS_FILE, SMALL_FILE))
    return Tokenizer.load(source) if has_tokenizer else None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _save(model: K3ForCausalLM, source: Path, target: Path) -> int:
    """Writes and compares; the number of tensors."""
    tokenizer = _tokenizer(source) or _tokenizer(weights_of(source))
    save_checkpoint(model, target, tokenizer=tokenizer, card=read_card(source))
    return _compared(model, target)


def _compared(model: K3ForCausalLM, target: Path) -> int:
    """The number of tensors. Raises K3Error for the first that does not read back as it is."""
    written = dict(official_tensors(load_checkpoint(target)))
    count = 0
    for name, tensor in official_tensors(model):
        count += 1
        if not (written[name].dtype == tensor.dtype and written[name].equal(tensor)):
            raise K3Error(f"{target}: {name} does not read back as it was written")
    return count
