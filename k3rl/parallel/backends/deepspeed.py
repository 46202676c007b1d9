"""DeepSpeed as a learner backend: ZeRO-1, 2 or 3 data parallelism with AdamW (docs/parallel.md).

The loss, the balancing of experts, QK-clip, what a parameter holds after a step, and the files are those of the native
backend; DeepSpeed owns the masters, the moments and the gradients' way over the ranks. ZeRO lays parameters end to
end and cuts them anywhere, so nothing that needs whole matrices can run on its side of the fence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3rl.data import TrainBatch, TrainSequence
from k3rl.losses import LossOutput
from k3rl.model import MLP, GatedMLA, K3ForCausalLM, KimiDeltaAttention, LatentMoE
from k3rl.numerics import project
from k3rl.optim import ADAMW_BETAS, ADAMW_EPS, OptimizerStateError, adamw_scale, classify, clip_heads_
from k3rl.parallel.agree import flat, raise_together
from k3rl.parallel.backends.base import OPTIMIZER, Update
from k3rl.parallel.backends.config import DeepSpeedConfig
from k3rl.parallel.backends.extensions import prepare
from k3rl.parallel.balance import balanced_shares
from k3rl.parallel.forward_backward import Loss, StepInputs, add_loss
from k3rl.parallel.liveness import PeerFailed
from k3rl.parallel.model_on_mesh import ModelOnMesh
from k3rl.parallel.nonfinite import NonFiniteGradients, bad_loss, listed
from k3rl.parallel.statistics import Statistics
from k3rl.run import Accumulator

_NO_MODULE = -1
_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


class _AdamW(torch.optim.AdamW):
    """torch's AdamW over ZeRO's flat shards. It skips a step whose gradient norm over all ranks is not finite."""

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


class _AnyForward(nn.Module):
    """What DeepSpeed takes for the model: any forward pass that ends in a scalar."""

    def __init__(self, model: K3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Any) -> Any:
        return run()


class DeepSpeedBackend:
    """Gradients, masters and moments that DeepSpeed shards (a `Backend`).

    All its methods are collective: ranks run forward passes in lockstep, those with less data on a few padding tokens
    that count nowhere. Unlike natively, an expert that no token of a step reached has a zero gradient rather than none,
    so AdamW decays it. Expects what `check_backend` lets through.
    """

    lockstep = True
    graph_bytes = 0

    def __init__(self, on_mesh: ModelOnMesh, statistics: Statistics, zero: DeepSpeedConfig) -> None:
        model = on_mesh.model
        self._on_mesh, self._statistics = on_mesh, statistics
        self._model, self._config, self._world = model, on_mesh.config, on_mesh.mesh.world
        self._world.require_equal(flat("learner.deepspeed", zero.model_dump(mode="json")))
        self._zero = zero
        prepare(zero.build_timeout_s)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._ranks = dist.get_world_size()
        for part in model.moe_parts():
            part.bank.every_gradient = True
            bias = part.gate._parameters.pop("e_score_correction_bias")
            part.gate.__dict__["e_score_correction_bias"] = bias  # moved by balancing in float32: not ZeRO's to shard
        self._names = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._decay = {name: classify(name, value.shape, model.config).decay for name, value in self._names.items()}
        self._scale = {
            name: adamw_scale(name, value.shape, self._config.scaling) for name, value in self._names.items()
        }
        self._shapes = {name: value.shape for name, value in self._names.items()}
        self._number = 0  # of the step that is under way
        self._reduced = False  # whether ZeRO holds gradients
        self._engine = self._start()
        model.dtype = torch.bfloat16 if zero.dtype == "bf16" else torch.float32
        self._project()

    def _start(self) -> Any:
        import deepspeed

        rank = dist.get_rank()
        for name, value in (("RANK", rank), ("LOCAL_RANK", 0), ("WORLD_SIZE", self._ranks)):
            os.environ.setdefault(name, str(value))
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        groups = []
        for decays, scale in dict.fromkeys((self._decay[name], self._scale[name]) for name in self._names):
            members = [p for n, p in self._names.items() if (self._decay[n], self._scale[n]) == (decays, scale)]
            rate = self._config.weight_decay / scale if decays else 0.0  # torch multiplies it by the scaled rate
            groups.append({"params": members, "weight_decay": rate, "scale": scale})
        self._adam = _AdamW(groups, lr=self._config.adamw_lr, betas=ADAMW_BETAS, eps=ADAMW_EPS, foreach=False)
        if self._zero.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(self._model, [KimiDeltaAttention, GatedMLA, LatentMoE, MLP])
        engine, *_ = deepspeed.initialize(model=_AnyForward(self._model), optimizer=self._adam, config=self._settings())
        if self._zero.stage == 3:  # its module never runs: logprobs are computed without the table of logits
            deepspeed.zero.register_external_parameter(engine.module, self._model.language_model.lm_head.weight)
        zero = engine.optimizer
        self._adam.norm_of = lambda: zero._global_grad_norm
        if self._zero.stage == 3:
            self._adam.begin(zero.fp32_partitioned_groups_flat)
        else:
            self._adam.begin(zero.single_partition_of_fp32_groups)
            zero._lazy_init_hp_params_optimizer_state()
        return engine

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's own configuration."""
        elements = sum(value.numel() for value in self._names.values())
        zero: dict[str, Any] = {
            "stage": self._zero.stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(elements, 50_000_000),
            "allgather_bucket_size": min(elements + elements % 2, 50_000_000),  # it must be even
            # Vectors are read outside of the modules that ZeRO gathers; they stay whole on every rank.
            "stage3_param_persistence_threshold": 4 * self._model.config.hidden_size,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        }
        if self._zero.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": self._config.grad_clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self._zero.dtype == "bf16"},
            "communication_data_type": "fp32",
            "steps_per_print": 2**31,
        }

    # -- forward passes -------------------------------------------------------------------------------------------

    def forwards(self, batch: TrainBatch | None) -> Iterator[tuple[TrainBatch, bool]]:
        micros: list[TrainBatch] = []
        with self._world.together("cutting a batch"):  # the other ranks wait here and have to hear of an error
            micros = self._on_mesh.cut(batch)
        most = torch.tensor([len(micros)], device=self._model.device)
        self._world.maximum(most)
        return _padded(micros, int(most))

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """`run()` with ZeRO's hooks around it.

        Vectors are read by modules that do not own them, where no hook looks. While ZeRO-3 learns the order of modules,
        it lets go of parameters that are to stay whole unless one is in use: so they are, by a module that is not
        there.
        """
        if self._zero.stage == 3:
            parameters: list[Any] = list(self._names.values())  # to which ZeRO has added what it needs
            small = [value for value in parameters if value.ds_persist]
            if away := [value for value in small if value.ds_status.name != "AVAILABLE"]:
                away[0].all_gather(away)
            for value in small:
                value.ds_active_sub_modules.add(_NO_MODULE)
        found: Tensor = self._engine(run)
        return found

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """ZeRO keeps no gradients from one step to the next."""

    def warm_up(self, micro: TrainBatch, loss: Loss, temperature: float) -> None:
        """Its steps are not captured."""

    def overlap_key(self, micros: list[TrainBatch], loss: Loss, temperature: float) -> int:
        return 0

    def take_notes(self) -> list[str]:
        return []

    def accumulate(self, step: StepInputs) -> Accumulator:
        """ZeRO reduces gradients as each backward makes them."""
        metrics, failure = Accumulator(), None
        try:
            for micro, counts in _padded(step.micros, step.forwards):
                if counts:
                    share = self._on_mesh.share(micro)
                    self._statistics.count(micro, share, self._config.balance, metrics)
                self._model.observer = self._statistics if counts else None
                found: list[LossOutput] = []

                def run(micro: TrainBatch = micro, found: list[LossOutput] = found) -> Tensor:
                    found.append(step.loss(self._on_mesh.target_inputs(micro, step.temperature)))
                    return found[0].loss

                total = self.forward(run)
                finite = bool(torch.isfinite(total))
                if not finite and counts and failure is None:
                    origin = f"It is that of the micro-batch of {listed(micro.sequence_ids)}"
                    failure = bad_loss(step.number, total.item(), origin)
                # A rank that stopped here would leave the others in a collective: it goes on with nothing instead.
                weighed = total * self._ranks if finite and counts else total.nan_to_num(0, 0, 0) * 0
                with self._among_ranks("a backward pass with ZeRO"):
                    self._engine.backward(weighed, scale_wrt_gas=False)
                self._reduced = True
                if counts:
                    add_loss(metrics, found[0])
        except PeerFailed:
            raise
        except Exception as error:  # the others wait inside ZeRO's collectives, where nothing but this can reach them
            self._world.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._model.observer = None
        raise_together(self._world, failure, step.number)
        return metrics

    def reduce_gradients(self) -> None:
        """ZeRO has done it in the backward."""

    def clip_gradients(self, step: StepInputs) -> None:
        """ZeRO clips in its step."""
        self._number = step.number

    def apply(self, max_logits: dict[int, Tensor], lr_scale: float) -> Update:
        lr = self._config.adamw_lr * lr_scale
        for settings in self._adam.param_groups:
            settings["lr"] = lr * settings["scale"]
        with self._among_ranks("a step of ZeRO"):
            self._engine.step()
        self._reduced = False
        norm = float(self._engine.optimizer._global_grad_norm)
        clipped = self._clip_heads(max_logits) if math.isfinite(norm) else 0
        self._project()
        if not math.isfinite(norm):
            raise NonFiniteGradients(
                f"the gradient of step {self._number} has the norm {norm}; wanted a finite number. ZeRO has reduced it "
                "already, so the parameter it comes from is not known; train with learner.backend native to learn it. "
                "Masters and moments are unchanged"
            )
        return Update(norm, lr, clipped)

    def discard_gradients(self) -> None:
        """A step that leaves masters and moments as they are.

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
        self._project()

    def memory(self) -> dict[str, int]:
        """Without the gradients: they are in ZeRO's buffers for some of a step only."""
        held = [getattr(value, "ds_tensor", value).nbytes for value in self._model.parameters()]
        states = () if self._zero.offload_optimizer else self._adam.state
        return {"weights": sum(held), "optimizer": sum(3 * shard.nbytes for shard in states)}

    @contextmanager
    def _among_ranks(self, what: str) -> Iterator[None]:
        """Around ZeRO's own collectives: a rank that is gone is named."""
        if self._ranks == 1:
            yield
            return
        with self._world.during(what):
            yield

    # -- parameters and masters -----------------------------------------------------------------------------------

    @contextmanager
    def _gathered(self, names: list[str], *, write: bool = False) -> Iterator[None]:
        """These parameters whole on every rank; what rank 0 wrote into them stays, with `write`."""
        import deepspeed

        if self._zero.stage < 3:
            yield
            return
        parameters = [self._names[name] for name in names]
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield

    @torch.no_grad()
    def _project(self) -> None:
        """Every parameter becomes what a checkpoint stores of it; the masters stay."""
        quantization = self._model.config.quantization
        for name, parameter in self._names.items():
            stored = self._model.config.stored(name)
            if stored == "fp32" or (stored == "bf16" and parameter.dtype == torch.bfloat16):
                continue
            with self._gathered([name], write=True):
                parameter.data.copy_(project(parameter.data, stored, quantization.scale_rule))

    @contextmanager
    def whole(self) -> Iterator[None]:
        with self._gathered(list(self._names)):
            for part in self._model.moe_parts():
                part.gate._parameters["e_score_correction_bias"] = part.gate.__dict__.pop("e_score_correction_bias")
            try:
                yield
            finally:
                for part in self._model.moe_parts():
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
        if self._zero.stage == 3:  # its own way of cutting `value` knows of no padding, which three ranks need
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
            if bool((maximum <= self._config.qk_clip).all()):
                continue
            config = self._model.config
            kinds = ("q_proj" if config.q_lora_rank is None else "q_b_proj", "kv_b_proj")
            names = [f"{config.prefix}model.layers.{layer}.self_attn.{kind}.weight" for kind in kinds]
            masters = [self._full(name).clone() for name in names]
            clipped += clip_heads_(masters[0], masters[1], maximum, config, self._config.qk_clip)
            self._write(dict(zip(names, masters, strict=True)))
        return clipped

    def _write(self, masters: dict[str, Tensor]) -> None:
        """New masters, and their values in the parameters, to be projected."""
        for name, value in masters.items():
            self._set_full(name, value)
            with self._gathered([name], write=True):
                self._names[name].data.copy_(value)

    # -- state ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's share of the native AdamW's state: names, shapes and keys depend on neither backend nor ranks."""
        names = list(self._names)
        shares = balanced_shares([self._shapes[name].numel() for name in names], self._ranks)
        mine = {names[i] for i in shares[dist.get_rank()]}
        state: dict[str, Tensor] = {}
        for name in names:
            found = {"master": self._full(name)} | {key: self._full(name, own) for key, own in _MOMENTS.items()}
            if name in mine:
                state |= {f"{OPTIMIZER}{name}/{key}": value.to("cpu", copy=True) for key, value in found.items()}
                state[f"{OPTIMIZER}{name}/steps"] = torch.tensor(self._adam.count)
        return state

    def load_owned(self, state: Mapping[str, Tensor]) -> None:
        """Looks whether the state is that of AdamW for these parameters; every rank needs all of it."""
        for name, shape in self._shapes.items():
            for key in ("master", *_MOMENTS):
                found = state.get(f"{OPTIMIZER}{name}/{key}")
                if found is None or found.shape != shape:
                    got = "is missing" if found is None else f"has shape {tuple(found.shape)}, wanted {tuple(shape)}"
                    raise OptimizerStateError(f"optimizer state: {name}/{key} {got}")

    @torch.no_grad()
    def load_shared(self, state: Mapping[str, Tensor]) -> None:
        for name in self._shapes:
            self._write({name: state[f"{OPTIMIZER}{name}/master"]})
            for key, own in _MOMENTS.items():
                self._set_full(name, state[f"{OPTIMIZER}{name}/{key}"], own)
        self._adam.set_count(max(int(state[f"{OPTIMIZER}{name}/steps"]) for name in self._shapes))
        self._project()


def _padded(micros: list[TrainBatch], forwards: int) -> Iterator[tuple[TrainBatch, bool]]:
    """These micro-batches, then padding until so many forwards are done; (micro-batch, whether it counts)."""
    padding = _padding()
    for number in range(forwards):
        yield (micros[number], True) if number < len(micros) else (padding, False)


def _padding() -> TrainBatch:
    """Two tokens for a rank that has nothing to do in this pass."""
    zeros = np.zeros(2, np.float32)
    ids, mask = np.zeros(2, np.int64), np.array([False, True])
    return TrainBatch.pack([TrainSequence("padding", ids, mask, zeros, zeros, teacher_logprobs=zeros)])
