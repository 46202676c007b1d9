"""What a training state belongs to: a model's configuration, and the weights that stay as they are beside what trains.

A state holds only what is trained. Beside other frozen weights, another alpha or another top-k the same tensors are
another policy, and nothing of it shows in a shape. So a state says what it is of, and is refused for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3rl.checkpoint.train_state import TrainState, TrainStateError
from k3rl.model import K3Config, LoraConfig
from k3rl.parallel.agree import flat


def refuse_foreign(
    state: TrainState, config: K3Config, lora: LoraConfig | None, frozen: tuple[str | None, str] | None
) -> None:
    """Raises TrainStateError where `state` is that of another model than the one that is to go on from it.

    frozen: where the weights that do not train came from, and their `weights_fingerprint`; None where all train. States
    of older k3rl say less of themselves, and are asked for no more.
    """
    about: Mapping[str, Any] = state.extra.get("learner") or {}
    if not about:
        return
    was, now = flat("model", K3Config.from_dict(about["model"]["config"]).to_dict()), flat("model", config.to_dict())
    before = about["trainer"].get("lora")
    if before is not None and lora is not None:
        was["trainer.lora.alpha"], now["trainer.lora.alpha"] = before["alpha"], lora.alpha
    for key in sorted({*was, *now}):
        if was.get(key) != now.get(key):
            raise TrainStateError(
                f"{state.directory} was saved with {key} {was.get(key)!r}, and this run has {now.get(key)!r}: its "
                "tensors would be another policy. Resume with the configuration that it was written with"
            )
    known = about["model"].get("frozen")
    if frozen is None or known is None or known == frozen[1]:
        return
    raise TrainStateError(
        f"{state.directory} was trained beside other weights than those of {frozen[0] or frozen[1]}, which do not "
        f"train and are no part of it. Resume with the weights that it was begun with ("
        f"{about['model']['start'] or known})"
    )
