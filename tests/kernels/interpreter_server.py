"""Runs scripts under Triton's interpreter, each in a process forked from one that has imported what they need.

    TRITON_INTERPRET=1 python tests/kernels/interpreter_server.py

One JSON list in, a script and its arguments; one out, the exit status and the last of what the script wrote.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import sys
import tempfile

import hypothesis  # noqa: F401
import quick_interpreter
import torch
import torch.fx.experimental.symbolic_shapes

import k3rl.kernels


def serve() -> None:
    torch.set_num_threads(1)
    for module in pkgutil.iter_modules(k3rl.kernels.__path__):
        importlib.import_module(f"k3rl.kernels.{module.name}")
    quick_interpreter.quicken()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        with tempfile.TemporaryFile() as written:
            child = os.fork()
            if child == 0:
                _run(json.loads(line), written.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            written.seek(0)
            print(json.dumps([status, written.read().decode(errors="replace")[-2000:]]), flush=True)


def _run(words: list[str], output: int) -> None:
    """Ends this process as the script ends."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
