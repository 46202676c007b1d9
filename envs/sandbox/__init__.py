"""Where untrusted programs run.

base      the interface: Sandbox, SandboxProvider, limits, errors
bwrap     the default provider, bubblewrap; unsafe: plain processes, never chosen unasked
programs  many tiny programs in one sandbox, with a server that forks (sandboxed/program_server.py)
"""

from k3rl.envs.sandbox.base import (
    ExecResult,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxLimits,
    SandboxProvider,
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
from k3rl.envs.sandbox.providers import provider_named

__all__ = [
    "Call",
    "ExecResult",
    "ProgramJob",
    "ProgramLimits",
    "ProgramOutcome",
    "ProgramRunner",
    "ProgramStatus",
    "Sandbox",
    "SandboxDied",
    "SandboxError",
    "SandboxLimits",
    "SandboxProvider",
    "SandboxUnavailable",
    "provider_named",
    "same_value",
]
