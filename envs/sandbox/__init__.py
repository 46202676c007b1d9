"""Where untrusted programs run; what grades them lives with each environment.

base      the interface: Sandbox, SandboxProvider, limits, outcomes, errors
bwrap     the default provider, bubblewrap; unsafe: plain processes, never chosen unasked
programs  many tiny programs in one sandbox, with a server that forks (sandboxed/program_server.py)
remote    containers, pods and services, with a supervisor that goes with each request (sandboxed/supervisor.py)
cgroups   control groups (a namespace); leases: what a sandbox holds, and the reaper (a namespace, too)
launch    the process that starts the commands (launcher.py); local: what local sandboxes share
artifacts what may come out of a sandbox to be graded
"""

from k3rl.envs.sandbox import cgroups, leases
from k3rl.envs.sandbox.artifacts import ArtifactLimits, Artifacts, Refusal, collect
from k3rl.envs.sandbox.base import (
    ExecOutcome,
    ExecResult,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxLimits,
    SandboxProvider,
    SandboxSlow,
    SandboxUnavailable,
)
from k3rl.envs.sandbox.programs import (
    Call,
    ProgramJob,
    ProgramLimits,
    ProgramOutcome,
    ProgramRunner,
    ProgramStatus,
    same_value,
)
from k3rl.envs.sandbox.providers import SandboxConfig, provider_from, provider_named

__all__ = [
    "ArtifactLimits",
    "Artifacts",
    "Call",
    "ExecOutcome",
    "ExecResult",
    "ProgramJob",
    "ProgramLimits",
    "ProgramOutcome",
    "ProgramRunner",
    "ProgramStatus",
    "Refusal",
    "Sandbox",
    "SandboxConfig",
    "SandboxDied",
    "SandboxError",
    "SandboxLimits",
    "SandboxProvider",
    "SandboxSlow",
    "SandboxUnavailable",
    "cgroups",
    "collect",
    "leases",
    "provider_from",
    "provider_named",
    "same_value",
]
