"""The engine protocol over a vLLM server.

`engine.py` is the engine, made of a `session.py` (what both sides agreed on), `live_requests.py` (each carried by a
task), `server_state.py` (pauses, sleep, loss) and `weights.py` (updates). `client.py` speaks HTTP, `wire.py` knows what
goes over it. `vllm_worker.py` runs inside vLLM, alone.
"""

from k3rl.engine.vllm.client import Deadlines, EngineLost, IncompatibleServer
from k3rl.engine.vllm.engine import VLLMEngine

__all__ = ["Deadlines", "EngineLost", "IncompatibleServer", "VLLMEngine"]
