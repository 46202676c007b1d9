"""DeepSpeed as a learner backend: ZeRO-1, 2 or 3 data parallelism with AdamW (docs/parallel.md).

The loss, the balancing of experts, QK-clip, what a parameter holds after a step, and the files are those of the native
`Trainer`; DeepSpeed owns the masters, the moments and the gradients' way over the ranks. ZeRO lays parameters end to
end and cuts them anywhere, so nothing that needs whole matrices can run on its side of the fence.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from k3rl.config import Config, ConfigError
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import LossOutput
from k3rl.model import K3ForCausalLM
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.mla import GatedMLA
from k3rl.model.moe import MLP, LatentMoE
from k3rl.numerics import project, stored_dtype
from k3rl.optim import OptimizerStateError, classify
from k3rl.optim.qk_clip import clip_heads_
from k3rl.parallel.agree import flat
from k3rl.parallel.balance import deal
from k3rl.parallel.extensions import prepare
from k3rl.parallel.mesh import Mesh
from k3rl.parallel.nonfinite import NonFiniteGradients, NonFiniteStep, bad_loss, listed
from k3rl.parallel.statistics import balance, balance_due
from k3rl.parallel.trainer import Loss, Trainer, TrainerConfig, _keep
from k3rl.parallel.world import PeerFailed
from k3rl.run.metrics import Accumulator

_BETAS, _EPS = (0.9, 0.95), 1e-8  # of the native AdamW
_NO_MODULE = -1
_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


class DeepSpeedConfig(Config):
    """What ZeRO shards and where it lies."""

    stage: Literal[1, 2, 3] = 2
    """1 shards masters and moments over the ranks, 2 gradients too, 3 also the parameters between their uses."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """What the model computes in. Masters and moments are float32 either way."""
    offload_optimizer: bool = False
    """Masters and moments in host memory, updated there."""
    build_timeout_s: float = Field(300.0, gt=0)
    """How long the C++ build at first use may take."""


class LearnerConfig(Config):
    """Which program computes optimizer steps."""

    backend: Literal["native", "deepspeed"] = "native"
    """k3rl's own trainer, or DeepSpeed ZeRO (AdamW only, for models whose experts fit one rank)."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()


def check_backend(learner: LearnerConfig, trainer: TrainerConfig) -> None:
    """Refuses what DeepSpeed cannot train. Raises ConfigError."""
    if learner.backend != "deepspeed":
        return
    if trainer.optimizer != "adamw":
        raise ConfigError(
            f"learner.backend is deepspeed and trainer.optimizer is {trainer.optimizer}: ZeRO lays parameters end to "
            "end and cuts them anywhere, so an optimizer that needs whole matrices or heads cannot run on its "
            "shards. Add --trainer.optimizer adamw, or leave the backend native",
            key="trainer.optimizer",
            got=trainer.optimizer,
            wanted="adamw",
        )
    if trainer.lora is not None:
        raise ConfigError(
            "trainer.lora trains matrices beside parameters that stay, which ZeRO does not know of; leave it out, or "
            "leave learner.backend native",
            key="trainer.lora",
        )
    if not trainer.shard_optimizer:
        raise ConfigError(
            "trainer.shard_optimizer is false and every ZeRO stage shards the optimizer; leave it true, or leave "
            "learner.backend native",
            key="trainer.shard_optimizer",
            got=False,
            wanted="true",
        )
    if trainer.capture == "on":
        raise ConfigError(
            "trainer.capture is on and ZeRO's passes are no program of fixed shapes; set it to auto or off, or leave "
            "learner.backend native",
            key="trainer.capture",
            got="on",
            wanted="auto or off",
        )
    if trainer.exact:
        raise ConfigError(
            "trainer.exact computes with whole parameters outside of the modules that ZeRO gathers; leave it false, or "
            "leave learner.backend native",
            key="trainer.exact",
        )
    if trainer.recompute:
        raise ConfigError(
            "trainer.recompute runs parts of a forward a second time, which ZeRO does not expect; leave it empty, or "
            "leave learner.backend native",
            key="trainer.recompute",
        )
    if trainer.offload_optimizer:
        raise ConfigError(
            "trainer.offload_optimizer is the native trainer's; with learner.backend deepspeed set "
            "--learner.deepspeed.offload-optimizer true instead",
            key="trainer.offload_optimizer",
        )
    if trainer.balance_by == "auxiliary_loss":
        raise ConfigError(
            "balance_by auxiliary_loss is not there with learner.backend deepspeed; use quantile or fixed_step",
            key="trainer.balance_by",
        )
    for axis in ("expert_parallel", "context_parallel"):
        if (degree := getattr(trainer, axis)) > 1:
            raise ConfigError(
                f"learner.backend is deepspeed and trainer.{axis} is {degree}: ZeRO cuts every parameter and gradient "
                "over all ranks alike, which experts of a group or rows of one sequence do not allow. Set it to 1, or "
                "leave the backend native",
                key=f"trainer.{axis}",
                got=degree,
                wanted="1",
            )


def make_trainer(
    model: K3ForCausalLM, config: TrainerConfig, learner: LearnerConfig, mesh: Mesh | None = None
) -> Trainer:
    """The trainer of this rank on the chosen backend."""
    check_backend(learner, config)
    if learner.backend == "native":
        return Trainer(model, config, mesh)
    return DeepSpeedTrainer(model, config, learner.deepspeed, mesh)


class _AdamW(torch.optim.AdamW):
    """torch's AdamW over ZeRO's flat shards. It leaves a step out whose gradient norm over all ranks is not finite."""

    norm_of: Any = None
    refuses = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.refuses and math.isfinite(float(self.norm_of())):
            super().step(closure)

    def begin(self, shards: Iterable[Tensor]) -> None:
        """Moments and step counts from zero before the first step, so that they can be saved and loaded."""
        for shard in shards:
            zeros = torch.zeros_like(shard, memory_format=torch.preserve_format, requires_grad=False)
            self.state[shard] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    @property
    def count(self) -> int:
        return int(next(iter(self.state.values()))["step"])

    def set_count(self, count: int) -> None:
        for state in self.state.values():
            state["step"].fill_(count)


class _Forward(nn.Module):
    """What DeepSpeed takes for the model: any forward pass that ends in a scalar."""

    def __init__(self, model: K3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Any) -> Any:
        return run()


class DeepSpeedTrainer(Trainer):
    """A `Trainer` whose gradients, masters and moments DeepSpeed shards.

    All its methods are collective: ranks run forward passes in lockstep, those with less data on a few padding tokens
    that count nowhere. Unlike natively, an expert that no token of a step reached has a zero gradient rather than none,
    so AdamW decays it. Raises ConfigError for what ZeRO cannot train.
    """

    def __init__(
        self, model: K3ForCausalLM, config: TrainerConfig, zero: DeepSpeedConfig, mesh: Mesh | None = None
    ) -> None:
        check_backend(LearnerConfig(backend="deepspeed"), config)
        if model.config.vision_config is not None:
            raise ConfigError(
                "this model has a vision tower, whose projector some ranks use in a step and others do not; train it "
                "with learner.backend native",
                key="learner.backend",
            )
        self._begin(model, config, mesh)
        self.mesh.world.require_equal(flat("learner.deepspeed", zero.model_dump(mode="json")))
        self.zero = zero
        prepare(zero.build_timeout_s)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._ranks = dist.get_world_size()
        self._biases = {part.layer: part.gate.e_score_correction_bias for part in model.moe_parts()}
        for part in model.moe_parts():
            part.bank.every_gradient = True
            bias = part.gate._parameters.pop("e_score_correction_bias")
            part.gate.__dict__["e_score_correction_bias"] = bias  # moved by balancing in float32: not ZeRO's to shard
        self._names = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._decay = {name: classify(name, value.shape, model.config).decay for name, value in self._names.items()}
        self._shapes = {name: value.shape for name, value in self._names.items()}
        self._reduced = False  # whether ZeRO holds gradients
        self._engine = self._start()
        model.dtype = torch.bfloat16 if zero.dtype == "bf16" else torch.float32
        self.ship()

    def _start(self) -> Any:
        import deepspeed

        rank = dist.get_rank()
        for name, value in (("RANK", rank), ("LOCAL_RANK", 0), ("WORLD_SIZE", self._ranks)):
            os.environ.setdefault(name, str(value))
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        groups = [
            {"params": [p for n, p in self._names.items() if self._decay[n] is decays], "weight_decay": rate}
            for decays, rate in ((True, self.config.weight_decay), (False, 0.0))
        ]
        self._adam = _AdamW(groups, lr=self.config.adamw_lr, betas=_BETAS, eps=_EPS, foreach=False)
        if self.zero.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(self.model, [KimiDeltaAttention, GatedMLA, LatentMoE, MLP])
        engine, *_ = deepspeed.initialize(model=_Forward(self.model), optimizer=self._adam, config=self._settings())
        if self.zero.stage == 3:  # its module never runs: logprobs are computed without the table of logits
            deepspeed.zero.register_external_parameter(engine.module, self.model.language_model.lm_head.weight)
        zero = engine.optimizer
        self._adam.norm_of = lambda: zero._global_grad_norm
        if self.zero.stage == 3:
            self._adam.begin(zero.fp32_partitioned_groups_flat)
        else:
            self._adam.begin(zero.single_partition_of_fp32_groups)
            zero._lazy_init_hp_params_optimizer_state()
        return engine

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's own configuration."""
        elements = sum(value.numel() for value in self._names.values())
        zero: dict[str, Any] = {
            "stage": self.zero.stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(elements, 50_000_000),
            "allgather_bucket_size": min(elements + elements % 2, 50_000_000),  # it must be even
            # Vectors are read outside of the modules that ZeRO gathers; they stay whole on every rank.
            "stage3_param_persistence_threshold": 4 * self.model.config.hidden_size,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        }
        if self.zero.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": self.config.grad_clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.zero.dtype == "bf16"},
            "communication_data_type": "fp32",
            "steps_per_print": 2**31,
        }

    # ------------------------------------------------------------------------------------------------ forward

    def _forward(self, run: Callable[[], Tensor]) -> Tensor:
        """`run()` with ZeRO's hooks around it.

        Vectors are read by modules that do not own them, where no hook looks. While ZeRO-3 learns the order of modules,
        it lets go of parameters that are to stay whole unless one is in use: so they are, by a module that is not
        there.
        """
        if self.zero.stage == 3:
            parameters: list[Any] = list(self._names.values())  # to which ZeRO has added what it needs
            small = [value for value in parameters if value.ds_persist]
            if away := [value for value in small if value.ds_status.name != "AVAILABLE"]:
                away[0].all_gather(away)
            for value in small:
                value.ds_active_sub_modules.add(_NO_MODULE)
        return self._engine(run)

    def _passes(self, micros: list[TrainBatch], most: int) -> Iterator[tuple[TrainBatch, bool]]:
        """This rank's micro-batches, then padding until the busiest rank is done; (micro-batch, whether it counts)."""
        padding = _padding()
        for number in range(most):
            yield (micros[number], True) if number < len(micros) else (padding, False)

    def _lockstep(self, batch: TrainBatch | None) -> Iterator[tuple[TrainBatch, bool]]:
        """`_passes` of a batch that is only scored."""
        micros: list[TrainBatch] = []
        with self.mesh.world.together("cutting a batch"):  # the other ranks wait here and have to hear of an error
            micros = self._cut(batch)
        most = torch.tensor([len(micros)], device=self.model.device)
        self.mesh.world.maximum(most)
        return self._passes(micros, int(most))

    def _backward(
        self, micros: list[TrainBatch], most: int, loss: Loss, temperature: float, clips: bool
    ) -> Accumulator:
        metrics, failure = Accumulator(), None
        try:
            for micro, counts in self._passes(micros, most):
                if counts:
                    self.statistics.count(micro, self.share(micro), self.config.balance, metrics)
                self.model.observer = self.statistics if counts else None
                seen: list[LossOutput] = []

                def run(micro: TrainBatch = micro, seen: list[LossOutput] = seen) -> Tensor:
                    seen.append(loss(self.target_inputs(micro, temperature)))
                    return seen[0].loss

                total = self._forward(run)
                finite = bool(torch.isfinite(total))
                if not finite and counts and failure is None:
                    origin = f"It is that of the micro-batch of {listed(micro.sequence_ids)}"
                    failure = bad_loss(self.steps, total.item(), origin)
                # A rank that stopped here would leave the others in a collective: it goes on with nothing instead.
                share = total * self._ranks if finite and counts else total.nan_to_num(0, 0, 0) * 0
                with self._among_ranks("a backward pass with ZeRO"):
                    self._engine.backward(share, scale_wrt_gas=False)
                self._reduced = True
                if counts:
                    _keep(metrics, seen[0])
        except PeerFailed:
            raise
        except Exception as error:  # the others wait inside ZeRO's collectives, where nothing but this can reach them
            self.mesh.world.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.model.observer = None
        self._raise_together(failure)
        return metrics

    def _step(
        self, batch: TrainBatch | None, loss: Loss, lr_scale: float, temperature: float, last_of_batch: bool
    ) -> Accumulator:
        started = time.perf_counter()
        settings = {"lr_scale": lr_scale, "last_of_batch": last_of_batch}
        metrics, max_logits = self.gradients(batch, loss, temperature=temperature, settings=settings)
        try:
            norm, clipped = self._update(max_logits, lr_scale)
            if due := balance_due(self.config, last_of_batch):
                self.balancer.all_reduce(self.mesh.world.sum)
            balance(self.model, self.balancer, self.config, metrics, due=due)
        except (PeerFailed, NonFiniteStep):  # all ranks know
            self.balancer.clear()
            raise
        except Exception as error:
            self.mesh.world.leave(f"{type(error).__name__}: {error}")
            raise
        self.steps += 1
        metrics.add("optim/grad_norm", norm)
        metrics.add("optim/lr", self.config.adamw_lr * lr_scale)
        metrics.add("optim/qk_clipped_heads", clipped)
        for largest in max_logits.values():
            metrics.maximum("attention/logit/max", float(largest.max()))
        metrics.add("perf/train_tokens", batch.tokens if batch is not None else 0)
        for part, held in self.memory().items():
            metrics.maximum(f"memory/{part}", held)
        metrics.add("time/train_step", time.perf_counter() - started)
        return metrics

    def memory(self) -> dict[str, int]:
        """As natively, without the gradients: they are in ZeRO's buffers for some of a step only."""
        held = [getattr(value, "ds_tensor", value).nbytes for value in self.model.parameters()]
        states = () if self.zero.offload_optimizer else self._adam.state
        found = {"weights": sum(held), "optimizer": sum(3 * shard.nbytes for shard in states)}
        if self.model.device.type == "cuda":
            found["peak"] = torch.cuda.max_memory_allocated(self.model.device)
            torch.cuda.reset_peak_memory_stats(self.model.device)
        return found

    def _update(self, max_logits: dict[int, Tensor], lr_scale: float) -> tuple[float, int]:
        """ZeRO's step and QK-clip; the gradient norm and how many heads were clipped."""
        for settings in self._adam.param_groups:
            settings["lr"] = self.config.adamw_lr * lr_scale
        with self._among_ranks("a step of ZeRO"):
            self._engine.step()
        self._reduced = False
        norm = float(self._engine.optimizer._global_grad_norm)
        clipped = self._clip_heads(max_logits) if math.isfinite(norm) else 0
        self.ship()
        if not math.isfinite(norm):
            raise NonFiniteGradients(
                f"the gradient of step {self.steps} has the norm {norm}; wanted a finite number. ZeRO has reduced it "
                "already, so the parameter it comes from is not known; train with learner.backend native to learn it. "
                "Masters and moments are unchanged"
            )
        return norm, clipped

    def _reduce_gradients(self) -> None:
        """ZeRO has done it in the backward."""

    @contextmanager
    def _among_ranks(self, what: str) -> Iterator[None]:
        """Around ZeRO's own collectives: a rank that is gone is named."""
        if self._ranks == 1:
            yield
            return
        with self.mesh.world.during(what):
            yield

    def _drop_gradients(self) -> None:
        """Forgets what ZeRO has reduced so far: a step that leaves masters and moments as they are.

        A step whose norm was not finite has done so itself, and ZeRO fails in one without gradients.
        """
        if not self._reduced:
            return
        self._reduced = False
        self._adam.refuses = True
        try:
            self._engine.step()
        finally:
            self._adam.refuses = False
        self.ship()

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch | None, temperature: float = 1.0) -> np.ndarray:
        """As `Trainer.logprobs`; all ranks call it, with None where there is nothing to score."""
        out = np.zeros(0 if batch is None else batch.input_ids.size, np.float32)
        starts: dict[str, int] = {}
        if batch is not None:
            starts = {sid: int(start) for sid, start in zip(batch.sequence_ids, batch.cu_seqlens[:-1], strict=True)}
        for micro, counts in self._lockstep(batch):

            def run(micro: TrainBatch = micro) -> Tensor:
                return self.target_inputs(micro, temperature).logprobs

            values = self._forward(run)
            if counts:
                positions = np.flatnonzero(micro.loss_mask)
                owner = np.searchsorted(micro.cu_seqlens, positions, side="right") - 1
                origin = np.array([starts[sid] for sid in micro.sequence_ids], np.int64)
                out[origin[owner] + positions - micro.cu_seqlens[owner]] = values.float().cpu().numpy()
        return out

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch | None, loss: Loss) -> Accumulator:
        """As `Trainer.evaluate`; all ranks call it, with None where there is nothing to score."""
        metrics = Accumulator()
        for micro, counts in self._lockstep(batch):
            seen: list[LossOutput] = []

            def run(micro: TrainBatch = micro, seen: list[LossOutput] = seen) -> Tensor:
                seen.append(loss(self.target_inputs(micro)))
                return seen[0].loss

            self._forward(run)
            if counts:
                _keep(metrics, seen[0])
        return metrics

    # ------------------------------------------------------------------------------------- parameters and masters

    @contextmanager
    def _gathered(self, names: list[str], *, write: bool = False) -> Iterator[None]:
        """These parameters whole on every rank; what rank 0 wrote into them stays, with `write`."""
        import deepspeed

        if self.zero.stage < 3:
            yield
            return
        parameters = [self._names[name] for name in names]
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield

    @torch.no_grad()
    def ship(self) -> None:
        """Every parameter becomes what a checkpoint stores of it; the masters stay."""
        quantization = self.model.config.quantization
        for name, parameter in self._names.items():
            stored = stored_dtype(name, quantization.weights)
            if stored == "fp32" or (stored == "bf16" and parameter.dtype == torch.bfloat16):
                continue
            with self._gathered([name], write=True):
                parameter.data.copy_(project(parameter.data, stored, quantization.scale_rule))

    @contextmanager
    def whole(self) -> Iterator[K3ForCausalLM]:
        """The model with all parameters in place and under their official names, to save or publish it."""
        with self._gathered(list(self._names)):
            for part in self.model.moe_parts():
                part.gate._parameters["e_score_correction_bias"] = part.gate.__dict__.pop("e_score_correction_bias")
            try:
                yield self.model
            finally:
                for part in self.model.moe_parts():
                    part.gate.__dict__["e_score_correction_bias"] = part.gate._parameters.pop("e_score_correction_bias")

    def _full(self, name: str, moment: str | None = None) -> Tensor:
        """float32, the parameter's shape: its master, or one of its moments, from the ranks that hold pieces."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self._names[name]
        value = (
            safe_get_full_fp32_param(parameter) if moment is None else safe_get_full_optimizer_state(parameter, moment)
        )
        return value.detach().reshape(self._shapes[name])

    def _set_full(self, name: str, value: Tensor, moment: str | None = None) -> None:
        from deepspeed import utils

        parameter: Any = self._names[name]  # to which ZeRO has added what it needs
        value = value.to(torch.float32).contiguous()
        where = "full"
        if self.zero.stage == 3:  # its own way of cutting `value` knows of no padding, which three ranks need
            where, size, rank = "local", parameter.ds_tensor.numel(), dist.get_rank()
            padded = nn.functional.pad(value.flatten(), (0, size * self._ranks - value.numel()))
            value = padded[rank * size : (rank + 1) * size]
        if moment is None:
            getattr(utils, f"safe_set_{where}_fp32_param")(parameter, value)
        else:
            getattr(utils, f"safe_set_{where}_optimizer_state")(parameter, value, moment)

    @torch.no_grad()
    def _clip_heads(self, max_logits: dict[int, Tensor]) -> int:
        """QK-clip on the masters; the parameters follow."""
        clipped = 0
        for layer, maximum in max_logits.items():
            if bool((maximum <= self.config.qk_clip).all()):
                continue
            names = [
                f"language_model.model.layers.{layer}.self_attn.{kind}.weight" for kind in ("q_b_proj", "kv_b_proj")
            ]
            masters = [self._full(name).clone() for name in names]
            clipped += clip_heads_(masters[0], masters[1], maximum, self.model.config, self.config.qk_clip)
            self._write(dict(zip(names, masters, strict=True)))
        return clipped

    def _write(self, masters: dict[str, Tensor]) -> None:
        """New masters, and their values in the parameters (to be shipped)."""
        for name, value in masters.items():
            self._set_full(name, value)
            with self._gathered([name], write=True):
                self._names[name].data.copy_(value)

    # ---------------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def owned_state(self) -> dict[str, Tensor]:
        """This rank's share of the native AdamW's state: names, shapes and keys depend on neither backend nor ranks."""
        names = list(self._names)
        mine = {names[i] for i in deal([self._shapes[name].numel() for name in names], self._ranks)[dist.get_rank()]}
        state: dict[str, Tensor] = {}
        for name in names:
            found = {"master": self._full(name)} | {key: self._full(name, own) for key, own in _MOMENTS.items()}
            if name in mine:
                state |= {f"optimizer.{name}/{key}": value.clone() for key, value in found.items()}
                state[f"optimizer.{name}/steps"] = torch.tensor(self._adam.count)
        if dist.get_rank() == 0:
            state |= {f"router_bias.{layer}": bias.detach().clone() for layer, bias in self.model.router_biases()}
            state["steps"] = torch.tensor(self.steps, dtype=torch.int64)
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Takes the whole state of AdamW, from this backend or the native one, written by any number of ranks."""
        with self.mesh.world.together("loading a training state"):
            for name, shape in self._shapes.items():
                for key in ("master", *_MOMENTS):
                    found = state.get(f"optimizer.{name}/{key}")
                    if found is None or found.shape != shape:
                        got = (
                            "is missing" if found is None else f"has shape {tuple(found.shape)}, wanted {tuple(shape)}"
                        )
                        raise OptimizerStateError(f"optimizer state: {name}/{key} {got}")
        for name in self._shapes:
            self._write({name: state[f"optimizer.{name}/master"]})
            for key, own in _MOMENTS.items():
                self._set_full(name, state[f"optimizer.{name}/{key}"], own)
        self._adam.set_count(max(int(state[f"optimizer.{name}/steps"]) for name in self._shapes))
        for layer, bias in self.model.router_biases():
            bias.copy_(state[f"router_bias.{layer}"])
        self.steps = int(state["steps"])
        self.ship()


def _padding() -> TrainBatch:
    """Two tokens for a rank that has nothing to do in this pass."""
    zeros = np.zeros(2, np.float32)
    ids, mask = np.zeros(2, np.int64), np.array([False, True])
    return TrainBatch.pack([TrainSequence("padding", ids, mask, zeros, zeros, teacher_logprobs=zeros)])
