"""Compiles kernel configurations for sm_90a without a GPU and prints the resources of each as one line of JSON.

    python tests/kernels/compile_for_hopper.py NAME ...

Each is assembled by the ptxas that Triton would use and by every one in K3RL_PTXAS (paths, separated by colons); their
reports give registers and spills. Triton's own launch options (warps, register cap) are those of the launchers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3rl.kernels import limits, ptxas
from k3rl.kernels.gemm import grouped_skinny_kernels, skinny_kernels, w4_grouped_skinny_kernels
from k3rl.kernels.kda import backward_kernels, decode_kernels, decode_split_kernels, forward_kernels, short_conv_kernels
from k3rl.kernels.mla import (
    chunked_prefill_kernels,
    decode_attention_kernels,
    decode_step_kernels,
    heads_kernels,
    max_logits_kernels,
)
from k3rl.kernels.moe import (
    add_groups_kernels,
    decode_routing_kernels,
    gather_rows_kernels,
    load_counts_kernels,
    mxfp8_kernels,
    situ_kernels,
    train_routing_kernels,
)
from k3rl.kernels.norm import attn_res_kernels, gated_norm_kernels, rms_norm_kernels
from k3rl.kernels.optim import add_many_kernels, muon_kernels, symmetric_kernels
from k3rl.kernels.sampling import cut_kernels, draw_kernels, logits_slice_kernels

INTEGERS = {
    "wanted",
    "chunk_start",
    "chunk_len",
    "chunk_offset",
    "segment_offset",
    "read_index",
    "write_index",
    "index",
    "span",
}
INTEGERS |= {
    "arrivals",
    "ends",
    "chunk_sequence",
    "chunk_rest",
    "start",
    "length",
    "offset",
    "sequence_out",
    "rest_out",
}
FLOAT32 = {"A_log", "dt_bias", "decay", "decay_out", "S0", "S_end", "starts", "norms", "norm_weight", "state_pool"}
FLOAT32 |= {"dS_end", "dS0", "dbeta", "dbias_rows", "drate_rows", "fading", "along", "wq", "wk", "wv"}
FLOAT32 |= {"row_keys", "row_updates", "row_decay", "w_a", "w_b", "w_c", "wa", "wb", "wc", "weight", "dweight_rows"}
FLOAT32 |= {"sums", "total", "gradient", "momentum", "largest", "squares", "master", "parts_of_o", "dnorm_rows"}
FLOAT32 |= {f"{kind}{number}" for kind in "bad" for number in range(8)} | {"state", "parts", "routed", "dots"}
SCALARS = {"lower_bound", "scale", "eps", "norm_eps", "gate_cap", "up_cap", "inverse_beta", "inverse_linear"}
SCALARS |= {"rate", "scaling", "alpha", "gamma", "q_eps", "c_eps"}
COUNTS = re.compile(
    r".*(_t|_h|_stride|_size)$|H|n|most|C|tokens|row|rows|channels|width|steps|size|groups|count|experts|outputs|heads|blocks"
)
INTEGERS |= {"first_key", "counts", "totals", "live"}
ATTENTION = ("decode_attention_kernel", "chunked_prefill_kernel")
# Types that a name has in some kernels only.
OWN_TYPES = {("finish_kernel", "decay"): "fp32", ("merge_kernel", "ends"): "*fp32", ("normed_kernel", "r"): "*fp32"}
OWN_TYPES |= {("normed_gradient_kernel", "r"): "*fp32", ("add_groups_kernel", "rows"): "*i32"}
OWN_TYPES |= {("momentum_kernel", "parts"): "i32", ("unit_kernel", "parts"): "i32", ("finish_kernel", "block"): "i32"}
OWN_TYPES |= {("choose_kernel", name): "*fp32" for name in ("logits", "bias", "weights")}
OWN_TYPES |= {("sort_kernel", name): "*i64" for name in ("ids", "token", "inverse")}
OWN_TYPES |= {("grouped_skinny_kernel", "rows"): "*bf16", ("grouped_skinny_kernel", "token"): "*i64"}
OWN_TYPES |= {("w4_grouped_skinny_kernel", "token"): "*i64"}
OWN_TYPES |= {(kernel, "codes"): "*i16" for kernel in ("w4_grouped_skinny_kernel", "decode_kernel")}
OWN_TYPES |= {(kernel, "scales"): "*i32" for kernel in ("w4_grouped_skinny_kernel", "decode_kernel")}
OWN_TYPES |= {("w4_grouped_skinny_kernel", "rows"): "*bf16"}
OWN_TYPES |= {(kernel, name): "*i64" for kernel in ATTENTION for name in ("table", "past")}
OWN_TYPES |= {(kernel, name): "*fp32" for kernel in (*ATTENTION, "merge_kernel") for name in ("parts", "sums")}
OWN_TYPES |= {("query_kernel", "place"): "*i64"} | {("values_kernel", name): "*fp32" for name in ("parts", "sums")}
OWN_TYPES |= {("sum_kernel", "rows"): "*bf16", ("largest_kernel", "tiles"): "*fp32"}
OWN_TYPES |= {("draw_kernel", "logits"): "*fp32", ("draw_kernel", "tokens"): "i32"}
OWN_TYPES |= {("draw_kernel", name): "*fp64" for name in ("temperature", "uniform", "out")}
OWN_TYPES |= {("choose_kernel", "ids"): "*i64", ("sum_kernel", "inverse"): "*i64", ("sum_kernel", "weights"): "*fp32"}
OWN_TYPES |= {("add_many_kernel", "table"): "*i64"}
MANY = ("choose_many_kernel", "choose_gradient_kernel", "places_kernel", "block_counts_kernel")
OWN_TYPES |= {(kernel, name): "*i64" for kernel in MANY for name in ("ids", "order", "inverse", "token")}
OWN_TYPES |= {(kernel, name): "*fp32" for kernel in MANY[:2] for name in ("logits", "bias", "grad", "scores", "cutoff")}
OWN_TYPES |= {(kernel, "starts"): "*i32" for kernel in ("expert_ends_kernel", "places_kernel")}
OWN_TYPES |= {("places_kernel", name): "*fp32" for name in ("weights", "routed")}
OWN_TYPES |= {("choose_many_kernel", "weights"): "*fp32", ("load_counts_kernel", "loads"): "*i64"}
OWN_TYPES |= {("load_counts_kernel", name): "*fp32" for name in ("scores", "cutoff", "bias", "counted")}
OWN_TYPES |= {("load_counts_kernel", name): "*u8" for name in ("valid", "seen", "changed", "nan")}
OWN_TYPES |= {("symmetric_kernel", name): "i32" for name in ("r", "k", "p_n", "p_r", "p_k")}
OWN_TYPES |= {("symmetric_kernel", "beta"): "fp32"}
SLICES = ("add_slice_kernel", "slice_gradient_kernel")
OWN_TYPES |= {(kernel, name): "*fp32" for kernel in SLICES for name in ("logits", "most", "weighted", "target", "grad")}
OWN_TYPES |= {(kernel, "targets"): "*i64" for kernel in SLICES} | {(kernel, "start"): "i32" for kernel in SLICES}
OWN_TYPES |= {(SLICES[1], "normalizer"): "*fp32"}
CUT = ("scan", "total", "search", "pick", "edge", "settle", "finish", "list")
CUT_TYPES = {
    "*fp64": (
        "heat",
        "min_p",
        "largest",
        "finite",
        "maxima",
        "sums",
        "found",
        "mass",
        "targets",
        "uniform",
        "top_p",
        "out",
    ),
    "*i64": ("bases", "above", "equal", "stays", "starts", "ranks", "kept", "rows", "top_k"),
    "*fp32": ("logits",),
    "*i32": ("ids",),
    "i32": ("parts", "shift"),
}
OWN_TYPES |= {(f"{kernel}_kernel", name): kind for kernel in CUT for kind, names in CUT_TYPES.items() for name in names}
OWN_TYPES |= {("gather_kernel", "index"): "*i64", ("gather_kernel", "rows"): "*bf16"}

K, C = {"K": 128}, {"C": forward_kernels.CHUNK}
SCAN = K | C | {"HAS_S0": True, "SAVE": False, "TRANSITION": False, "V": 128, "BV": 64, "STAGES": 3}
GRADIENTS = K | C | {"KB": 64, "BLOCK": 16, "EARLY": True}
UNBOUNDED = {"lower_bound": None, "BLOCK": 8}
PREPARE = K | C | {"SAVE": False, "BLOCK": 16, "EARLY": True}
STEP = {"D": 128, "BV": 64, "ROWS": 16, "BF16": True, "POOL_BF16": True, "PENDING": False, "DEFERRED": False}
SPLIT = {name: value for name, value in STEP.items() if name != "DEFERRED"}
EIGHT, FOUR = ({"BV": 128 // parts} for parts in decode_kernels.PARTS)
CONV = {"HAS_HISTORY": True, "BF16": True}
NORM = {"D": 128, "BF16": True}
MUON = {"NESTEROV": True, "CHUNK": muon_kernels.CHUNK}
ROUNDING = {"CARRY": mxfp8_kernels.CARRY["ceil"], "CLAMP": False, "GROUPS": 32, "BF16": True}
SITU = {"WIDTH": 3072, "COLUMNS": 512, "ROWS": 2, "BF16": True}
GROWING = {"ADDED": True, "ADDED_LAST": True, "HOLD": True, "EARLY": False}
WIDE, WIDEST = ({"WIDTH": width, "BLOCK": block, "BF16": True} for width, block in ((1024, 1024), (7168, 8192)))
SUMMED, GROWN = ({"ADD": parts > 0, "PARTS": parts, "FRESH": False} for parts in (0, 8))
CHOOSE = {"RENORMALIZE": True, "RECORDED": False, "PARTS": 1}
LATENTS = {"Z": 256, "ROPE": 64, "HEADS": 16, "TOKENS": 64, "PAGE": 64, "STAGES": 2}
CHUNKS = {"Z": 512, "ROPE": 64, "TILE": chunked_prefill_kernels.TILE, "TOKENS": 32, "PAGE": 64, "STAGES": 2}
SYMMETRIC = {"EVEN": True, "TILE": 128, "DEPTH": symmetric_kernels.DEPTH, "p_k": 1}
HEADS = {"NOPE": 128, "ROPE": 64, "VALUE": 128}
QUERIES = {"RANK": 384, "BLOCK": 512, "DEPTH": 128, "Z": 256, "NOPE": 128, "ROPE": 64, "ROWS": 16, "STAGES": 3}
VALUES = {"Z": 256, "V": 128, "COLUMNS": decode_step_kernels.COLUMNS, "ROWS": 16, "SPLITS": 4, "DEPTH": 64}
SKINNY_WARPS = {"num_warps": skinny_kernels.SKINNY_LAUNCH["num_warps"]}
GROUPED = {"STRIP": grouped_skinny_kernels.STRIP, "DEPTH": 128, "BF16": True}


def _options(launch: dict, **names: str) -> tuple[dict, dict]:
    """The constants (by their name in the kernel) and compile options among a launcher's settings."""
    constants = {constant: launch[name] for name, constant in names.items()}
    return constants, {name: launch[name] for name in ("num_warps", "maxnreg") if name in launch}


def _conv(kernel, launch: dict):
    constants, options = _options(launch, columns="COLUMNS", stages="STAGES")
    return kernel, CONV | constants, options


def _w4_grouped_skinny(rows: int, width: int, unit: bool):
    names = {"rows": "ROWS", "extra": "EXTRA", "rest": "REST", "strip": "STRIP", "stages": "STAGES", "blocks": "BLOCKS"}
    constants, options = _options(w4_grouped_skinny_kernels.LAUNCHES[rows], **names)
    own = {
        "WIDTH": width,
        "GATHER": unit,
        "UNIT": unit,
        "ROUND": unit,
        "CARRY": mxfp8_kernels.CARRY["ceil"],
        "CLAMP": False,
        "AHEAD": True,
    }
    return w4_grouped_skinny_kernels.w4_grouped_skinny_kernel, constants | own, options


def _skinny(width: int, even: bool, rows: int) -> dict[str, int]:
    own = {name.upper(): skinny_kernels.SKINNY_LAUNCH[name] for name in ("strip", "depth", "stages")}
    return {"WIDTH": width, "EVEN": even, "ADD": not even, "ROWS": rows} | own


def _cut(kernel: str, **given: bool):
    """Of a draw from K3's vocabulary, in chunks, whose number is rounded up to a power of two."""
    sizes = {"CHUNK": cut_kernels.CHUNK, "PARTS": triton.next_power_of_2(-(-163_840 // cut_kernels.CHUNK))}
    constants = {name: sizes.get(name, value) for name, value in given.items()}
    return getattr(cut_kernels, f"{kernel}_kernel"), constants, {"num_warps": 8} if "CHUNK" in given else {}


LARGEST = _options(max_logits_kernels.LAUNCH, rows="ROWS", keys="KEYS", stages="STAGES")
CONFIGURATIONS = {
    "chunk-table": (forward_kernels.chunk_table_kernel, {"WHERE": True, "N": 16, "CHUNKS": 128}, {}),
    "zero-tail": (forward_kernels.zero_tail_kernel, {"ROWS": 32, "WIDTH": 1024}, {}),
    "prepare": (forward_kernels.prepare_kernel, PREPARE, {"maxnreg": 168}),
    "prepare-save": (forward_kernels.prepare_kernel, PREPARE | {"SAVE": True}, {"maxnreg": 168}),
    "prepare-unbounded": (forward_kernels.prepare_kernel, PREPARE | UNBOUNDED, {"maxnreg": 168}),
    "prepare-save-unbounded": (
        forward_kernels.prepare_kernel, PREPARE | UNBOUNDED | {"SAVE": True}, {"maxnreg": 168},
    ),
    "scan": (forward_kernels.scan_kernel, SCAN, {}),
    "scan-save": (forward_kernels.scan_kernel, SCAN | {"SAVE": True}, {}),
    "scan-transition": (forward_kernels.scan_kernel, SCAN | {"HAS_S0": False, "TRANSITION": True}, {}),
    "merge": (forward_kernels.merge_kernel, K | {"HAS_S0": True, "V": 128, "BV": 64}, {"num_warps": 8}),
    "reverse-scan": (
        backward_kernels.reverse_scan_kernel,
        K | C | {"HAS_DS": True, "V": 128, "BV": 64, "STAGES": 3},
        {},
    ),
    "state-gradients": (
        backward_kernels.state_gradients_kernel, K | C | {"V": 128, "EARLY": True}, {},
    ),
    "input-gradients": (backward_kernels.input_gradients_kernel, GRADIENTS, {}),
    "input-gradients-unbounded": (backward_kernels.input_gradients_kernel, GRADIENTS | UNBOUNDED, {}),
    "decode": (decode_kernels.step_kernel, STEP, {}),
    "decode-unbounded": (decode_kernels.step_kernel, STEP | UNBOUNDED | {"PENDING": True}, {}),
    "decode-deferred-unbounded": (
        decode_kernels.step_kernel, STEP | UNBOUNDED | {"PENDING": True, "DEFERRED": True}, {},
    ),
    "decode-pending": (decode_kernels.step_kernel, STEP | {"PENDING": True}, {}),
    "decode-deferred": (decode_kernels.step_kernel, STEP | {"PENDING": True, "DEFERRED": True}, {}),
    "decode-split": (decode_split_kernels.split_kernel, SPLIT | FOUR, {}),
    "decode-split-unbounded": (decode_split_kernels.split_kernel, SPLIT | FOUR | UNBOUNDED | {"PENDING": True}, {}),
    "decode-split-pending": (decode_split_kernels.split_kernel, SPLIT | FOUR | {"PENDING": True}, {}),
    "decode-split-eight": (decode_split_kernels.split_kernel, SPLIT | EIGHT, {}),
    "decode-split-eight-pending": (decode_split_kernels.split_kernel, SPLIT | EIGHT | {"PENDING": True}, {}),
    "flush": (decode_kernels.flush_kernel, {"D": 128, "BV": 64, "ROWS": 16}, {}),
    "conv": _conv(short_conv_kernels.forward_kernel, short_conv_kernels.FORWARD),
    "conv-backward": _conv(short_conv_kernels.backward_kernel, short_conv_kernels.BACKWARD),
    "history": (
        short_conv_kernels.history_kernel,
        {"PACKED": True, "HAS_HISTORY": True, "COLUMNS": 1024, "BF16": True},
        {},
    ),
    "choose-1024": (
        decode_routing_kernels.choose_kernel,
        CHOOSE | {"E": 1024, "CHOICES": 16, "LANES": 16}, {"num_warps": 4},
    ),
    "choose-64": (
        decode_routing_kernels.choose_kernel,
        CHOOSE | {"E": 64, "CHOICES": 8, "LANES": 8, "PARTS": 8}, {"num_warps": 4},
    ),
    "sort-4096": (
        decode_routing_kernels.sort_kernel,
        {"CHOICES": 16, "ROWS": 4096}, {"num_warps": decode_routing_kernels.SORT_WARPS[1]},
    ),
    "sum-choices": (
        decode_routing_kernels.sum_kernel,
        {"CHOICES": 16, "COLUMNS": 4096, "BF16": True, "NORM": True}, {},
    ),
    "choose-many-1024": (
        train_routing_kernels.choose_many_kernel, CHOOSE | {"E": 1024, "TOKENS": 2, "CHOICES": 16, "LANES": 16}, {},
    ),
    "choose-gradient": (
        train_routing_kernels.choose_gradient_kernel,
        {"E": 64, "TOKENS": 32, "CHOICES": 8, "RENORMALIZE": True, "BF16": True}, {},
    ),
    "places": (
        train_routing_kernels.places_kernel,
        {"CHOICES": 8, "BLOCK": train_routing_kernels.BLOCK} | {"WEIGHTED": True}, {},
    ),
    "load-counts": (load_counts_kernels.load_counts_kernel, {"E": 64, "TOKENS": 32, "BINS": 1000, "VALID": True}, {}),
    "grouped-skinny-16": (
        grouped_skinny_kernels.grouped_skinny_kernel, GROUPED | {"ROWS": 16, "STAGES": 2, "GATHER": True}, {},
    ),
    "grouped-skinny-64": (
        grouped_skinny_kernels.grouped_skinny_kernel, GROUPED | {"ROWS": 64, "STAGES": 3, "GATHER": False}, {},
    ),
    "chunked-prefill": (
        chunked_prefill_kernels.chunked_prefill_kernel,
        CHUNKS | {"HEADS": 12, "SPLITS": 4}, chunked_prefill_kernels.LAUNCH,
    ),
    "w4-grouped-skinny-16": _w4_grouped_skinny(16, 512, unit=True),
    "w4-grouped-skinny-96": _w4_grouped_skinny(96, 3584, unit=False),
    "w4-decode": (w4_grouped_skinny_kernels.decode_kernel, {"WIDTH": 3584, "STRIP": 64}, {}),
    "draw-4096": (draw_kernels.draw_kernel, {"V": 4096}, {"num_warps": 8}),
    "cut-scan": _cut("scan", CHUNK=True),
    "cut-total": _cut("total", PARTS=True),
    "cut-search-ranks": _cut("search", CHUNK=True, MASS=False),
    "cut-search-mass": _cut("search", CHUNK=True, MASS=True),
    "cut-pick": _cut("pick", PARTS=True),
    "cut-edge": _cut("edge", CHUNK=True),
    "cut-settle": _cut("settle", PARTS=True, LAST=False),
    "cut-settle-last": _cut("settle", PARTS=True, LAST=True),
    "cut-finish": _cut("finish", CHUNK=True, PARTS=True),
    "cut-list": _cut("list", CHUNK=True, PARTS=True),
    "decode-attention": (decode_attention_kernels.decode_attention_kernel, LATENTS | {"SPLITS": 1}, {}),
    "decode-attention-wide": (
        decode_attention_kernels.decode_attention_kernel, LATENTS | {"SPLITS": 4, "Z": 512, "HEADS": 32, "TOKENS": 32},
        {"num_warps": 8},
    ),
    "decode-attention-merge": (decode_attention_kernels.merge_kernel, {"Z": 512, "SPLITS": 32, "LANES": 32}, {}),
    "decode-step-queries": (decode_step_kernels.query_kernel, QUERIES, {"num_warps": decode_step_kernels.WARPS}),
    "decode-step-values": (decode_step_kernels.values_kernel, VALUES, {}),
    "split-k": (
        skinny_kernels.split_k_kernel,
        {"ROWS": 64, "STRIP": skinny_kernels.SPLIT_K_LAUNCH["strip"], "DEPTH": limits.SPLIT_K.depth}, {},
    ),
    "skinny": (
        skinny_kernels.skinny_kernel, _skinny(1024, True, 64), SKINNY_WARPS,
    ),
    "skinny-uneven": (
        skinny_kernels.skinny_kernel, _skinny(7168, False, 16), SKINNY_WARPS,
    ),
    "norm": (gated_norm_kernels.forward_kernel, NORM | {"ROWS": gated_norm_kernels.ROWS_FORWARD}, {}),
    "norm-backward": (
        gated_norm_kernels.backward_kernel, NORM | {"ROWS": 64, "STAGES": 3}, {"num_warps": 16},
    ),
    "add-many": (add_many_kernels.add_many_kernel, {"STEP": 8, "BLOCK": 8192, "BF16": True}, {"num_warps": 8}),
    "add-groups": (
        add_groups_kernels.add_groups_kernel, {"COUNTS": True, "BLOCK": add_groups_kernels.BLOCK}, {"num_warps": 8},
    ),
    "largest-logits": (
        max_logits_kernels.largest_kernel, {"D": 128, "REST": 64} | LARGEST[0], LARGEST[1],
    ),
    "muon-momentum": (muon_kernels.momentum_kernel, MUON | {"LIVE": True}, {"num_warps": 8}),
    "muon-momentum-wide": (
        muon_kernels.momentum_kernel, MUON | {"CHUNK": muon_kernels.WIDE_CHUNK, "LIVE": False}, {"num_warps": 8},
    ),
    "muon-unit": (muon_kernels.unit_kernel, MUON | {"PARTS": 32}, {"num_warps": 8}),
    "muon-unit-wide": (
        muon_kernels.unit_kernel,
        MUON | {"CHUNK": muon_kernels.WIDE_CHUNK, "PARTS": muon_kernels.MOST_PARTIALS},
        {"num_warps": 8},
    ),
    "muon-finish": (muon_kernels.finish_kernel, {"CHUNK": muon_kernels.CHUNK, "LIVE": True}, {"num_warps": 8}),
    "symmetric": (
        symmetric_kernels.symmetric_kernel, SYMMETRIC | {"GROWS": False},
        symmetric_kernels.LAUNCH[128],
    ),
    "symmetric-grown": (
        symmetric_kernels.symmetric_kernel, SYMMETRIC | {"GROWS": True},
        symmetric_kernels.LAUNCH[128],
    ),
    "mxfp4": (muon_kernels.mxfp4_kernel, {"ROWS": muon_kernels.ROWS}, {}),
    "rounding": (mxfp8_kernels.rounding_kernel, ROUNDING, {}),
    "situ": (situ_kernels.situ_kernel, ROUNDING | {"WIDTH": 256, "ROUND": False}, {}),
    "situ-rounded": (situ_kernels.situ_kernel, ROUNDING | {"WIDTH": 3072, "ROUND": True}, {}),
    "situ-gradient": (situ_kernels.situ_gradient_kernel, SITU | {"WEIGHTED": False, "DOTS": False}, {}),
    "situ-gradient-routed": (situ_kernels.situ_gradient_kernel, SITU | {"WEIGHTED": True, "DOTS": True}, {}),
    "gather": (
        gather_rows_kernels.gather_kernel,
        {"WIDTH": 512, "COLUMNS": 512, "ROWS": 4, "WEIGHTED": True, "BF16": True}, {},
    ),
    "heads-collect": (
        heads_kernels.collect_kernel, HEADS | {"COLUMNS": 256, "LAST": 64, "ROWS": 8, "BF16": True}, {},
    ),
    "normed": (rms_norm_kernels.normed_kernel, WIDE | {"ROWS": 1}, {"num_warps": 2}),
    "normed-gradient": (
        rms_norm_kernels.normed_gradient_kernel, WIDE | {"ROWS": 4, "STAGES": 3}, {"num_warps": 8},
    ),
    "normed-gradient-7168": (
        rms_norm_kernels.normed_gradient_kernel, WIDEST | {"ROWS": 1, "STAGES": 3}, {"num_warps": 8},
    ),
    "column-sums": (
        rms_norm_kernels.column_sums_kernel,
        {"WIDTH": 1024, "ROWS": 256, "COLUMNS": 16, "PRODUCTS": True, "BF16": True}, {},
    ),
    "mix": (attn_res_kernels.mix_kernel, WIDE | {"SOURCES": 5, "NORMED": False, "SAVE": True} | SUMMED, {}),
    "mix-normed": (attn_res_kernels.mix_kernel, WIDE | {"SOURCES": 5, "NORMED": True, "SAVE": False} | GROWN, {}),
    "mix-7168": (
        attn_res_kernels.mix_kernel, WIDEST | {"SOURCES": 9, "NORMED": False, "SAVE": True} | SUMMED,
        {"num_warps": 16},
    ),
    "mix-gradient-two": (attn_res_kernels.mix_gradient_kernel, WIDE | GROWING | {"SOURCES": 2, "EARLY": True}, {}),
    "mix-gradient": (attn_res_kernels.mix_gradient_kernel, WIDE | GROWING | {"SOURCES": 5}, {}),
    "mix-gradient-nine": (attn_res_kernels.mix_gradient_kernel, WIDE | GROWING | {"SOURCES": 9}, {}),
    "mix-gradient-7168": (
        attn_res_kernels.mix_gradient_kernel, WIDEST | GROWING | {"SOURCES": 9, "HOLD": False}, {"num_warps": 8},
    ),
    "logits-slice": (logits_slice_kernels.add_slice_kernel, {"COLUMNS": 1024}, {"num_warps": 4}),
    "logits-slice-gradient": (
        logits_slice_kernels.slice_gradient_kernel, {"COLUMNS": 1024, "BF16": True}, {"num_warps": 4},
    ),
}  # fmt: skip


def type_of(name: str, kernel: str = "") -> str:
    """Triton type of a kernel argument, by its name."""
    if (kernel, name) in OWN_TYPES:
        return OWN_TYPES[kernel, name]
    if name in INTEGERS:
        return "*i32"
    if name in SCALARS:
        return "fp32"
    if COUNTS.fullmatch(name):
        return "i32"
    return "*fp32" if name in FLOAT32 else "*bf16"


def compiled(kernel, constants: dict, options: dict):
    """The kernel compiled for sm_90a as a call with aligned tensors and strides would."""
    signature, values, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        argument = parameter.name
        if argument in constants:
            signature[argument], values[place,] = "constexpr", constants[argument]
            continue
        signature[argument] = type_of(argument, kernel.__name__)
        if signature[argument] != "fp32" and not parameter.do_not_specialize:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options)


def resources(name: str) -> dict[str, object]:
    """Registers, spills, shared memory and matrix instructions of one configuration, by assembler."""
    kernel = compiled(*CONFIGURATIONS[name])
    text = kernel.asm["ptx"]
    result = {"name": name, "shared_bytes": kernel.metadata.shared, "mma.sync": text.count("mma.sync.")}
    result |= {"wgmma": text.count("wgmma.mma_async."), "assemblers": {}}
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(text)
        for path in [ptxas.path(), *filter(None, os.environ.get("K3RL_PTXAS", "").split(":"))]:
            command = [path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(Path(folder) / "kernel.cubin")]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            version = ".".join(map(str, ptxas.version(path) or ()))
            result["assemblers"][version] = {
                "registers": int(re.search(r"Used (\d+) registers", report)[1]),
                "spill_bytes": int(re.search(r"(\d+) bytes spill stores", report)[1]),
            }
    return result


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(json.dumps(resources(wanted)))
