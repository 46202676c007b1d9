"""The engine protocol over a vLLM server."""
