"""For a machine with a CUDA GPU: the reference's PTX against NumPy, without a sandbox (the PTX is ours).

Run as `PYTHONPATH=. python tests/envs/compiler/ptx_on_gpu.py`; prints one line a program, ends at the first wrong one.
"""

from __future__ import annotations

import asyncio
import sys

from k3rl.envs import compiler
from k3rl.envs.compiler import cuda
from k3rl.envs.compiler.evaluate import run_case
from k3rl.envs.compiler.grader import same_buffer
from k3rl.envs.compiler.ladder import milestone
from k3rl.envs.compiler.protocol import reference_answer, request_of


def main() -> int:
    """0 when every program is right."""
    if not cuda.available():
        print("no CUDA GPU here")
        return 3
    source = compiler.environment(gpu=True).source
    for split in ("train", "heldout"):
        for index in range(4):
            for case in source.get(split, index, 0, level=13).hidden["cases"]:
                text = reference_answer("ptx", request_of(milestone(13), case, 1))["ptx"]
                start, final, _ = run_case(case, 1)
                got = asyncio.run(cuda.run(text, case, start))
                right = got is not None and all(map(same_buffer, got, final))
                print(split, case["family"], "right" if right else "WRONG")
                if not right:
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
