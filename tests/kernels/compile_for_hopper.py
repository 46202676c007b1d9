"""Compiles one kernel configuration for sm_90a without a GPU and prints its resources as JSON.

    python tests/kernels/compile_for_hopper.py NAME

ptxas is the one that Triton would use; its report gives registers and spills.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3rl.kernels import kda_backward, kda_decode_kernels, kda_decode_step, kda_forward, ptxas

INTEGERS = {"chunk_start", "chunk_len", "chunk_offset", "segment_offset", "read_index", "write_index", "index", "span"}
FLOAT32 = {
    "A_log",
    "dt_bias",
    "decay",
    "decay_out",
    "S0",
    "S_end",
    "ends",
    "starts",
    "norms",
    "norm_weight",
    "state_pool",
    "row_keys",
    "row_updates",
    "row_decay",
}
FLOAT32 |= {"dS_end", "dS0", "dbeta", "dbias_rows", "drate_rows", "fading", "along", "wq", "wk", "wv"}
SCALARS = {"lower_bound", "scale", "eps"}
STRIDE = re.compile(r".*(_t|_h|_stride)$|H$")
STEP = {"D": 128, "ROWS": 16, "BF16": True, "POOL_BF16": True, "AHEAD": 1}
K, C = {"K": 128}, {"C": kda_forward.CHUNK}
SCAN = K | C | {"HAS_S0": True, "SAVE": False, "TRANSITION": False, "V": 128, "BV": 64, "STAGES": 3}
CONFIGURATIONS = {
    "prepare": (kda_forward.prepare_kernel, K | C | {"SAVE": True, "BLOCK": 16}, {"maxnreg": 168}),
    "scan": (kda_forward.scan_kernel, SCAN, {}),
    "scan-save": (kda_forward.scan_kernel, SCAN | {"SAVE": True}, {}),
    "scan-transition": (kda_forward.scan_kernel, SCAN | {"HAS_S0": False, "TRANSITION": True}, {}),
    "merge": (kda_forward.merge_kernel, K | {"HAS_S0": True, "V": 128, "BV": 64}, {}),
    "reverse-scan": (
        kda_backward.reverse_scan_kernel,
        K | C | {"HAS_DS": True, "V": 128, "BV": 64, "STAGES": 3},
        {},
    ),
    "state-gradients": (kda_backward.state_gradients_kernel, K | C | {"V": 128}, {}),
    "input-gradients": (kda_backward.input_gradients_kernel, K | C | {"KB": 64, "BLOCK": 16}, {}),
    "decode": (kda_decode_kernels.decode_kernel, {"D": 128, "BF16": True, "POOL_BF16": True, "EARLY": False}, {}),
    "step": (kda_decode_step.step_kernel, STEP | {"BV": 64, "DEFERRED": False}, {}),
    "step-32": (kda_decode_step.step_kernel, STEP | {"BV": 32, "DEFERRED": False}, {}),
    "step-early": (kda_decode_step.step_kernel, STEP | {"BV": 64, "DEFERRED": False, "AHEAD": 2}, {}),
    "deferred": (kda_decode_step.step_kernel, STEP | {"BV": 64, "DEFERRED": True}, {}),
    "deferred-32": (kda_decode_step.step_kernel, STEP | {"BV": 32, "DEFERRED": True}, {}),
    "flush": (kda_decode_step.flush_kernel, {"D": 128, "BV": 64, "ROWS": 16}, {}),
}


def type_of(name: str) -> str:
    """Triton type of a kernel argument, by its name."""
    if name in INTEGERS:
        return "*i32"
    if name in SCALARS:
        return "fp32"
    if STRIDE.fullmatch(name):
        return "i32"
    return "*fp32" if name in FLOAT32 else "*bf16"


def main(name: str) -> None:
    """Compile, assemble and report."""
    kernel, constants, options = CONFIGURATIONS[name]
    signature, values, attributes = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[place,] = "constexpr", constants[argument]
            continue
        signature[argument] = type_of(argument)
        if signature[argument].startswith("*") or signature[argument] == "i32":
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options)
    text = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(text)
        command = [ptxas.path(), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(Path(folder) / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    result = {"registers": int(re.search(r"Used (\d+) registers", report)[1])}
    result["spill_bytes"] = int(re.search(r"(\d+) bytes spill stores", report)[1])
    result["shared_bytes"] = compiled.metadata.shared
    result |= {word: text.count(word + ".") for word in ("wgmma.mma_async", "mma.sync")}
    result["wgmma"] = result.pop("wgmma.mma_async")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
