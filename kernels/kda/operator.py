"""Kimi Delta Attention: the public operator and the plain torch functions that define it.

Per head, with q and k L2-normalised (eps 1e-6 inside the root), q scaled by K^-0.5, beta and the log decay g computed
inside, the state S [K, V] obeys

    S <- diag(exp(g_t)) S;   u = beta_t (v_t - S^T k_t);   S <- S + k_t u^T;   o_t = S^T q_t

    g = lower_bound * sigmoid(exp(A_log) (gate + dt_bias))    bounded (Kimi K3)
    g = -exp(A_log) softplus(gate + dt_bias)                  lower_bound None (Kimi Linear): tens per token occur

`kda_recurrent` is that recurrence, `kda_reference` the chunked form with the same result: chunks of 16 tokens, so that
exp of a partial sum of a bounded g stays finite in float32; without a bound every pair of tokens has its own exp.
`kda` picks the Triton kernels on a GPU that they support.
Source: Kimi K3 report section 2.1, Kimi Linear equations 3-4.
"""

from __future__ import annotations

import functools
import math

import torch

from k3rl.kernels import limits
from k3rl.types import ContextCommunicator

CHUNK = 16
NORM_EPS = 1e-6
# Below this many tokens per sequence the recurrence costs less than setting up chunks.
RECURRENT_TOKENS = 2
# exp of a larger A_log would overflow float32 once multiplied by a gate; the sigmoid is a step long before.
A_LOG_MOST = 80.0


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    gate_lower_bound: float | None = -5.0,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    context: ContextCommunicator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention over whole or packed sequences, differentiable in every input.

    q, k, gate [B, T, H, K] and v [B, T, H, V]: raw (q and k before the L2 norm, gate before the bias). beta [B, T, H]
    before the sigmoid. A_log [H], dt_bias [H * K]. gate_lower_bound: None for gates without a bound. initial_state [n,
    H, K, V] key-first, n = B, or the number of sequences when cu_seqlens [n + 1] (int32 or int64) packs them into B =
    1. Tokens past cu_seqlens[-1] give output 0.

    context: other ranks hold what comes before the first sequence and after the last one (B = 1, none of them empty).
    States, and in the backward their gradients, come from and go to them; initial_state must be None, and the final
    state has no gradient of its own.

    Returns o [B, T, H, V] in v's dtype and the final state [n, H, K, V] in float32 or wider; an empty sequence hands
    its initial state through. Raises ValueError on shapes that do not fit and on a gate_lower_bound that is neither
    None nor in [-5, 0).
    """
    check_arguments(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens)
    if context is not None and (initial_state is not None or q.shape[0] != 1):
        raise ValueError(f"kda: with a context the state comes from the left and B must be 1, got B = {q.shape[0]} and "
                         f"initial_state {'None' if initial_state is None else 'given'}")  # fmt: skip
    if limits.KDA.takes(q, k, v):
        from k3rl.kernels.kda import autograd

        return autograd.kda(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens, context)
    if context is not None:
        args = q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, cu_seqlens
        from k3rl.kernels.kda.context import handed_on

        return handed_on(kda_reference, context, *args)
    return kda_reference(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens)


def check_arguments(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens) -> None:
    """Raise ValueError, naming argument, got and wanted, unless every shape of a `kda` call fits."""
    if q.dim() != 4:
        raise ValueError(f"kda: q must be [B, T, H, K], got shape {tuple(q.shape)}")
    B, T, H, K = q.shape
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    wanted = {"k": (k, (B, T, H, K)), "gate": (gate, (B, T, H, K)), "v": (v, (B, T, H, v.shape[-1]))}
    wanted |= {"beta": (beta, (B, T, H)), "A_log": (A_log, (H,)), "dt_bias": (dt_bias, (H * K,))}
    if initial_state is not None:
        wanted["initial_state"] = (initial_state, (sequences, H, K, v.shape[-1]))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            hint = "; A_log is stored padded to 128 heads, slice it" if name == "A_log" else ""
            raise ValueError(
                f"kda: {name} must have shape {shape} to fit q {tuple(q.shape)}, got {tuple(tensor.shape)}{hint}"
            )
    check_bound("kda", gate_lower_bound)
    if cu_seqlens is None:
        return
    if B != 1:
        raise ValueError(f"kda: cu_seqlens packs sequences into one row, so B must be 1, got B = {B}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or sequences < 1:
        raise ValueError(
            f"kda: cu_seqlens must be int32 or int64 [n + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )


def check_bound(name: str, gate_lower_bound: float | None) -> None:
    """Raise ValueError unless the bound is None or in [-5, 0)."""
    if gate_lower_bound is not None and not -5.0 <= gate_lower_bound < 0.0:
        raise ValueError(
            f"{name}: gate_lower_bound must be None (no bound), or in [-5, 0) so that 16 tokens of decay stay finite, "
            f"got {gate_lower_bound}"
        )


def log_decay(
    gate: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """g [..., H, K], the log of the decay, of gate [..., H, K], float32 or wider; see the top of this file.

    Without a bound it ends where its exp is 0, so that sums and differences of it stay finite.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    H, K = gate.shape[-2:]
    logit = gate.to(wide) + dt_bias.to(wide).view(H, K)
    rate = A_log.to(wide).clamp(max=A_LOG_MOST).exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * logit)
    return (-rate * torch.nn.functional.softplus(logit)).clamp(min=least_log_decay(wide))


def least_log_decay(dtype: torch.dtype) -> float:
    """A number whose exp is 0 in a dtype, its denormals included."""
    return math.floor(math.log(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)) - 1.0


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def kda_recurrent(
    q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound=-5.0, initial_state=None, cu_seqlens=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda` as the literal token-by-token recurrence: the oracle of the tests, and the reference decode step."""
    args = _activate(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state)
    return _over_sequences(_recurrence, args, initial_state, cu_seqlens, v)


def kda_reference(
    q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound=-5.0, initial_state=None, cu_seqlens=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda` in plain torch, exact and differentiable: chunked, or the recurrence when every sequence is short."""
    args = _activate(q, k, v, gate, beta, A_log, dt_bias, gate_lower_bound, initial_state)
    run = functools.partial(_chunked, bounded=gate_lower_bound is not None)
    return _over_sequences(run, args, initial_state, cu_seqlens, v)


def _activate(q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state):
    """Inputs after norm, scale, gate and sigmoid, head-major [B, H, T, .], and the dtype that they share."""
    wide = torch.float32
    for tensor in (q, k, v, gate, beta, A_log, dt_bias, initial_state):
        if tensor is not None:
            wide = torch.promote_types(wide, tensor.dtype)
    q = l2_normalize(q.to(wide)) * q.shape[-1] ** -0.5
    k = l2_normalize(k.to(wide))
    g = log_decay(gate.to(wide), A_log, dt_bias, lower_bound)
    return [x.transpose(1, 2) for x in (q, k, v.to(wide), g, torch.sigmoid(beta.to(wide)))]


def _over_sequences(run, args, initial_state, cu_seqlens, v_raw):
    """Apply `run` to equally long rows: packed sequences are gathered into padded rows and scattered back."""
    q, k, v, g, beta = args
    _, H, T, K = q.shape
    V = v.shape[-1]
    if cu_seqlens is None:
        rows, state = (q, k, v, g, beta), initial_state
        S0 = q.new_zeros(q.shape[0], H, K, V) if state is None else state.to(q.dtype)
        o, S = _pick(run, T)(*rows, S0)
        return o.transpose(1, 2).to(v_raw.dtype), S
    starts = cu_seqlens.to(device=q.device, dtype=torch.int64)
    lengths = starts[1:] - starts[:-1]
    if bool((lengths < 0).any()) or int(starts[0]) != 0 or int(starts[-1]) > T:
        raise ValueError(f"kda: cu_seqlens must rise from 0 to at most T = {T}, got {cu_seqlens.tolist()}")
    S0 = q.new_zeros(lengths.numel(), H, K, V) if initial_state is None else initial_state.to(q.dtype)
    longest = int(lengths.max())
    if longest == 0:
        return torch.zeros_like(v_raw), S0
    position = torch.arange(longest, device=q.device)
    inside = position < lengths[:, None]  # [n, longest]
    source = torch.where(inside, starts[:-1, None] + position, 0)
    mask = inside[:, None, :, None]
    # A padded row has k = 0, beta = 0 and g = 0: it leaves the state as it is.
    padded = [torch.where(mask, x[0][:, source].transpose(0, 1), 0) for x in (q, k, v, g, beta[..., None])]
    o, S = _pick(run, longest)(*padded[:4], padded[4][..., 0], S0)
    packed = o.transpose(1, 2)[inside]  # [sum of lengths, H, V]
    out = torch.cat([packed, packed.new_zeros(T - packed.shape[0], H, V)])
    return out[None].to(v_raw.dtype), S


def _pick(run, tokens: int):
    return _recurrence if tokens <= RECURRENT_TOKENS else run


def _recurrence(q, k, v, g, beta, S):
    """The recurrence on [B, H, T, .] rows from S [B, H, K, V]; returns o [B, H, T, V] and the final S."""
    outputs = []
    for t in range(q.shape[2]):
        S = S * g[:, :, t].exp()[..., None]
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, :, t]))
        S = S + k[:, :, t, :, None] * u[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, :, t]))
    return (torch.stack(outputs, 2) if outputs else torch.zeros_like(v)), S


def _anchored_pairs(q, k, G):
    """q_i . k_j exp(G_i - G_j), j <= i, and k_i . k_j exp(G_i - G_j), j < i, [..., 16, 16] of bounded gates.

    Anchored on the first row, the two factors lie within exp(-75) and exp(75); no row sees a later one.
    """
    base = G[..., :1, :]
    rise, fall = (G - base).exp(), (base - G).exp()
    k_fall = (k * fall).transpose(-1, -2)
    return torch.tril((q * rise) @ k_fall), torch.tril((k * rise) @ k_fall, -1)


def _pairs(q, k, G):
    """`_anchored_pairs` of any gates: exp of a difference, which is at most 0, for every pair and channel."""
    place = torch.arange(CHUNK, device=q.device)[:, None]
    i, j = place[:, None], place
    # A row and itself: a constant, for its two gradients of G would cancel and take the digits of small ones with them.
    between = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(i == j, 0.0)
    by_key = k.unsqueeze(-3) * between.masked_fill(i < j, -math.inf).exp()  # [..., i, j, K]
    return (q.unsqueeze(-2) * by_key).sum(-1), torch.tril((k.unsqueeze(-2) * by_key).sum(-1), -1)


def _chunked(q, k, v, g, beta, S, *, bounded: bool):
    """The chunked form on [B, H, T, .] rows: only the state crosses chunks, everything else is batched."""
    T = q.shape[2]
    pad = -T % CHUNK
    q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))
    beta = torch.nn.functional.pad(beta, (0, pad)).unflatten(2, (-1, CHUNK))[..., None]
    G = g.cumsum(3)
    A, P = _anchored_pairs(q, k, G) if bounded else _pairs(q, k, G)
    L = P * beta
    decay = G.exp()
    rhs = beta * torch.cat([v, k * decay], -1)
    solved = torch.linalg.solve_triangular(L, rhs, upper=False, unitriangular=True)
    U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
    # Summed by itself: the last row's G_end - G is 0, and its gradients would cancel beside those of strong decays.
    to_end = torch.nn.functional.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(3).cumsum(3).flip(3)
    k_end = (k * to_end.exp()).transpose(-1, -2)
    chunk_decay = decay[..., -1, :, None]
    states, updates = [], []
    for c in range(q.shape[2]):
        states.append(S)
        u = U[:, :, c] - W[:, :, c] @ S
        updates.append(u)
        S = chunk_decay[:, :, c] * S + k_end[:, :, c] @ u
    o = (q * decay) @ torch.stack(states, 2) + A @ torch.stack(updates, 2)
    return o.flatten(2, 3)[:, :, :T], S
