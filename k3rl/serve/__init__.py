"""An engine over HTTP. Needs the packages starlette and uvicorn (extra `serve`).

server   the OpenAI endpoints, health and metrics of one engine; serve_checkpoint runs them
job      one request being answered; the dialect itself is `k3rl.tokens.openai`
events   streamed answers
driver   an engine on a thread of its own, for callers of an event loop
metrics  what `/metrics` says
gateway  recording sessions of agent programs over HTTP; what a session is stands in `k3rl.envs.gateway`
"""

from k3rl.serve.driver import EngineDriver, Stream
from k3rl.serve.gateway import EnginePolicy, Gateway, GatewayServer
from k3rl.serve.server import EngineOptions, ServerLimits, create_app, serve, serve_checkpoint

__all__ = [
    "EngineDriver",
    "EngineOptions",
    "EnginePolicy",
    "Gateway",
    "GatewayServer",
    "ServerLimits",
    "Stream",
    "create_app",
    "serve",
    "serve_checkpoint",
]
