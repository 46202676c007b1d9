"""A constraint that would take for good, or all memory, is refused, and the next one is compiled as if nothing was."""

from __future__ import annotations

import json
import threading
import time

import pytest

from k3rl.engine import InvalidRequest
from k3rl.engine.sampling.grammar import Grammars, end_compilers
from k3rl.engine.sampling.grammar_process import CompileLimits
from k3rl.tokens import Tokenizer
from k3rl.types import Constraint, SamplingParams

TOKENIZER = Tokenizer.builtin()
SLOW = json.dumps({"type": "string", "pattern": "^[ab]{30000}$"})


def params(source: str, kind: str = "regex") -> SamplingParams:
    return SamplingParams(
        max_tokens=1, stop_ids=(TOKENIZER.special("end_of_msg"),), constraint=Constraint(kind, source)
    )


@pytest.fixture(scope="module")
def grammars():
    """One for all tests: a process takes seconds to import the compiler."""
    made = Grammars(TOKENIZER, TOKENIZER.vocab_size, CompileLimits(seconds=1.0, memory_bytes=512 << 20))
    yield made
    end_compilers()


def test_a_class_repeated_30000_times_is_refused_within_its_time_and_others_go_on(grammars):
    grammars.check(params("[ab]+"))  # the process is there
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"more than 1 s to compile|may take 512 MiB|too much memory"):
        grammars.check(params(SLOW, "json_schema"))
    assert time.monotonic() - began < 12  # a second, what may lie behind it, and a busy machine
    matcher = grammars.matcher(params("[ab]+"))
    allowed = [TOKENIZER.decode([int(token)]) for token in matcher.allowed().nonzero()[0]]
    assert set("".join(allowed)) == {"a", "b"}


def test_a_bad_source_is_said_in_the_words_of_the_compiler(grammars):
    with pytest.raises(InvalidRequest, match=r"the ebnf of the constraint cannot be used: .*not defined"):
        grammars.check(params("root ::= other", "ebnf"))


def test_what_waits_for_the_compiler_ends_with_it_and_a_fresh_one_comes(grammars):
    grammars.check(params("[cd]+"))
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(InvalidRequest) as caught:
            grammars.check(params(SLOW, "json_schema"))
        said.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    end_compilers()
    thread.join(5)
    assert "ended with its engine" in said[0]
    grammars.check(params("[xy]"))
