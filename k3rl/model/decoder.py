"""K3ForCausalLM: embedding, decoder layers on a residual stream, final norm, head (k3.md 1-7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k3rl.config import K3Error
from k3rl.model.attn_res import ResidualStream
from k3rl.model.cache import Cache, ChunkCache, StepCache
from k3rl.model.config import K3Config
from k3rl.model.init import initialise
from k3rl.model.joined import Weight
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import FixedLayout, Layout, packed_lengths
from k3rl.model.lora import Adapter
from k3rl.model.mla import GatedMLA
from k3rl.model.moe import MLP, LatentMoE
from k3rl.model.norm import RMSNorm, wide
from k3rl.model.origin import Origin, QuantizationLoss
from k3rl.model.packed import EXPERT_NAME, assign_parameter, check_packable, packed_entry
from k3rl.model.recompute import PARTS, again, recomputed
from k3rl.model.vision import Projector, VisionTower, check_grids
from k3rl.types import Communicator, ContextCommunicator, ForwardObserver, WeightSlices


class InputError(K3Error, ValueError):
    """Inputs of a forward that do not fit together; the message says what was got and wanted."""


@dataclass(frozen=True)
class HiddenOutput:
    """hidden [B, T, H] after the final norm; routes int16 [B, T, M, k], M MoE layers in depth order; cache."""

    hidden: Tensor
    routes: Tensor
    cache: Cache | None


@dataclass(frozen=True)
class K3Output:
    """logits [B, T, V], float32 or wider; routes int16 [B, T, M, k], M MoE layers in depth order; cache."""

    logits: Tensor
    routes: Tensor
    cache: Cache | None


class _Segments(NamedTuple):
    """Segments that take one path through sequence mixing. rows is None when they are all rows."""

    rows: Tensor | None
    layout: Layout
    cache: Cache | StepCache | ChunkCache | None


def _by_path(layout: Layout, cache: Cache | None) -> list[_Segments]:
    """With a cache, segments of one token take the one-token step and the others the chunked path."""
    if cache is None or layout.longest == 1 or min(layout.lengths) > 1:
        return [_Segments(None, layout, cache)]
    groups = []
    for wanted in (True, False):
        members = [s for s, length in enumerate(layout.lengths) if (length == 1) == wanted]
        sub = Layout([layout.lengths[s] for s in members], layout.device)
        groups.append(_Segments(layout.rows_of(members), sub, cache.select(torch.tensor(members))))
    return groups


class DecoderLayer(nn.Module):
    """One layer: attention site and MLP site, each read from the residual stream (k3.md 6)."""

    def __init__(
        self, config: K3Config, layer: int, experts: range, packed: bool, *, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, **kind)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **kind)
        mixes = config.ablation.residual == "attn_res"
        for site in ("self_attention", "mlp") if mixes else ():
            setattr(self, f"{site}_res_norm", Weight(hidden, **kind))
            setattr(self, f"{site}_res_proj", Weight(1, hidden, **kind))
        self.is_kda = layer in config.kda_layers
        self.self_attn = (KimiDeltaAttention if self.is_kda else GatedMLA)(config, layer, **kind)
        self.is_moe = layer in config.moe_layers
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config, layer, experts, packed=packed, **kind)
        else:
            self.mlp = MLP(config, config.intermediate_size, **kind)
        self.recompute: frozenset[str] = frozenset()
        self.mixes = mixes
        self.starts_block = mixes and layer % config.attn_res_block_size == 0  # without blocks the stream is a sum

    def forward(
        self, stream: ResidualStream, groups: list[_Segments], routes: Tensor | None, observer: ForwardObserver | None
    ) -> Tensor | None:
        """Reads and extends the stream; returns the expert ids [N, k], or None for a dense layer."""
        if isinstance(groups[0].cache, StepCache):
            return self._step(stream, groups[0].cache)

        def attention(at: ResidualStream, watching: ForwardObserver | None) -> Tensor:
            return self._attend(self._read(at, "self_attention", self.input_layernorm), groups, watching)

        chosen = routes

        def experts(at: ResidualStream, watching: ForwardObserver | None) -> tuple[Tensor, Tensor]:
            nonlocal chosen
            seen = self._read(at, "mlp", self.post_attention_layernorm)
            # A second run goes to the same experts.
            layout = groups[0].layout
            out, chosen = self.block_sparse_moe(seen, chosen, watching, layout.fixed, layout.padding)
            return out, chosen

        def dense(at: ResidualStream, _: ForwardObserver | None) -> Tensor:
            return self.mlp(self._read(at, "mlp", self.post_attention_layernorm))

        twice = self.recompute
        attended = recomputed(attention, stream, observer) if "attention" in twice else attention(stream, observer)
        if self.starts_block:
            stream.push()
        stream.add(attended)
        if not self.is_moe:
            stream.add(recomputed(dense, stream, None) if "mlp" in twice else dense(stream, None))
            return None
        out, ids = recomputed(experts, stream, observer) if "mlp" in twice else experts(stream, observer)
        stream.add(out)
        return ids

    def _step(self, stream: ResidualStream, cache: StepCache) -> Tensor | None:
        """`forward` of one new token for every row."""
        attended = self.self_attn.step(self._read(stream, "self_attention", self.input_layernorm), cache)
        if self.starts_block:
            stream.push()
        stream.add(attended)
        seen = self._read(stream, "mlp", self.post_attention_layernorm)
        if not self.is_moe:
            stream.add(self.mlp(seen))
            return None
        out, ids = self.block_sparse_moe.step(seen)
        stream.add(out)
        return ids

    def _read(self, stream: ResidualStream, site: str, norm: RMSNorm) -> Tensor:
        """What a site sees of the stream [N, H], normed."""
        if not self.mixes:
            return norm(stream.total())
        return stream.read(getattr(self, f"{site}_res_norm").weight, getattr(self, f"{site}_res_proj").weight, norm)

    def _attend(self, x: Tensor, groups: list[_Segments], observer: ForwardObserver | None) -> Tensor:
        attend: Callable[[Tensor, Layout, Cache | StepCache | ChunkCache | None], Tensor] = (
            self.self_attn if self.is_kda else lambda *given: self.self_attn(*given, observer)
        )
        if groups[0].rows is None:
            return attend(x, groups[0].layout, groups[0].cache)
        out = torch.empty_like(x)
        for group in groups:
            assert group.rows is not None
            out.index_copy_(0, group.rows, attend(x.index_select(0, group.rows), group.layout, group.cache))
        return out


class DecoderStack(nn.Module):
    """What the official names call `language_model.model`."""

    def __init__(
        self, config: K3Config, experts: range, packed: bool, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.eps = config.rms_norm_eps
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size, **kind)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, n, experts, packed, **kind) for n in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **kind)
        self.mixes = config.ablation.residual == "attn_res"
        if self.mixes:
            self.output_attn_res_norm = Weight(config.hidden_size, **kind)
            self.output_attn_res_proj = Weight(1, config.hidden_size, **kind)

    def forward(
        self, embedded: Tensor, groups: list[_Segments], routes: Tensor | None, observer: ForwardObserver | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Embedded rows [N, H], routes [N, M, k] or None -> final hidden rows [N, H], expert ids [N, k] per layer."""
        stream = ResidualStream(embedded, self.eps)
        used: list[Tensor] = []
        for layer in self.layers:
            replay = None if routes is None else routes[:, len(used)]
            ids = layer(stream, groups, replay if layer.is_moe else None, observer)
            if ids is not None:
                used.append(ids)
        if not self.mixes:
            return self.norm(stream.total()), used
        return stream.read(self.output_attn_res_norm.weight, self.output_attn_res_proj.weight, self.norm), used


class LanguageModel(nn.Module):
    """What the official names call `language_model`."""

    def __init__(
        self, config: K3Config, experts: range, packed: bool, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.model = DecoderStack(config, experts, packed, dtype=dtype, device=device)
        self.lm_head = Weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)


class K3ForCausalLM(nn.Module):
    """A model of the Kimi family (`K3Config`). Its parameters carry the official names of its checkpoints.

    A parameter holds the value that the checkpoint stores: routed experts are exact MXFP4 values, and nothing
    quantizes weights inside the forward. Write parameters in place; some share one storage.

    config: what to build. dtype: of parameters stored as bf16 or MXFP4; the ones stored as float32 (convolutions,
    A_log, dt_bias, o_norm, router bias) stay float32, or `dtype` where that is wider. experts: the run of routed
    experts to hold, all by default; the rest is reached through `connect`. packed: routed experts are kept as MXFP4
    bytes, frozen, and their parameters are on no device; raises PackError where the configuration stores them plain.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        experts: range | None = None,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.experts = range(config.num_experts) if experts is None else experts
        if not self.experts or self.experts[0] < 0 or self.experts[-1] >= config.num_experts or self.experts.step != 1:
            raise InputError(f"experts is {self.experts}; it must be a run of the {config.num_experts} experts")
        if packed:
            check_packable(config)
        language = LanguageModel(config, self.experts, packed, dtype=dtype, device=device)
        if config.flat:  # parameters have no name before `model` and `lm_head`
            self.model, self.lm_head = language.model, language.lm_head
            self.__dict__["language_model"] = language
        else:
            self.language_model = language
        if config.vision_config is not None:
            self.vision_tower = VisionTower(config.vision_config, dtype=dtype, device=device)
            self.mm_projector = Projector(config.vision_config, dtype=dtype, device=device)
        self.observer: ForwardObserver | None = None
        self.adapter: Adapter | None = None  # what `k3rl.model.lora` attached
        self.slices: WeightSlices | None = None  # set where other processes hold the rest of the weights
        # Packed bytes and scales that parameters were loaded from, by official name; an export reuses those of blocks
        # that did not change.
        self.stored_blocks: dict[str, tuple[Tensor, Tensor]] = {}
        self.stored_wide: dict[str, Tensor] = {}
        """float32 tensors of a checkpoint whose parameters hold less; an export takes what did not change from here."""
        self.origin: Origin | None = None
        self.quantization_loss: QuantizationLoss | None = None
        self.packed_banks = {p.layer: p.bank.packed for p in self.moe_parts() if p.bank.packed is not None}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.language_model.lm_head.weight.device

    def init_weights(self, seed: int) -> None:
        """Fresh weights from `seed`, the same at any dtype, each a value that the checkpoint can store."""
        quantization = self.config.quantization
        whole = self if self.holds_all else K3ForCausalLM(self.config, device="meta")
        shapes = [(name, tuple(parameter.shape)) for name, parameter in whole.named_parameters()]
        parameters = dict(self.official_parameters())
        initialise(shapes, parameters, seed, self.config.stored, quantization.scale_rule)
        for name, parameter in parameters.items():
            if packed_entry(self, name) is not None:  # what was filled is a copy
                assign_parameter(self, name, parameter)

    @property
    def packed(self) -> bool:
        """Whether routed experts are kept as stored bytes (`k3rl.model.packed`)."""
        return bool(self.packed_banks)

    @property
    def holds_all(self) -> bool:
        """Whether every routed expert is here."""
        return len(self.experts) == self.config.num_experts

    def elsewhere(self, name: str) -> bool:
        """Whether an official name belongs to a routed expert that another rank holds."""
        found = EXPERT_NAME.match(name)  # packed ones have more behind it
        return (
            found is not None
            and int(found["expert"]) < self.config.num_experts
            and int(found["expert"]) not in self.experts
        )

    def parameter_count(self) -> int:
        """Parameters of the whole model, wherever its experts are."""
        held = {name: parameter.numel() for name, parameter in self.named_parameters()}
        routed = sum(numbers for name, numbers in held.items() if EXPERT_NAME.match(name))
        return sum(held.values()) - routed + routed // len(self.experts) * self.config.num_experts

    def connect(self, communicator: Communicator) -> None:
        """Reaches experts of other ranks through `communicator`. Raises InputError when it cuts them another way."""
        if communicator.experts != self.experts:
            raise InputError(
                f"the communicator is made for experts {communicator.experts}, the model holds {self.experts}"
            )
        for part in self.moe_parts():
            part.bank.communicator = communicator

    def dummy_forward(self) -> Tensor:
        """A forward without rows: takes part in its exchanges for the rows of other ranks.

        Where weights are gathered from other ranks, in those all-gathers too.

        Returns a scalar 0; its `backward` takes part in the exchanges of the backward, those that recomputation repeats
        included. Layers hang together as in a forward, so that both go through them in the same order.
        """
        k = self.config.num_experts_per_token
        rows = torch.zeros(
            0,
            self.config.expert_hidden_size,
            dtype=self.dtype,
            device=self.device,
            requires_grad=torch.is_grad_enabled(),
        )
        weights = torch.zeros(0, k, dtype=wide(self.dtype), device=self.device)
        ids = torch.zeros(0, k, dtype=torch.int64, device=self.device)

        def passing(part: nn.Module, rows: Tensor) -> Tensor:
            return rows if self.slices is None else self.slices.gather_both_ways(part, rows)

        def experts(rows: Tensor, part: LatentMoE) -> Tensor:
            rows = passing(part, rows)
            return passing(part, rows if self.holds_all else part.bank(rows, weights, ids))

        if self.slices is not None:
            self.slices.gather(self.language_model.model.embed_tokens)  # which no backward reads
        layer: Any
        for layer in self.language_model.model.layers:
            rows = passing(layer.self_attn, rows)
            if not layer.is_moe:
                rows = passing(layer.mlp, rows)
                continue
            run = partial(experts, part=layer.block_sparse_moe)
            rows = again(run, rows) if "mlp" in layer.recompute else run(rows)
        return passing(self.language_model.lm_head, rows).sum()

    def recompute(self, parts: Collection[str]) -> None:
        """Which parts of every layer keep only their inputs in training: "attention", "mlp", both or none.

        Their forward then runs twice. Raises InputError for another name.
        """
        if unknown := set(parts) - set(PARTS):
            raise InputError(f"there is no part {min(unknown)!r} to recompute; there are {', '.join(PARTS)}")
        for layer in self.language_model.model.layers:
            layer.recompute = frozenset(parts)  # type: ignore[assignment]

    def new_cache(self, batch: int) -> Cache:
        """An empty cache of `batch` rows for this model."""
        return Cache(self.config, batch, self.language_model.lm_head.weight.dtype, self.device)

    def official_parameters(self, *, decoded: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """(official name, leaf parameter) of every parameter; experts as `...experts.E.w1.weight`.

        The router biases are among them with requires_grad False: quantile balancing moves them, not a gradient.
        Experts that are kept packed come as decoded copies, or, with decoded False, as shapes without values;
        `assign_parameter` writes. Raises InputError where other processes hold the rest of the weights.
        """
        if self.slices is not None and not self.slices.in_place:
            raise InputError("this process holds slices of the weights alone; read them inside `Trainer.whole()`")
        for name, parameter in self.named_parameters():
            found = packed_entry(self, name) if decoded else None
            if found is None:
                yield name, parameter
            else:
                bank, number, leaf = found
                yield name, nn.Parameter(bank.value(number, leaf, self.dtype), requires_grad=False)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer may move: `official_parameters`, or with an adapter attached its A and B instead."""
        yield from self.official_parameters() if self.adapter is None else self.adapter.parameters()

    def router_biases(self) -> Iterator[tuple[int, nn.Parameter]]:
        """(layer, e_score_correction_bias [E]) of every MoE layer in depth order."""
        for number, layer in enumerate(self.language_model.model.layers):
            if isinstance(layer, DecoderLayer) and layer.is_moe:
                yield number, layer.block_sparse_moe.gate.e_score_correction_bias

    def moe_parts(self) -> Iterator[LatentMoE]:
        """The LatentMoE of every MoE layer in depth order."""
        for layer in self.language_model.model.layers:
            if isinstance(layer, DecoderLayer) and layer.is_moe:
                yield layer.block_sparse_moe

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        routes: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
    ) -> K3Output:
        """`hidden`, then logits of every token."""
        out = self.hidden(
            input_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            routes=routes,
            pixel_values=pixel_values,
            grid_thws=grid_thws,
        )
        with torch.no_grad() if cache is not None else nullcontext():
            return K3Output(self.logits(out.hidden), out.routes, out.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows after the final norm [..., H] -> [..., V] in float32 or wider."""
        if self.slices is not None:
            self.slices.gather(self.language_model.lm_head)
        kind = wide(hidden.dtype)
        if hidden.device.type == "cuda" and hidden.dtype != kind and not torch.is_grad_enabled():
            # The same products and sums, without a wide copy of the matrix.
            rows, head = hidden.reshape(-1, hidden.shape[-1]), self.language_model.lm_head.weight
            return torch.mm(rows, head.t(), out_dtype=kind).view(*hidden.shape[:-1], -1)
        return nn.functional.linear(hidden.to(kind), self.language_model.lm_head.weight.to(kind))

    def hidden(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        routes: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        images: tuple[Tensor, Tensor] | None = None,
        context: ContextCommunicator | None = None,
    ) -> HiddenOutput:
        """Hidden states after the final norm.

        input_ids [B, T] int64, every row a sequence; or [1, N] with cu_seqlens [S + 1], S packed sequences.
        cache: row b (or segment s) continues row b (s) of the cache, which is updated in place; no gradients then.
        routes: int16 [B, T, M, k], experts to use instead of the router's choice.
        pixel_values [patches, 3, 14, 14] with grid_thws [images, 3]: images for the placeholder ids, in order. One
        placeholder becomes all rows of its image, so T (and N, and the routes) count the expanded rows; sequences
        whose expanded lengths differ must be packed.
        images: the same already computed and expanded: (rows [R, H] of `image_rows`, places int64 [R]); they stand
        instead of the embedded ids at these places of the flattened input, whatever the ids are there.
        context: the ranks that hold the rest of the first and the last sequence; every rank gives its own rows, and
        gets the hidden states and routes of those. No cache then.

        Raises InputError, LayoutError or CacheError.
        """
        if context is not None and cache is not None:
            raise InputError("a forward with a cache runs on one rank; give it a cache or a context, not both")
        if not self.holds_all and any(part.bank.communicator is None for part in self.moe_parts()):
            raise InputError(
                f"this model holds experts {self.experts.start} to {self.experts.stop - 1} of "
                f"{self.config.num_experts}; `connect` it to the ranks that hold the others"
            )
        with torch.no_grad() if cache is not None else nullcontext():
            lengths = self._lengths(input_ids, cu_seqlens)
            if self.slices is not None:
                self.slices.gather(self.language_model.model.embed_tokens)
            embedded = nn.functional.embedding(
                input_ids.reshape(-1), self.language_model.model.embed_tokens.weight, self.config.pad_token_id
            )
            if pixel_values is not None:
                computed = self.image_rows(pixel_values, grid_thws)
                embedded, lengths = self._merge(input_ids.reshape(-1), embedded, computed, lengths)
            if images is not None:
                embedded = embedded.index_copy(0, images[1], images[0].to(embedded.dtype))
            meets = context is not None or not self.holds_all or self.slices is not None
            if self.adapter is not None and meets and torch.is_grad_enabled() and not embedded.requires_grad:
                embedded.requires_grad_()  # so that backwards of all ranks go through every layer, frozen or not
            layout = Layout(lengths, embedded.device, context)
            return self._decode(embedded, layout, input_ids.shape[0], cache, routes)

    @torch.no_grad()
    def step(
        self, ids: Tensor, cache: StepCache | ChunkCache, layout: FixedLayout | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next token of each row, ids int64 [R] -> rows after the final norm [R, H], routes int16 [R, M, k].

        layout: ids are the next tokens of the segments that it lays out, padding last, and the cache is a `ChunkCache`.
        Only shapes are read by the host, so a step can be captured in a CUDA graph where the kernels run. A row that is
        padding gives finite values that mean nothing. Raises InputError for experts on other ranks or an adapter.
        """
        if not all(part.bank.is_static for part in self.moe_parts()) or self.adapter is not None:
            raise InputError("a step with static shapes is of a model that holds all its experts and has no adapter")
        own = Layout([1] * len(ids), ids.device) if layout is None else layout
        embedded = nn.functional.embedding(ids, self.language_model.model.embed_tokens.weight)
        hidden, used = self.language_model.model(embedded, [_Segments(None, own, cache)], None, None)
        return hidden, torch.stack(used, dim=1).to(torch.int16) if used else self._no_routes(len(ids))

    def rows(self, ids: Tensor, layout: FixedLayout, routes: Tensor | None = None) -> Tensor:
        """Packed ids int64 [N] -> rows after the final norm [N, H], with gradients.

        routes int16 [N, M, k] as in `hidden`. Only shapes are read by the host, so that this and its backward can be
        captured in a CUDA graph where the kernels run. Padding gives finite rows that mean nothing and has gradients
        only where what reads it gives it one. Raises InputError for experts on other ranks or an adapter.
        """
        if not all(part.bank.is_static for part in self.moe_parts()) or self.adapter is not None:
            raise InputError("rows of a fixed layout are of a model that holds all its experts and has no adapter")
        embedded = nn.functional.embedding(ids, self.language_model.model.embed_tokens.weight, self.config.pad_token_id)
        return self.language_model.model(embedded, [_Segments(None, layout, None)], routes, self.observer)[0]

    def image_rows(self, pixel_values: Tensor, grid_thws: Tensor | None) -> list[Tensor]:
        """Patches [n, 3, 14, 14] and grid_thws [images, 3] -> per image [rows, H], as the language model reads them."""
        vision = self.config.vision_config
        if vision is None or grid_thws is None:
            what = "grid_thws is missing" if vision is not None else "this model has no vision tower"
            raise InputError(f"pixel_values were given but {what}")
        try:
            grids = check_grids(grid_thws, pixel_values, vision)
        except ValueError as error:
            raise InputError(str(error)) from error
        pixels = pixel_values.to(self.device, self.language_model.lm_head.weight.dtype)
        return [self.mm_projector(merged) for merged in self.vision_tower(pixels, grids)]

    def _merge(
        self, ids: Tensor, embedded: Tensor, images: list[Tensor], lengths: list[int]
    ) -> tuple[Tensor, list[int]]:
        """Replaces each placeholder row by the rows of its image; -> (rows, lengths of the segments)."""
        places = torch.nonzero(ids == self.config.media_placeholder_token_id).view(-1).tolist()
        if len(places) != len(images):
            raise InputError(f"the input has {len(places)} image placeholders and {len(images)} images")
        pieces, start = [], 0
        for place, image in zip(places, images, strict=True):
            pieces += [embedded[start:place], image.to(embedded.dtype)]
            start = place + 1
        pieces.append(embedded[start:])
        grown, ends = list(lengths), torch.tensor(lengths).cumsum(0)
        for place, image in zip(places, images, strict=True):
            grown[int(torch.searchsorted(ends, place, right=True))] += len(image) - 1
        return torch.cat(pieces), grown

    def _decode(
        self, embedded: Tensor, layout: Layout, batch: int, cache: Cache | None, routes: Tensor | None
    ) -> HiddenOutput:
        """Embedded rows [N, H] of `batch` equal sequences, or of one packed row."""
        if batch > 1 and min(layout.lengths) != layout.longest:
            raise InputError(f"images make the sequences of a batch unequal: {layout.lengths}; pack them instead")
        shape = (batch, layout.n_rows // batch)
        if cache is not None:
            self._check_cache(cache, layout)
            tokens = torch.tensor(layout.lengths)
            cache.reserve(int((cache.lengths + tokens).max()))
        replay = None if routes is None else self._flat_routes(routes, *shape)
        hidden, used = self.language_model.model(embedded, _by_path(layout, cache), replay, self.observer)
        if cache is not None:
            cache.advance(tokens)
        ids = torch.stack(used, dim=1).to(torch.int16) if used else self._no_routes(layout.n_rows)
        return HiddenOutput(
            hidden.view(*shape, -1), ids.view(*shape, len(used), self.config.num_experts_per_token), cache
        )

    def _no_routes(self, rows: int) -> Tensor:
        return torch.empty(rows, 0, self.config.num_experts_per_token, dtype=torch.int16, device=self.device)

    def _lengths(self, input_ids: Tensor, cu_seqlens: Tensor | None) -> list[int]:
        """Tokens of each sequence, checked."""
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise InputError(f"input_ids must be [B, T] with at least one token; got shape {tuple(input_ids.shape)}")
        batch, tokens = input_ids.shape
        if cu_seqlens is None:
            return [tokens] * batch
        if batch != 1:
            raise InputError(f"packed input is [1, N] with cu_seqlens; got a batch of {batch}")
        return packed_lengths(cu_seqlens, tokens)

    def _check_cache(self, cache: Cache, layout: Layout) -> None:
        if cache.batch != layout.n_segments:
            raise InputError(
                f"the cache has {cache.batch} rows and the input {layout.n_segments} sequences; use cache.select(rows)"
            )

    def _flat_routes(self, routes: Tensor, batch: int, tokens: int) -> Tensor:
        wanted = (batch, tokens, len(self.config.moe_layers), self.config.num_experts_per_token)
        if tuple(routes.shape) != wanted:
            raise InputError(f"routes must be [B, T, M, k] = {wanted}; got {tuple(routes.shape)}")
        return routes.reshape(batch * tokens, *wanted[2:])
