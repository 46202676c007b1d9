"""Runs as a process of its own, by its path: compiles grammars of strangers, each in a fork of its own.

One JSON object a line, on standard input and output. First comes what the vocabulary is: {"texts": base64 of each
token's bytes, "vocab_size", "stop_ids", "memory_bytes"}, answered by {"ready": true}; then requests {"form": an
xgrammar format, "seconds"}, answered by {"grammar": its serialized text} or {"error": a sentence}. What takes longer,
or more memory, or ends the compiler, ends a fork alone: an alarm that nobody handles is put off by no code. The process
ends when its input does.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    """Answers until the input ends."""
    import xgrammar

    about = json.loads(sys.stdin.readline() or "null")
    if about is None:
        return
    texts = [base64.b64decode(text) for text in about["texts"]]
    info = xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.RAW, vocab_size=about["vocab_size"], stop_token_ids=about["stop_ids"]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()  # of a process with one thread
        if child == 0:
            most = _address_space() + about["memory_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
            said = _compiled(compiler, asked["form"])
            signal.setitimer(signal.ITIMER_REAL, 0)  # the answer goes out whole or not at all
            _answer(said)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == -signal.SIGALRM:
            wait = f"it takes more than {asked['seconds']:g} s to compile"
            _answer({"error": f"{wait}; ask for shorter repetitions or fewer choices"})
        elif status != 0:
            _answer({"error": f"it ends the compiler, which may take {about['memory_bytes'] >> 20} MiB; ask for less"})


def _compiled(compiler: Any, form: dict[str, Any]) -> dict[str, Any]:
    try:
        made = compiler.compile_structural_tag({"type": "structural_tag", "format": form})
        return {"grammar": made.serialize_json()}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # whatever the compiler says of what a stranger sent
        if "bad_alloc" in str(error):
            return {"error": "it needs too much memory"}
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0].rpartition("] ")[2]}


def _answer(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _address_space() -> int:
    """Bytes of address space that the process has by now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
