"""Makes the engine that a rollout actor serves: k3rl's own over a checkpoint, or the adapter of a vLLM server."""

from __future__ import annotations

import os
from pathlib import Path

from k3rl.actors.cluster import ClusterConfig, EngineConfig
from k3rl.checkpoint import StoredFiles, is_adapter, load_checkpoint
from k3rl.engine import Engine, PrefixCache, VLLMEngine, WeightUpdateError
from k3rl.model import K3Config, place_of
from k3rl.tokens import Tokenizer


def k3rl_engine(
    config: ClusterConfig, checkpoint: Path, *, max_running: int, seed: int, activations: str | None = None
) -> Engine:
    """A fresh engine over a checkpoint directory."""
    (device, dtype), own = place_of(config.rollout_device), config.engine
    return Engine(
        load_checkpoint(checkpoint, dtype, device, packed=not own.exact and "served", activations=activations),
        max_running=max_running,
        seed=seed,
        tokenizer=Tokenizer.load(checkpoint),
        in_flight=own.in_flight,
        memory_bytes="auto" if own.memory_mb is None else own.memory_mb << 20,
        device_share=min(1.0, config.rollout_gpus) if config.rollout_device == "cuda" else 1.0,
        prefix_cache=_prefix_cache(own),
        exact=own.exact,
    )


def vllm_engine(
    config: ClusterConfig,
    number: int,
    checkpoint: Path,
    connected: Engine | VLLMEngine | None,
    *,
    max_running: int,
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
            max_running=max_running,
            seed=seed,
            transfer_dir=rollout.transfer_dir,
            in_flight=config.engine.in_flight,
        )
    stored = StoredFiles(checkpoint)
    engine.init_weight_transfer(stored.keys())
    engine.load_weights(stored)
    return engine


def _prefix_cache(config: EngineConfig) -> PrefixCache | None:
    if not config.prefix_cache_mb:
        return None
    return PrefixCache.of_bytes(
        config.prefix_cache_mb << 20,
        config.prefix_host_mb << 20,
        disk_bytes=config.prefix_disk_mb << 20,
        directory=None if config.prefix_directory is None else Path(config.prefix_directory),
    )
