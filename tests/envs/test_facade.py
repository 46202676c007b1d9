"""What the folder of environments exports is there, and none of it needs torch or ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
for name in module.__all__:
    getattr(module, name)
assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
assert not {"torch", "ray"} & sys.modules.keys()
"""


@pytest.mark.parametrize("room", ["envs", "envs.sandbox", "envs.gateway", "envs.harness", "envs.judge"])
def test_every_exported_name_is_there_without_torch_and_ray(room: str) -> None:
    subprocess.run([sys.executable, "-P", "-c", PROGRAM, f"k3rl.{room}"], check=True)
