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

from k3rl.kernels import (
    gated_norm_kernels,
    kda_autograd,
    kda_backward,
    kda_decode_kernels,
    kda_decode_step,
    kda_forward,
    ptxas,
    short_conv_kernels,
)

INTEGERS = {"chunk_start", "chunk_len", "chunk_offset", "segment_offset", "read_index", "write_index", "index", "span"}
INTEGERS |= {"ends", "chunk_sequence", "chunk_rest", "start", "length", "offset", "sequence_out", "rest_out"}
FLOAT32 = {"A_log", "dt_bias", "decay", "decay_out", "S0", "S_end", "starts", "norms", "norm_weight", "state_pool"}
FLOAT32 |= {"dS_end", "dS0", "dbeta", "dbias_rows", "drate_rows", "fading", "along", "wq", "wk", "wv"}
FLOAT32 |= {"row_keys", "row_updates", "row_decay", "w_a", "w_b", "w_c", "wa", "wb", "wc", "weight", "dweight_rows"}
SCALARS = {"lower_bound", "scale", "eps"}
COUNTS = re.compile(r".*(_t|_h|_stride)$|H|n|most|C|tokens|row|channels|width|steps")
# Types that a name has in one kernel only.
OWN_TYPES = {("merge_kernel", "ends"): "*fp32"}

K, C = {"K": 128}, {"C": kda_forward.CHUNK}
SCAN = K | C | {"HAS_S0": True, "SAVE": False, "TRANSITION": False, "V": 128, "BV": 64, "STAGES": 3}
GRADIENTS = K | C | {"KB": 64, "BLOCK": 16}
STEP = {"D": 128, "ROWS": 16, "BF16": True, "POOL_BF16": True, "BV": 64, "AHEAD": 0, "DEFERRED": False, "TILED": False}
LATE = STEP | {"DEFERRED": True, "AHEAD": 1}
CONV = {"HAS_HISTORY": True, "BF16": True}
NORM = {"D": 128, "BF16": True}


def _options(launch: dict, **names: str) -> tuple[dict, dict]:
    """The constants (by their name in the kernel) and compile options among a launcher's settings."""
    constants = {constant: launch[name] for name, constant in names.items()}
    return constants, {name: launch[name] for name in ("num_warps", "maxnreg") if name in launch}


def _conv(kernel, launch: dict):
    constants, options = _options(launch, columns="COLUMNS", stages="STAGES", wide="WIDE")
    return kernel, CONV | constants, options


CONFIGURATIONS = {
    "chunk-table": (kda_forward.chunk_table_kernel, {"WHERE": True, "N": 16, "CHUNKS": 128}, {}),
    "zero-tail": (kda_forward.zero_tail_kernel, {"ROWS": 32, "WIDTH": 1024}, {}),
    "prepare": (kda_forward.prepare_kernel, K | C | {"SAVE": False, "BLOCK": 16}, {"maxnreg": 168}),
    "prepare-save": (kda_forward.prepare_kernel, K | C | {"SAVE": True, "BLOCK": 16}, {"maxnreg": 168}),
    "scan": (kda_forward.scan_kernel, SCAN, {}),
    "scan-save": (kda_forward.scan_kernel, SCAN | {"SAVE": True}, {}),
    "scan-transition": (kda_forward.scan_kernel, SCAN | {"HAS_S0": False, "TRANSITION": True}, {}),
    "merge": (kda_forward.merge_kernel, K | {"HAS_S0": True, "V": 128, "BV": 64}, {"num_warps": 8}),
    "reverse-scan": (
        kda_backward.reverse_scan_kernel,
        K | C | {"HAS_DS": True, "V": 128, "BV": 64, "STAGES": 3},
        {},
    ),
    "state-gradients": (
        kda_backward.state_gradients_kernel, K | C | {"V": 128}, {"num_warps": kda_autograd.GRADIENT_WARPS[0]},
    ),
    "input-gradients": (
        kda_backward.input_gradients_kernel, GRADIENTS, {"num_warps": kda_autograd.GRADIENT_WARPS[1]},
    ),
    "input-gradients-8-warps": (kda_backward.input_gradients_kernel, GRADIENTS, {"num_warps": 8}),
    "decode": (kda_decode_kernels.decode_kernel, {"D": 128, "BF16": True, "POOL_BF16": True, "EARLY": False}, {}),
    "decode-early": (kda_decode_kernels.decode_kernel, {"D": 128, "BF16": True, "POOL_BF16": True, "EARLY": True}, {}),
    "step": (kda_decode_step.step_kernel, STEP | {"AHEAD": 1}, {}),
    "step-all-at-once": (kda_decode_step.step_kernel, STEP | {"AHEAD": 2}, {}),
    "step-8-warps": (kda_decode_step.step_kernel, STEP | {"AHEAD": 2, "TILED": True}, {"num_warps": 8}),
    "step-16-warps": (
        kda_decode_step.step_kernel, STEP | {"AHEAD": 1, "BV": 128, "TILED": True}, {"num_warps": 16},
    ),
    "step-32": (kda_decode_step.step_kernel, STEP | {"BV": 32, "AHEAD": 1}, {}),
    "step-32-two-ahead": (kda_decode_step.step_kernel, STEP | {"BV": 32, "AHEAD": 2}, {}),
    "deferred": (kda_decode_step.step_kernel, LATE, {}),
    "deferred-32": (kda_decode_step.step_kernel, LATE | {"BV": 32}, {"maxnreg": 168}),
    "deferred-16-warps": (kda_decode_step.step_kernel, LATE | {"BV": 128, "TILED": True}, {"num_warps": 16}),
    "flush": (kda_decode_step.flush_kernel, {"D": 128, "BV": 64, "ROWS": 16}, {}),
    "conv": _conv(short_conv_kernels.forward_kernel, short_conv_kernels.FORWARD),
    "conv-wide": _conv(short_conv_kernels.forward_kernel, short_conv_kernels.FORWARD | {"wide": True}),
    "conv-backward": _conv(short_conv_kernels.backward_kernel, short_conv_kernels.BACKWARD),
    "history": (
        short_conv_kernels.history_kernel,
        {"PACKED": True, "HAS_HISTORY": True, "COLUMNS": 1024, "BF16": True},
        {},
    ),
    "norm": (gated_norm_kernels.forward_kernel, NORM | {"ROWS": gated_norm_kernels.ROWS_FORWARD}, {}),
    "norm-backward": (
        gated_norm_kernels.backward_kernel, NORM | {"ROWS": 32, "STAGES": 4, "MERGED": False}, {"num_warps": 8},
    ),
    "norm-backward-one-exchange": (
        gated_norm_kernels.backward_kernel, NORM | {"ROWS": 32, "STAGES": 4, "MERGED": True}, {"num_warps": 8},
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
