"""KDA of a sequence that several ranks hold: what a rank hands to its neighbours (k3.md 2.5).

Over the rows of one rank the recurrence is an affine map of the state, S_out = P S_in + S~, with P [D, D] the product
of the rows' transitions and S~ what the rows leave from zero. So is its adjoint, dS_in = P' dS_out + d~. Each rank
computes S~, P and d~ from its own rows, all ranks at the same time; one product and one message of D * D numbers a
head then remain between neighbours: rightward in the forward, leftward in the backward. P is needed only where a
sequence both comes from the left and goes on at the right.

Letters as in `kda_chunks`; `chunks` are the places of one segment's chunks, from first to last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rl.model.kda_tiles import Tiles
from k3rl.model.layout import ChunkPlan
from k3rl.types import ContextCommunicator


def left_over(
    chunks: list[int],
    h: int,
    v: Tensor,
    tiles: Tiles,
    transform: Tensor,
    *,
    with_product: bool,
) -> tuple[Tensor, Tensor | None]:
    """What the chunks leave of a zero state, S~ [h, D, V], and the product P [h, D, D] of their transitions, or None.

    P is what they leave of the identity with V = 0, so both are columns of one scan.
    """
    keys, values = tiles.k_in.shape[-1], v.shape[-1]
    state = v.new_zeros(h, keys, values + (keys if with_product else 0))
    if with_product:
        state[..., values:] = torch.eye(keys, dtype=v.dtype, device=v.device)
    for chunk in chunks:
        here = slice(chunk * h, chunk * h + h)
        state *= tiles.entry[here].unsqueeze(-1)
        rest = torch.bmm(tiles.k_in[here], state).neg_()
        rest[..., :values] += v[here]
        state = tiles.leave(here, state, torch.bmm(transform[here], rest))
    if not with_product:
        return state, None
    left, product = state.split([values, keys], dim=-1)
    return left.contiguous(), product.contiguous()


def left_gradient(
    chunks: list[int],
    h: int,
    d_out: Tensor,
    tiles: Tiles,
    transform: Tensor,
) -> Tensor:
    """d~ [h, D, V]: the gradient of the state before the chunks from their outputs alone."""
    d_state = d_out.new_zeros(h, tiles.k_in.shape[-1], d_out.shape[-1])
    for chunk in reversed(chunks):
        here = slice(chunk * h, chunk * h + h)
        d_solved = torch.bmm(tiles.attention[here].mT, d_out[here])
        d_state = tiles.leave_backward(here, d_state, d_solved)
        d_rest = torch.bmm(transform[here].mT, d_solved)
        d_state.baddbmm_(tiles.q_in[here].mT, d_out[here]).baddbmm_(tiles.k_in[here].mT, d_rest, alpha=-1)
        d_state *= tiles.entry[here].unsqueeze(-1)
    return d_state


def incoming_state(
    context: ContextCommunicator,
    plan: ChunkPlan,
    h: int,
    v: Tensor,
    tiles: Tiles,
    transform: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Initial states [S, h, D, D] of this rank's segments, None for all zero; and P where `incoming_gradient` needs it.

    Hands the state after the last segment on to the right.
    """
    segments, width = len(plan.rank), v.shape[-1]
    own = product = None
    if context.continues:
        spans = segments == 1 and context.before > 0
        chunks = plan.chunks_of(segments - 1)
        own, product = left_over(chunks, h, v, tiles, transform, with_product=spans)
    state = None
    if context.before:
        state = v.new_zeros(segments, h, width, width)
        state[0] = context.receive(state[0])
        if own is not None and product is not None:
            own = torch.baddbmm(own, product, state[0])
    if own is not None:
        context.send(own, right=True)
    return state, product


def incoming_gradient(
    context: ContextCommunicator,
    plan: ChunkPlan,
    h: int,
    d_out: Tensor,
    tiles: Tiles,
    transform: Tensor,
    product: Tensor | None,
) -> Tensor | None:
    """Gradients [S, h, D, D] of the states after this rank's segments, in `plan.order`, None for all zero.

    Hands the gradient of the state before the first segment on to the left.
    """
    segments, width = len(plan.rank), d_out.shape[-1]
    own = None
    if context.before:
        chunks = plan.chunks_of(0)
        own = left_gradient(chunks, h, d_out, tiles, transform)
    d_final = None
    if context.continues:
        d_final = d_out.new_zeros(segments, h, width, width)
        came = context.receive(d_final[-1], right=True)
        d_final[int(plan.rank[-1])] = came
        if own is not None and product is not None:
            own = torch.baddbmm(own, product.mT, came)
    if own is not None:
        context.send(own)
    return d_final
