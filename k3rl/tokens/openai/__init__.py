"""The OpenAI dialects, for whoever speaks them: the server, the gateway of agent programs, the client of a vLLM server.

requests  bodies -> prompts and sampling parameters
answers   the objects of an answer, whole or in chunks
text      sampled tokens -> the text of an answer, as they come
errors    requests that cannot be served, and the error object

Nothing here knows of sockets or of an engine. Beyond the public fields, requests may have `top_k`, `min_p`,
`stop_token_ids`, `ignore_eos`, `cache_salt`, `structured_outputs`, `return_token_ids` and `return_routes`; answers
then carry `prompt_token_ids` (one id for an image), and per choice `token_ids` and `routes` ({dtype, shape, data}:
base64 of int16 [T, M, k], an image counted as all its rows). In a stream each chunk carries those of its own tokens,
the first one those of the prompt, too.
"""

from k3rl.tokens.openai.answers import (
    DONE,
    FINISH_REASONS,
    LEAST_LOGPROB,
    cached_tokens,
    chat_logprobs,
    chat_message,
    chunks_of,
    delta_choice,
    encoded_routes,
    event,
    event_data,
    finish_reason,
    first_delta,
    head,
    model_list,
    model_object,
    one_line,
    text_choice,
    text_logprobs,
    tool_calls,
    usage,
)
from k3rl.tokens.openai.errors import (
    MALFORMED,
    NO_TOKENS,
    RequestError,
    error_message,
    error_object,
    request_error,
    too_large,
)
from k3rl.tokens.openai.requests import (
    ChatRequest,
    Conversation,
    Sampling,
    StreamOptions,
    TextRequest,
    format_constraint,
)
from k3rl.tokens.openai.text import Channels, PlainText, TextCutter

__all__ = [
    "DONE",
    "FINISH_REASONS",
    "LEAST_LOGPROB",
    "MALFORMED",
    "NO_TOKENS",
    "Channels",
    "ChatRequest",
    "Conversation",
    "PlainText",
    "RequestError",
    "Sampling",
    "StreamOptions",
    "TextCutter",
    "TextRequest",
    "cached_tokens",
    "chat_logprobs",
    "chat_message",
    "chunks_of",
    "delta_choice",
    "encoded_routes",
    "error_message",
    "error_object",
    "event",
    "event_data",
    "finish_reason",
    "first_delta",
    "format_constraint",
    "head",
    "model_list",
    "model_object",
    "one_line",
    "request_error",
    "text_choice",
    "text_logprobs",
    "too_large",
    "tool_calls",
    "usage",
]
