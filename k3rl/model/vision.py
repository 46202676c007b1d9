"""MoonViT-V2 and the projector into the language model (k3.md 11).

Images are packed patches [n, 3, p, p] with grid_thws [images, 3] of (frames, rows, columns) in patches. Attention is
full inside one image or clip. 2 x 2 patches make one row of the language model; frames are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from k3rl.model.config import VisionConfig
from k3rl.model.joined import Weight
from k3rl.model.norm import RMSNorm, wide

ROPE_BASE = 10000.0
TIME_BASE = 10000.0
MAX_FRAMES = 4

Grids = Sequence[tuple[int, int, int]]


def _norm_eps(dtype: torch.dtype) -> float:
    """The tower's norms name no epsilon: the machine epsilon of the dtype, at least float32's."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


class _PatchEmbed(nn.Module):
    """Patches to vectors, plus a position: a learned table over (row, column) and a fixed one over frames."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        width, patch = config.vt_hidden_size, config.patch_size
        self.proj = Weight(width, 3, patch, patch, dtype=dtype, device=device)
        self.pos_emb = Weight(config.init_pos_emb_height, config.init_pos_emb_width, width, dtype=dtype, device=device)

    def forward(self, pixels: Tensor, grids: Grids) -> Tensor:
        """pixels [n, 3, p, p] -> [n, width]."""
        x = nn.functional.linear(pixels.flatten(1), self.proj.weight.flatten(1))
        return x + torch.cat([self._position(*grid) for grid in grids]).to(x.dtype)

    def _position(self, frames: int, rows: int, columns: int) -> Tensor:
        table: Tensor = self.pos_emb.weight
        if (rows, columns) != tuple(table.shape[:2]):
            channels_first = table.permute(2, 0, 1).unsqueeze(0)
            resized = nn.functional.interpolate(channels_first, size=(rows, columns), mode="bilinear")
            table = resized.squeeze(0).permute(1, 2, 0)
        space = table.reshape(rows * columns, -1)
        if frames == 1:
            return space
        half = table.shape[-1] // 2
        kind = wide(table.dtype)
        frequency = TIME_BASE ** (-torch.arange(half, dtype=kind, device=table.device) / half)
        angle = torch.arange(frames, dtype=kind, device=table.device).view(-1, 1) * frequency
        time = torch.cat([angle.sin(), angle.cos()], dim=-1).to(table.dtype)
        return (space.unsqueeze(0) + time.unsqueeze(1)).reshape(frames * rows * columns, -1)


def rotation(grids: Grids, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [n, width / 2] of the 2-D rotary embedding for head width `width`.

    Adjacent channels are one complex number; number 2i turns with the column, number 2i + 1 with the row, at
    frequency 10000^(-4i / width).
    """
    frequency = ROPE_BASE ** (-4.0 * torch.arange(width // 4, dtype=dtype, device=device) / width)
    angles = []
    for frames, rows, columns in grids:
        row = torch.arange(rows, dtype=dtype, device=device).view(-1, 1, 1).expand(rows, columns, 1)
        column = torch.arange(columns, dtype=dtype, device=device).view(1, -1, 1).expand(rows, columns, 1)
        both = torch.stack([column * frequency, row * frequency], dim=-1)
        angles.append(both.reshape(rows * columns, -1).repeat(frames, 1))
    angle = torch.cat(angles)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, width], cos and sin [n, width / 2] -> x turned, in x's dtype."""
    real, imaginary = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class _MLP(nn.Module):
    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.fc0 = Weight(config.vt_intermediate_size, config.vt_hidden_size, dtype=dtype, device=device)
        self.fc1 = Weight(config.vt_hidden_size, config.vt_intermediate_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.gelu(nn.functional.linear(x, self.fc0.weight), approximate="tanh")
        return nn.functional.linear(inner, self.fc1.weight)


class _Block(nn.Module):
    """x += wo attention(norm0(x)); x += mlp(norm1(x))."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.heads = config.vt_num_attention_heads
        self.norm0 = RMSNorm(width, _norm_eps(dtype), **kind)
        self.norm1 = RMSNorm(width, _norm_eps(dtype), **kind)
        self.wqkv = Weight(3 * inner, width, **kind)
        self.wo = Weight(width, inner, **kind)
        self.mlp = _MLP(config, **kind)

    def forward(self, x: Tensor, lengths: list[int], cos: Tensor, sin: Tensor) -> Tensor:
        qkv = nn.functional.linear(self.norm0(x), self.wqkv.weight).view(len(x), 3, self.heads, -1)
        q, k, v = _rotate(qkv[:, 0], cos, sin), _rotate(qkv[:, 1], cos, sin), qkv[:, 2]
        pieces = [
            nn.functional.scaled_dot_product_attention(*(part.transpose(0, 1).unsqueeze(0) for part in image))
            for image in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
        attended = torch.cat([piece.squeeze(0).transpose(0, 1).flatten(1) for piece in pieces])
        x = x + nn.functional.linear(attended, self.wo.weight)
        return x + self.mlp(self.norm1(x))


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.blocks = nn.ModuleList(_Block(config, **kind) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, _norm_eps(dtype), **kind)


class VisionTower(nn.Module):
    """MoonViT-V2. Parameters carry the official names under `vision_tower`."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(config, dtype=dtype, device=device)
        self.encoder = _Encoder(config, dtype=dtype, device=device)
        self._head_width = config.qkv_hidden_size // config.vt_num_attention_heads
        self._merge = config.merge_kernel_size

    def forward(self, pixels: Tensor, grids: Grids) -> list[Tensor]:
        """pixels [n, 3, p, p] of all images -> per image [rows, 4, width], 4 = merged patches, row by row."""
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        x = self.patch_embed(pixels, grids)
        cos, sin = rotation(grids, self._head_width, wide(x.dtype), x.device)
        for block in self.encoder.blocks:
            x = block(x, lengths, cos, sin)
        x = self.encoder.final_layernorm(x)
        return [self._merged(image, grid) for image, grid in zip(x.split(lengths), grids, strict=True)]

    def _merged(self, image: Tensor, grid: tuple[int, int, int]) -> Tensor:
        frames, rows, columns = grid
        down, right = self._merge
        blocks = image.view(frames, rows // down, down, columns // right, right, -1).mean(0)
        return blocks.transpose(1, 2).reshape(-1, down * right, image.shape[-1])


class Projector(nn.Module):
    """Merged patches to rows of the language model. Parameters carry the official names under `mm_projector`."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        merged = config.mm_hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        self.proj = nn.ModuleDict(
            {"0": Weight(merged, merged, **kind), "2": Weight(config.text_hidden_size, merged, **kind)}
        )
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps, **kind)

    def forward(self, merged: Tensor) -> Tensor:
        """[rows, 4, width] -> [rows, H]."""
        inner = nn.functional.gelu(nn.functional.linear(merged.flatten(1), self.proj["0"].weight))  # type: ignore[arg-type]
        return self.post_norm(nn.functional.linear(inner, self.proj["2"].weight))  # type: ignore[arg-type]


def check_grids(grid_thws: Tensor, pixels: Tensor, config: VisionConfig) -> list[tuple[int, int, int]]:
    """grid_thws [images, 3] as tuples. Raises ValueError when they do not describe `pixels`."""
    patch = (3, config.patch_size, config.patch_size)
    if pixels.dim() != 4 or tuple(pixels.shape[1:]) != patch:
        raise ValueError(f"pixel_values must be [patches, {', '.join(map(str, patch))}]; got {tuple(pixels.shape)}")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thws.tolist()]
    down, right = config.merge_kernel_size
    for t, h, w in grids:
        if not 1 <= t <= MAX_FRAMES or h < 1 or w < 1 or h % down or w % right:
            raise ValueError(
                f"grid_thws has (frames, rows, columns) = ({t}, {h}, {w}); frames must be 1..{MAX_FRAMES}, "
                f"rows a multiple of {down} and columns of {right}"
            )
    total = sum(t * h * w for t, h, w in grids)
    if total != len(pixels):
        raise ValueError(f"grid_thws describes {total} patches; pixel_values has {len(pixels)}")
    return grids
