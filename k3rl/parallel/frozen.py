"""Frozen weights cut over ranks that are next to each other, as fully sharded data parallelism does with trained ones.

Each rank keeps a slice of the embedding, of the head, and of each layer's attention and MLP (all but its routed
experts). Before such a part runs, and again in its backward, its weights are all-gathered into a buffer, and those of
the next part are prefetched. In the place of weights autograd saves where they were, so a buffer is released when the
part after the next one comes.

Ranks of a group gather together. What is gathered, and when it is released, follows from the order of parts alone,
which is the same on all ranks; so ranks must take each micro-batch together, and one without rows runs a dummy forward
that gathers the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3rl.config import ConfigError
from k3rl.model import K3ForCausalLM, joined_in
from k3rl.optim import master_dtype
from k3rl.parallel.mesh import Mesh
from k3rl.parallel.world import Axis, World

ALIGNED = 256  # bytes: where kernels that read whole lines want a matrix to start
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name, where torch has it
_MOVED = ".e_score_correction_bias"  # balancing writes it


class _Extent(NamedTuple):
    """Where a parameter lies in the bytes of its part."""

    parameter: nn.Parameter
    start: int
    stop: int


class _SavedView(NamedTuple):
    """What autograd saves in the place of a tensor that views a part's weights."""

    part: SlicedPart
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SlicedPart:
    """The weights of one module: this rank's slice uint8 [bytes / ranks] and, while it runs, the whole of them."""

    def __init__(
        self, module: nn.Module, number: int, parameters: list[nn.Parameter], axis: Axis, world: World
    ) -> None:
        self.number, self._axis, self._world = number, axis, world
        self._fused = list(joined_in(module))
        self._extents: list[_Extent] = []
        # Parameters that share a storage stay as they lie in it, so that they are one matrix in the buffer too.
        storages: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            storages.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
        size = 0
        for group in storages.values():
            for parameter in sorted(group, key=lambda p: p.storage_offset()):
                self._extents.append(_Extent(parameter, size, size + parameter.nbytes))
                size += parameter.nbytes
            size = -(-size // ALIGNED) * ALIGNED
        each = -(-size // (ALIGNED * axis.size)) * ALIGNED
        self._bytes = each * axis.size
        whole = torch.zeros(self._bytes, dtype=torch.uint8, device=parameters[0].device)
        for parameter, start, stop in self._extents:
            whole[start:stop].copy_(parameter.detach().contiguous().view(-1).view(torch.uint8))
        self.slice = whole[axis.rank * each : (axis.rank + 1) * each].to(world.device, copy=True)
        self._buffer: Tensor | None = None
        self._gathering: dist.Work | None = None
        self.sent_bytes = 0
        self.release()

    def prefetch(self) -> None:
        """Starts the all-gather; a collective of the group."""
        if self._buffer is None:
            self.sent_bytes += self.slice.nbytes * (self._axis.size - 1)
            self._buffer = torch.empty(self._bytes, dtype=torch.uint8, device=self._world.device)
            with self._world.during("gathering frozen weights"):
                self._gathering = _ALL_GATHER(self._buffer, self.slice, group=self._axis.group, async_op=True)

    def whole(self) -> Tensor:
        """uint8 [bytes], with the parameters as views of it."""
        self.prefetch()
        assert self._buffer is not None
        if self._gathering is not None:
            with self._world.during("waiting for frozen weights"):
                self._gathering.wait()
            self._gathering = None
            self._show(self._buffer)
        return self._buffer

    def show_on_host(self) -> None:
        """Gathers, and has the parameters in host memory."""
        self._buffer = self.whole().cpu()
        self._show(self._buffer)

    def _show(self, whole: Tensor) -> None:
        for parameter, start, stop in self._extents:
            parameter.data = whole[start:stop].view(parameter.dtype).view(parameter.shape)

    def release(self) -> None:
        """Parameters hold NaN in the place of each value from now on, in one element's memory."""
        self._buffer = self._gathering = None
        for parameter, _, _ in self._extents:
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=self._world.device)
            parameter.data = nothing.expand(parameter.shape)
        for fused in self._fused:
            fused.forget()

    def holds(self, storage: int) -> bool:
        return self._buffer is not None and self._buffer.untyped_storage()._cdata == storage

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [extent.parameter for extent in self._extents]


class FrozenSlices:
    """The frozen weights of a model cut over `ranks` neighbours of a mesh (`k3rl.types.WeightSlices`).

    ranks 1 cuts nothing. Making one is a collective. A model on another device than the mesh's, such as one loaded into
    host memory, has its slices and everything that is not cut moved there.
    """

    def __init__(self, model: K3ForCausalLM, mesh: Mesh, ranks: int) -> None:
        self._by_module: dict[nn.Module, SlicedPart] = {}
        self._parts: list[SlicedPart] = []
        self._window: list[SlicedPart] = []  # those that are whole, or prefetched
        self._last = -1
        self.in_place = True
        """Whether a model's parameters may be read: all of them are there."""
        self._cut: set[int] = set()
        if ranks == 1:
            return
        axis = mesh.neighbours(ranks)
        for module in _modules(model):
            own = [
                p for name, p in module.named_parameters() if ".experts." not in f".{name}" and _MOVED not in f".{name}"
            ]
            part = SlicedPart(module, len(self._parts), own, axis, mesh.world)
            self._parts.append(part)
            self._by_module[module] = part
            self._cut |= {id(parameter) for parameter in own}
        _move(model, [p for p in model.parameters() if id(p) not in self._cut], mesh.world.device)
        for module in list(self._by_module)[1:-1]:
            module.register_forward_pre_hook(self._gather_before)
        model.slices, self.in_place = self, False

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._cut

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def nbytes(self) -> int:
        """Of this rank's slices."""
        return sum(part.slice.nbytes for part in self._parts)

    @property
    def sent_bytes(self) -> int:
        """What left this rank for others so far."""
        return sum(part.sent_bytes for part in self._parts)

    def gather(self, module: Any) -> Any:
        """The module, its weights whole until the part after the next. A collective."""
        part = self._by_module.get(module)
        if part is not None and not self.in_place:
            self._gather_and_prefetch(part)
        return module

    def _gather_before(self, module: nn.Module, _: Any) -> None:
        self.gather(module)

    def gather_both_ways(self, module: Any, rows: Any) -> Any:
        """`rows` as they are; the part is gathered now and when their gradient comes by."""
        passed: Tensor = _GatherBothWays.apply(rows, self, module)
        return passed

    def _gather_and_prefetch(self, part: SlicedPart) -> None:
        if part.number != self._last:
            step = part.number - self._last
            following = part.number + step if abs(step) == 1 else -1
            # The embedding is not read in a backward, and what is there of the part before stays at an end.
            has_next = 0 < following < len(self._parts)
            wanted = {part, *([self._parts[following]] if has_next else self._window[-1:])}
            for other in self._window:
                if other not in wanted:
                    other.release()
            part.prefetch()
            self._window = [other for other in self._window if other in wanted and other is not part] + [part]
            if has_next:
                self._parts[following].prefetch()
                if self._parts[following] not in self._window:
                    self._window.insert(0, self._parts[following])
            self._last = part.number
        part.whole()

    def release(self) -> None:
        """Releases what is whole: a forward or backward has ended."""
        for part in self._window:
            part.release()
        self._window, self._last = [], -1

    def saving(self) -> Any:
        """Around a forward: autograd saves where weights were instead of weights."""
        if not self._parts:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _SavedView:
        storage = tensor.untyped_storage()._cdata
        for part in self._window:
            if part.holds(storage):
                return _SavedView(part, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor.detach()  # an output that kept its own graph would never go

    def _unpack(self, saved: Tensor | _SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._gather_and_prefetch(saved.part)
        return saved.part.whole().view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights in place, in host memory; a collective. Every rank of a node needs room for them there."""
        self.release()
        try:
            for part in self._parts:
                part.show_on_host()
            self.in_place = True
            yield
        finally:
            self.in_place = not self._parts
            for part in self._parts:
                part.release()


class _GatherBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slices: FrozenSlices, module: nn.Module) -> Tensor:
        ctx.slices, ctx.module = slices, module
        slices.gather(module)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.slices.gather(ctx.module)
        return grad, None, None


def check_slices(world: int, ranks: int) -> None:
    """Raises ConfigError when groups of `ranks` do not fill the ranks of a learner."""
    if world % ranks:
        raise ConfigError(
            f"{world} learner ranks cannot be cut into groups of shard_frozen {ranks}; the number of ranks must be a "
            f"multiple of {ranks}",
            key="shard_frozen",
            got=world,
            wanted=f"a multiple of {ranks} ranks",
        )


def _move(model: K3ForCausalLM, parameters: list[nn.Parameter], device: torch.device) -> None:
    """These parameters, the adapter's and packed experts to a device."""
    adapter = [] if model.adapter is None else [parameter for _, parameter in model.adapter.parameters()]
    for parameter in (*parameters, *adapter):
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for bank in model.packed_banks.values():
        bank.to(device)


def _modules(model: K3ForCausalLM) -> Iterator[nn.Module]:
    """What is gathered at a time, in the order of a forward."""
    stack = model.language_model.model
    yield stack.embed_tokens
    for layer in stack.layers:
        yield layer.get_submodule("self_attn")
        yield layer.get_submodule("block_sparse_moe" if layer.is_moe else "mlp")
    yield model.language_model.lm_head


def parameter_bytes(model: K3ForCausalLM, trained: Iterable[nn.Parameter], frozen: FrozenSlices) -> dict[str, int]:
    """Bytes of weights, gradients and adapters on this rank's device, by the planner's names.

    They stay the same, and counting thousands of experts takes longer than many a kernel: ask once.
    """
    trained = list(trained)
    own = [p for p in model.parameters() if not p.is_meta and p not in frozen]
    banks = sum(bank.nbytes for bank in model.packed_banks.values())
    found = {
        "weights": banks + frozen.nbytes + sum(parameter.nbytes for parameter in own),
        "gradients": sum(p.numel() * master_dtype(p.dtype).itemsize for p in trained),
    }
    if model.adapter is not None:
        found["adapters"] = sum(parameter.nbytes for parameter in trained)
    return found
