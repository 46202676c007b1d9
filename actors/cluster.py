"""Where a run's actors are: the configuration of a cluster, and Ray for the length of a run.

A local Ray is started or a running cluster joined, with token authentication set explicitly either way.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field, model_validator

from k3rl.config import NOT_HASHED, Config

LEAST_ROWS, _GPU_ROWS = 256, 1024


class EngineConfig(Config):
    """What each rollout engine does with its memory and its requests in flight."""

    in_flight: Literal["recompute", "carry"] = "recompute"
    """What running requests do when the weights change: their states are computed again from their tokens by the new
    weights, or carried on as the old ones computed them."""
    max_context: int | None = Field(None, ge=2)
    """Tokens of one conversation, prompt and answer, at most: memory is planned for it, and an episode that outgrows it
    ends. None takes what the model allows; a vLLM server has its own `--max-model-len`."""
    memory_mb: int | None = Field(None, ge=1)
    """Memory of states and latents together; None takes a share of what the machine has free, if it must be bounded."""
    prefix_cache_mb: int | None = Field(None, ge=0)
    """Memory, beside the model, for the states of conversations between their turns and of prompts that many share.
    None takes an eighth of what the device has, divided by the engines on it; with 0 each turn computes its whole
    conversation again."""
    prefix_host_mb: int = Field(0, ge=0)
    """Host memory for what leaves the first tier of the prefix cache."""
    prefix_disk_mb: int = Field(0, ge=0)
    """Room in files for what leaves memory."""
    prefix_directory: str | None = None
    """Where those files go."""
    exact: bool = False
    """Compute every token by itself, so that logprobs are bit-equal to those of a learner with `trainer.exact`. Many
    times slower."""

    @model_validator(mode="after")
    def _tiers_fit(self) -> EngineConfig:
        if (self.prefix_host_mb or self.prefix_disk_mb) and self.prefix_cache_mb == 0:
            raise ValueError("prefix_host_mb and prefix_disk_mb take what leaves prefix_cache_mb, which is 0; set it")
        if self.prefix_disk_mb and self.prefix_directory is None:
            raise ValueError(f"prefix_disk_mb is {self.prefix_disk_mb} without prefix_directory; name a folder")
        return self


class RolloutConfig(Config):
    """What samples: the engine inside each rollout actor, or a vLLM server for each (docs/vllm.md)."""

    backend: Literal["k3rl", "vllm"] = "k3rl"
    url: tuple[str, ...] = Field((), json_schema_extra=NOT_HASHED)
    """With `vllm`: the address of one server for each rollout actor, `http://host:port`. A run owns its servers: it
    sends them weights and pauses them."""
    model: str | None = Field(None, json_schema_extra=NOT_HASHED)
    """The name under which the servers serve the model; needed when they serve several."""
    token_variable: str = Field("K3RL_VLLM_TOKEN", json_schema_extra=NOT_HASHED)
    """Environment variable of the actors that holds the servers' API key, where they ask for one."""
    transfer_dir: str | None = Field(None, json_schema_extra=NOT_HASHED)
    """A folder that actors and servers both see, through which weights go as files; None sends them over HTTP."""


class ClusterConfig(Config):
    """Where the actors run and what each kind may use."""

    address: str | None = Field(None, json_schema_extra={"hash": False})
    """Address of a running Ray cluster; None starts one on this machine and stops it at the end."""
    cpus: int | None = Field(None, ge=1)
    """CPUs that a local Ray offers; None takes the machine's, and at least 2 (they are shares, not cores)."""
    learner_actors: int = Field(2, ge=1)
    """Ranks of the learner: data x expert x context, the last two from the trainer's configuration."""
    learner_cpus: float = Field(0.5, gt=0)
    learner_device: Literal["cpu", "cuda"] = "cpu"
    """Where each rank of the learner computes: on the CPU in float32 with gloo between ranks, or on a GPU of its own in
    bf16, masters in float32, with NCCL between ranks."""
    learner_gpus: float = Field(1.0, gt=0, le=1.0, json_schema_extra=NOT_HASHED)
    """With learner_device cuda, of a rank; below 1 a single rank leaves the rest of its GPU to engines."""
    rollout_actors: int = Field(2, ge=1)
    rollout_cpus: float = Field(0.25, gt=0)
    rollout_device: Literal["cpu", "cuda"] = "cpu"
    """Where each rollout actor's engine computes: on the CPU in float32, or on a GPU in bf16, states in float32."""
    rollout_gpus: float = Field(1.0, gt=0, le=1.0)
    """With rollout_device cuda, of each rollout actor, whose engine computes on one GPU; several may share one."""
    environment_actors: int = Field(2, ge=1)
    """Each runs episodes against the rollout actors that are its share, or against one that it shares."""
    environment_cpus: float = Field(0.125, gt=0)
    reward_actors: int = Field(2, ge=1)
    reward_cpus: float = Field(0.125, gt=0)
    reward_workers: int | None = Field(None, ge=1)
    """Answers that one reward actor grades beside each other. None: half the cores of its machine, divided by the
    reward actors, one at least."""
    learner_threads: int = Field(1, ge=1)
    """Torch threads of each rank. Two ranks of one thread beat one of two: threads spin, and lose to any neighbour."""
    rollout_threads: int = Field(1, ge=1)
    """Torch threads of each rollout actor. Float sums depend on it, so an evaluation must use the same."""
    placement_deadline_s: float = Field(60.0, gt=0)
    """How long to wait for resources before saying what is missing."""
    call_timeout_s: float = Field(900.0, gt=0)
    """How long one actor call may take before the run ends with the actor's name."""
    weight_transfer: Literal["auto", "object_store", "broadcast", "ipc", "shm"] = Field(
        "auto", json_schema_extra=NOT_HASHED
    )
    """How published weights go from the learner to the engines: through Ray's object store, by a broadcast (NCCL where
    each has a GPU of its own, gloo on CPUs), or through memory that both open, of a GPU (`ipc`) or of the host (`shm`).
    `auto` takes `ipc` where all engines share the learner's GPU, `broadcast` between GPUs, `shm` between CPUs of one
    host, `object_store` otherwise."""
    weight_delta: Literal["auto", "on", "off"] = Field("auto", json_schema_extra=NOT_HASHED)
    """Whether engines that serve the version before are sent only what changed. Deltas are made on one host's CPU, so
    `auto` sends them through the object store, and by a broadcast between hosts where that turns out slower than they
    are; everything else goes whole, in flat buffers of each rank."""
    transfer_timeout_s: float = Field(60.0, gt=0, json_schema_extra=NOT_HASHED)
    """How long learner and engines wait for each other at each bucket of a broadcast or of `ipc`. A transport
    that broke is left for the object store."""
    canary_tolerance: float = Field(0.05, gt=0)
    """Nats by which learner and engines may differ on a fixed prompt after a switch of weights, in the median of its
    tokens; ten times as many where engines record routes for it, on GPUs in bf16. Beyond, the run ends."""
    restarts: int = Field(2, ge=0)
    """How often a run may start its actors again, from its last training state, after one died or hung."""
    object_store_mb: int = Field(512, ge=100)
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()

    @property
    def sends_deltas(self) -> bool:
        """Whether it is known before the first version that they are sent."""
        by_store = self.weight_delta == "auto" and self.weight_transfer == "object_store"
        return self.rollout.backend == "k3rl" and (self.weight_delta == "on" or by_store)

    @property
    def shares_gpu(self) -> bool:
        """Whether an engine may be on the learner's GPU."""
        on_gpus = self.learner_device == self.rollout_device == "cuda" and self.rollout.backend == "k3rl"
        return on_gpus and self.learner_gpus < 1.0

    @model_validator(mode="after")
    def _a_server_for_each_actor(self) -> ClusterConfig:
        urls = self.rollout.url
        if self.rollout.backend == "vllm" and (len(urls) != self.rollout_actors or len(set(urls)) != len(urls)):
            raise ValueError(
                f"rollout.url names {len(set(urls))} servers for {self.rollout_actors} rollout actors; with the vllm "
                "backend give each actor a server of its own, or set rollout_actors to their number"
            )
        if self.rollout.backend == "k3rl" and urls:
            raise ValueError("rollout.url is of the vllm backend; set rollout.backend to vllm, or leave the url out")
        return self

    @model_validator(mode="after")
    def _the_transport_can_work(self) -> ClusterConfig:
        transport = self.weight_transfer
        if transport in ("broadcast", "ipc", "shm") and self.rollout.backend == "vllm":
            raise ValueError(
                f"weight_transfer is {transport!r}, and vLLM servers are given weights by their actors; take 'auto' or "
                "'object_store'"
            )
        if transport == "ipc" and "cpu" in (self.learner_device, self.rollout_device):
            raise ValueError(
                "weight_transfer is 'ipc', which is GPU memory that learner and engines share; set learner_device and "
                "rollout_device to cuda, or take 'auto'"
            )
        if self.learner_gpus < 1.0 and self.learner_actors > 1:
            raise ValueError(
                f"learner_gpus is {self.learner_gpus:g} with {self.learner_actors} learner_actors, and NCCL joins no "
                "two ranks on one GPU; set learner_gpus to 1, or learner_actors to 1"
            )
        return self


def most_rows(cluster: ClusterConfig) -> int:
    """Sequences that one engine decodes at a time, at most, when nobody says how many: a GPU computes a step of many
    rows in little more time than one of few."""
    return _GPU_ROWS if cluster.rollout.backend == "k3rl" and cluster.rollout_device == "cuda" else LEAST_ROWS


@contextmanager
def _own_signals() -> Iterator[None]:
    """Gives SIGTERM and SIGINT back to who handled them before: Ray's handler would end a run with its step unsaved.

    Where nobody did, Ray's stays, which ends its daemons.
    """
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, handler)


@contextmanager
def start_ray(config: ClusterConfig) -> Iterator[None]:
    """Ray for the length of the block. A Ray that was running before is joined and left running.

    A local Ray is started with a token of its own unless one is set, because its control port listens on every
    interface. Inside a Ray job (RAY_ADDRESS set, or `address`), the job's cluster is joined.
    """
    import ray  # here, so that who only reads configurations does without

    joins = config.address is not None or bool(os.environ.get("RAY_ADDRESS"))
    if not joins:
        os.environ["OMP_NUM_THREADS"] = str(max(config.learner_threads, config.rollout_threads))
    quiet: dict[str, Any] = {"namespace": "k3rl", "log_to_driver": False, "logging_level": logging.ERROR}
    with _own_signals():
        if joins:
            ray.init(address=config.address or "auto", **quiet)
        else:
            ray.init(
                address="local",  # never a cluster that happens to run on this machine
                num_cpus=config.cpus or max(2, os.cpu_count() or 2),
                include_dashboard=False,
                object_store_memory=config.object_store_mb * 2**20,
                **quiet,
            )
    try:
        yield
    finally:
        ray.shutdown()
