"""LoRA: small trained matrices beside frozen ones, for attention, MLPs, shared experts and every routed expert.

An adapter belongs to no model: `attach` puts it beside the matrices of one, `detach` takes it away, and the model's own
parameters are never written. Its values are bf16 values, as those of the projections it stands beside, so learner,
engine and file compute with the same numbers.

Names are those of the official layout, with `.lora_A.weight` and `.lora_B.weight` in the place of `.weight`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from k3rl.config import Config, ConfigError, K3Error
from k3rl.model.joined import Weight
from k3rl.model.low_rank import NO_PAIRS, BankAdapter, BankSide, GroupedLowRank, LowRank
from k3rl.numerics import project

if TYPE_CHECKING:
    from k3rl.model.decoder import K3ForCausalLM

Target = Literal[
    "q_proj", "k_proj", "v_proj", "g_proj", "g_a_proj", "g_b_proj", "o_proj", "f_a_proj", "f_b_proj", "b_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "down_proj",
    "w1", "w2", "w3",
]  # fmt: skip
DEFAULT_TARGETS: tuple[Target, ...] = (
    "q_proj", "k_proj", "v_proj", "g_proj", "g_a_proj", "g_b_proj", "o_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3",
)  # fmt: skip
_MODULE = re.compile(
    r"(?:language_model\.)?model\.layers\.(?P<layer>\d+)\."
    r"(?:self_attn|mlp|block_sparse_moe\.shared_experts|block_sparse_moe\.experts\.(?P<expert>\d+))\.(?P<leaf>\w+)"
)


class AdapterError(K3Error, ValueError):
    """An adapter and a model that do not fit together; the message names the first difference."""


class LoraConfig(Config):
    """Which matrices get an adapter, and how large it is."""

    rank: int = Field(32, ge=1)
    alpha: float = Field(64.0, gt=0)
    """An adapter adds alpha / rank times its product."""
    targets: tuple[Target, ...] = DEFAULT_TARGETS
    """Last names of the adapted matrices. q, k, v, g, g_a, g_b, o, f_a, f_b, b of KDA, the rest of attention of MLA;
    gate, up and down of shared experts and dense layers; w1, w3 (gate, up) and w2 (down) of each routed expert."""
    seed: int = 0
    """Draws the A matrices; B starts at zero, so that a fresh adapter changes nothing."""

    @field_validator("targets")
    @classmethod
    def _named_once(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if not targets or len(set(targets)) != len(targets):
            raise ValueError("each target once, and at least one")
        return tuple(name for name in get_args(Target) if name in targets)  # files have them in any order

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter:
    """The pairs of one model's matrices: A [rank, in] uniform up to 1 / sqrt(in) from the seed, B [out, rank] zero.

    A model with a run of experts has the pairs of those only; what an expert gets does not depend on the run.
    Raises AdapterError when no matrix of the model is a target.
    """

    def __init__(self, model: K3ForCausalLM, config: LoraConfig) -> None:
        self.config = config
        self._elsewhere = set(range(model.config.num_experts)) - set(model.experts)
        self.pairs: dict[str, LowRank] = {}
        """By the official name of the module, such as `...layers.0.self_attn.q_proj`."""
        banks: dict[int, dict[str, list[LowRank]]] = {}
        for name, parameter in model.named_parameters():  # only shapes are read
            module = name.removesuffix(".weight")
            found = _MODULE.fullmatch(module)
            if found is None or found["leaf"] not in config.targets:
                continue
            out, width = parameter.shape
            kind: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
            down = _fresh(f"{module}.lora_A.weight", config.rank, width, config.seed).to(**kind)
            pair = LowRank(nn.Parameter(down), nn.Parameter(torch.zeros(out, config.rank, **kind)), config.scale)
            self.pairs[module] = pair
            if found["expert"] is not None:
                banks.setdefault(int(found["layer"]), {}).setdefault(found["leaf"], []).append(pair)
        if not self.pairs:
            raise AdapterError(f"no matrix of this model is one of the targets {', '.join(config.targets)}")
        self._banks = {layer: _bank(pairs) for layer, pairs in banks.items()}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, A or B) of every pair, in official order."""
        for module, pair in self.pairs.items():
            yield f"{module}.lora_A.weight", pair.down
            yield f"{module}.lora_B.weight", pair.up

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, bf16 tensor) as files hold and engines receive them; every tensor owns its memory."""
        for name, parameter in self.parameters():
            yield name, parameter.detach().to(torch.bfloat16, copy=True)

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the values of A and B in, rounded to bf16; all of them or none. Experts of other ranks are passed over.

        Raises AdapterError, with the name, for a tensor that is missing, unknown, of another shape or not finite.
        """
        own = dict(self.parameters())
        for name in (*own, *tensors):
            if name not in tensors:
                raise AdapterError(f"{name} is missing; an adapter of these targets has it")
            if name not in own:
                if int(_expert_of(name) or -1) in self._elsewhere:
                    continue
                raise AdapterError(f"{name} belongs to no target of this adapter on this model")
            if tensors[name].shape != own[name].shape:
                raise AdapterError(
                    f"{name} has shape {tuple(tensors[name].shape)}; this model at rank {self.config.rank} needs "
                    f"{tuple(own[name].shape)}"
                )
            if not bool(tensors[name].isfinite().all()):
                raise AdapterError(f"{name} holds NaN or infinite values")
        for name, parameter in own.items():
            parameter.copy_(project(tensors[name].to(parameter.dtype), "bf16"))

    def attach(self, model: K3ForCausalLM) -> None:
        """Puts the pairs beside the model's matrices, in the place of an adapter that is there."""
        if model.adapter is not None:
            model.adapter.detach(model)
        for module, pair in self.pairs.items():
            if _expert_of(module) is None:
                _weight(model, module).adapter = pair
        for part in model.moe_parts():
            part.bank.adapter = self._banks.get(part.layer, NO_PAIRS)
        model.adapter = self

    def detach(self, model: K3ForCausalLM) -> None:
        """Takes the pairs away again; the model is what it was before."""
        for module in self.pairs:
            if _expert_of(module) is None:
                _weight(model, module).adapter = None
        for part in model.moe_parts():
            part.bank.adapter = NO_PAIRS
        model.adapter = None


@contextmanager
def adapted(model: K3ForCausalLM, adapter: Adapter | None) -> Iterator[None]:
    """The model with this adapter, or without one, for the length of the block. One thread at a time."""
    before = model.adapter
    if adapter is before:
        yield
        return
    _exchange(model, adapter)
    try:
        yield
    finally:
        _exchange(model, before)


def _exchange(model: K3ForCausalLM, adapter: Adapter | None) -> None:
    if adapter is not None:
        adapter.attach(model)
    elif model.adapter is not None:
        model.adapter.detach(model)


@dataclass(frozen=True)
class Merged:
    """What merging did to the matrices of one stored format: norms over all of them together.

    change: of scale * B A; lost: of what rounding to the stored values took from the sum.
    """

    matrices: int
    change: float
    lost: float

    @property
    def error(self) -> float:
        """lost / change: near 0 where rounding does no harm, 1 and more where it drowns the change."""
        return self.lost / self.change if self.change else 0.0


@torch.no_grad()
def merge(model: K3ForCausalLM, *, stored: bool = True) -> dict[str, Merged]:
    """Adds the attached adapter to the model's own matrices and takes it away; by stored format, what that did.

    stored: the sums are rounded to what a checkpoint can store, bf16 or, for routed experts, MXFP4, whose values
    lie a third to a half apart: most of a small change is lost there. False keeps the sums, for comparison.
    Raises AdapterError when no adapter is attached.
    """
    if model.adapter is None:
        raise AdapterError("no adapter is attached to this model; attach one before merging")
    if model.packed:
        raise AdapterError("the experts of this model are kept packed, to train beside them; load it without `packed`")
    quantization = model.config.quantization
    sums: dict[str, list[float]] = {}
    for module, pair in model.adapter.pairs.items():
        parameter = _weight(model, module).weight
        kind = torch.promote_types(parameter.dtype, torch.float32)
        change = pair.product(kind)
        exact = parameter.to(kind) + change
        form = model.config.stored(f"{module}.weight")
        new = project(exact, form, quantization.scale_rule) if stored else exact
        seen = sums.setdefault(form, [0, 0.0, 0.0])
        seen[0] += 1
        seen[1] += float(change.double().square().sum())
        seen[2] += float((new - exact).double().square().sum())
        parameter.copy_(new)
    model.adapter.detach(model)
    return {form: Merged(int(n), math.sqrt(change), math.sqrt(lost)) for form, (n, change, lost) in sums.items()}


def freeze(model: K3ForCausalLM) -> None:
    """No parameter of the model itself gets a gradient any more."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _fresh(name: str, rows: int, width: int, seed: int) -> Tensor:
    """A [rows, width], float32 on the bf16 grid, from the seed and the name alone."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") % 2**63)
    bound = 1 / math.sqrt(width)
    return project(torch.empty(rows, width).uniform_(-bound, bound, generator=generator), "bf16")


def _bank(pairs: dict[str, list[LowRank]]) -> BankAdapter:
    """The pairs of one layer's experts, by last name."""
    first = []
    for place, leaf in enumerate(("w1", "w3")):
        if leaf in pairs:
            width = pairs[leaf][0].up.shape[0]
            first.append((slice(place * width, (place + 1) * width), GroupedLowRank(pairs[leaf])))
    second = [(slice(None), GroupedLowRank(pairs["w2"]))] if "w2" in pairs else []
    return BankAdapter(BankSide(first), BankSide(second))


def _weight(model: K3ForCausalLM, module: str) -> Weight:
    try:
        found = model.get_submodule(module)
    except AttributeError as error:
        raise AdapterError(f"this model has no {module}, which the adapter belongs to") from error
    if not isinstance(found, Weight):
        raise AdapterError(f"{module} is no matrix of this model")
    return found


def _expert_of(name: str) -> str | None:
    found = _MODULE.match(name)
    return None if found is None else found["expert"]


def prepare_adapter(model: K3ForCausalLM, wanted: LoraConfig | None) -> None:
    """Attaches a fresh adapter where there is none, and freezes the model; without `wanted` there must be none.

    Raises ConfigError for a model whose adapter is another one.
    """
    found = model.adapter
    if found is not None and (wanted is None or wanted.replace(seed=found.config.seed) != found.config):
        raise ConfigError(
            f"the model has an adapter of {found.config}, the trainer wants {wanted or 'to train the weights'}; "
            "name the adapter's own rank, alpha and targets, or merge it first (`k3rl export --merge`)",
            key="lora",
        )
    if wanted is not None:
        freeze(model)
        if found is None:
            Adapter(model, wanted).attach(model)
