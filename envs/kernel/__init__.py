"""`kernel`: make an operator faster without making it wrong, from element-wise to MXFP4 experts.

operators/   the ladder: tensors, sizes, contents, meaning in float64, floor;  experts/ the C that is worth 0.5
sandboxed/   task files in torch, experts in Triton, and what runs inside sandboxes
tasks        splits, shapes, prompts;  collection: a user's folder of task files
env          the workspace and the tools of an agent;  source: which files a submission is
driver, toolchain   C: built, run and counted by cachegrind;  python: Triton interpreted, numba
gpu, device  Triton and CUDA on a GPU: compiled apart, launched and timed by a process of ours
compare, reward, grader   right or not, what it costs, what that is worth;  hacks: what must not pay
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3rl.config import ConfigError
from k3rl.envs.base import Env, Environment
from k3rl.envs.harness import AnyHarness, HarnessEnv, harness_of
from k3rl.envs.kernel.collection import Collection
from k3rl.envs.kernel.env import agentic
from k3rl.envs.kernel.grader import KernelRubric
from k3rl.envs.kernel.hacks import ORACLE, hacks, null, oracle
from k3rl.envs.kernel.operators import LADDER
from k3rl.envs.kernel.reward import UNTIMED
from k3rl.envs.kernel.tasks import FILE, NAME, KernelLadder, Language, practice
from k3rl.envs.kernel.toolchain import DEBIAN_PACKAGES, KernelToolsMissing

__all__ = [
    "DEBIAN_PACKAGES",
    "LADDER",
    "Collection",
    "KernelLadder",
    "KernelRubric",
    "KernelToolsMissing",
    "environment",
    "hacks",
    "null",
    "oracle",
    "practice",
]


def environment(
    *,
    language: Language = "c",
    device: str = "cpu",
    wall_s: float | None = None,
    folder: str | None = None,
    provider: str = "bwrap",
    harness: AnyHarness | Mapping[str, Any] | None = None,
) -> Environment:
    """The environment.

    language: "c" (judged by counted instructions), "triton", "numba", or "cuda"; device: "cpu", or "cuda" for Triton
    and CUDA, which are then timed. wall_s: a task's budget in seconds, by default an hour and for Attention Residuals
    24 hours. folder: tasks from a folder of files with `Model`, `get_inputs`, `get_init_inputs` in place of the ladder.
    provider: sandboxes that score submissions while an agent works. harness: how the policy may act.
    """
    if language not in FILE or device not in ("cpu", "cuda"):
        raise ConfigError(f"kernels are written in {', '.join(FILE)} for cpu or cuda; got {language!r} for {device!r}")
    if (device == "cuda") != (language == "cuda") and (language != "triton" or folder is not None):
        raise ConfigError(f"kernels in {language} do not run on {device!r}; triton runs on both, cuda on a GPU only")
    config = harness_of(harness)
    parts = agentic(language, provider, files=folder is not None)

    def make_env() -> Env:
        return HarnessEnv(parts, config)

    timed = folder is None and (language == "c" or device == "cuda")
    return Environment(
        name=NAME,
        description="operators to be made faster and kept right, to Attention Residuals and MXFP4 experts; by cost",
        source=KernelLadder(language, device, wall_s) if folder is None else Collection(folder),
        make_env=make_env,
        grader=KernelRubric,
        oracle=oracle if folder is None else None,
        no_oracle="" if folder is None else "nobody wrote right kernels for the files of this folder",
        null=null,
        hacks=hacks,
        domain="code",
        oracle_expected=ORACLE if timed else UNTIMED,
    )
