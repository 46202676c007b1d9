"""Makes the engine that a rollout actor serves: k3rl's own over a checkpoint, or the adapter of a vLLM server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from k3rl.actors.cluster import LEAST_ROWS, ClusterConfig, most_rows
from k3rl.checkpoint import StoredFiles, is_adapter, load_checkpoint
from k3rl.config import ConfigError
from k3rl.engine import Engine, PrefixCache, VLLMEngine, WeightUpdateError, device_bytes, rows_within
from k3rl.model import K3Config, place_of
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams

log = logging.getLogger(__name__)

_WARM_UP_GROUPS, _WARM_UP_TOKENS = 40, 60  # of a warm-up: more than captured steps take together, as at a run's start
_WARM_UP_IDS = 200  # ids below it are text in every tokenizer
_CACHE_SHARE = 8  # of a device's memory, for states of conversations, when nobody says how much


def k3rl_engine(
    config: ClusterConfig,
    checkpoint: Path,
    *,
    max_running: int | None,
    seed: int,
    quantization: Mapping[str, str] | None = None,
) -> Engine:
    """A fresh engine over a checkpoint directory. max_running: None for as many as suit model and device."""
    (device, dtype), own = place_of(config.rollout_device), config.engine
    model = load_checkpoint(checkpoint, dtype, device, packed=not own.exact and "served", quantization=quantization)
    most = model.config.max_position_embeddings
    if own.max_context is not None and own.max_context > most:
        raise ConfigError(f"cluster.engine.max_context is {own.max_context}; the model of {checkpoint} allows {most}")
    share = min(1.0, config.rollout_gpus) if config.rollout_device == "cuda" else 1.0
    memory = None if own.memory_mb is None else own.memory_mb << 20
    return Engine(
        model,
        max_running=max_running or rows_within(model, LEAST_ROWS, most_rows(config), memory, share),
        max_context=own.max_context,
        seed=seed,
        tokenizer=Tokenizer.load(checkpoint),
        in_flight=own.in_flight,
        memory_bytes="auto" if memory is None else memory,
        device_share=share,
        prefix_cache=_prefix_cache(config, device),
        exact=own.exact,
    )


def warm_up(engine: Engine) -> None:
    """Has an engine without requests compute made-up ones: kernels are compiled, and steps of as many rows as it has
    captured, before anybody waits for them. Nothing is left of them but what `totals_of` counts."""
    most = min(engine.model.config.vocab_size, _WARM_UP_IDS)
    ids = np.random.default_rng(0).integers(most, size=(_WARM_UP_GROUPS, _WARM_UP_TOKENS))
    params = SamplingParams(max_tokens=3, seed=0, return_routes=True)
    try:
        for groups, copies in ((_WARM_UP_GROUPS, -(-engine.max_running // _WARM_UP_GROUPS)), (1, 1), (4, 8)):
            engine.generate([ids[number].tolist() for number in range(groups) for _ in range(copies)], params)
    except Exception as error:  # whoever asks for something meets it again, and is told
        log.warning("an engine could not warm up: %s: %s", type(error).__name__, error)
    finally:
        engine.clear()


def vllm_engine(
    config: ClusterConfig,
    number: int,
    checkpoint: Path,
    connected: Engine | VLLMEngine | None,
    *,
    max_running: int | None,
    seed: int,
) -> VLLMEngine:
    """The server of rollout actor `number`, given these weights. The handshake, which is the first time that none is
    `connected`, tells what it lacks. Raises WeightUpdateError for an adapter.
    """
    rollout = config.rollout
    if is_adapter(checkpoint):
        raise WeightUpdateError(
            f"{checkpoint} is an adapter, which vLLM servers are not given; merge it (`k3rl export --merge`), or "
            "set cluster.rollout.backend to k3rl"
        )
    engine = connected
    if not isinstance(engine, VLLMEngine):
        engine = VLLMEngine.for_config(
            rollout.url[number],
            K3Config.from_json(checkpoint / "config.json"),
            model=rollout.model,
            token=os.environ.get(rollout.token_variable),
            max_running=max_running or most_rows(config),
            seed=seed,
            transfer_dir=rollout.transfer_dir,
            in_flight=config.engine.in_flight,
        )
    stored = StoredFiles(checkpoint)
    engine.init_weight_transfer(stored.keys())
    engine.load_weights(stored)
    return engine


def _prefix_cache(config: ClusterConfig, device: torch.device) -> PrefixCache | None:
    own = config.engine
    if own.prefix_cache_mb == 0:
        return None
    return PrefixCache.of_bytes(
        _share_of(config, device) if own.prefix_cache_mb is None else own.prefix_cache_mb << 20,
        own.prefix_host_mb << 20,
        disk_bytes=own.prefix_disk_mb << 20,
        directory=None if own.prefix_directory is None else Path(own.prefix_directory),
    )


def _share_of(config: ClusterConfig, device: torch.device) -> int:
    """Bytes for kept states. Of all the memory there is, not of what is free: what is evicted decides what is computed
    again, in another order of summation, and equal runs are to be equal."""
    engines = max(1.0, 1 / config.rollout_gpus) if device.type == "cuda" else config.rollout_actors
    return max(1, int(device_bytes(device) / _CACHE_SHARE / engines))
