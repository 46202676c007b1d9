"""The gateway: an agent program owns its loop and talks to an OpenAI-compatible endpoint that records.

session   what was sampled, as branches of exact tokens, whatever conversation the program sends next
dialect   OpenAI request bodies in, answers out; no HTTP here
mailbox   how requests get out of a sandbox that has no network (sandboxed/forward.py is the other end)
program   Harness, ProgramHarness, and `run_program`: one episode of a program

`k3rl.serve` serves sessions over HTTP, for programs that run elsewhere. The dialect itself is `k3rl.tokens.openai`.
"""

from k3rl.envs.gateway.dialect import MAX_BODY_BYTES, Answer, answer, models, not_found
from k3rl.envs.gateway.program import Harness, HarnessResult, ProgramHarness, run_program
from k3rl.envs.gateway.session import GatewaySession

__all__ = [
    "MAX_BODY_BYTES",
    "Answer",
    "GatewaySession",
    "Harness",
    "HarnessResult",
    "ProgramHarness",
    "answer",
    "models",
    "not_found",
    "run_program",
]
