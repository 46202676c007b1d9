"""Every Triton kernel under the interpreter, each case in its own process (`interpreting.py`)."""

from __future__ import annotations

from pathlib import Path

import interpreting
import pytest

HERE = Path(__file__).parent
CASES = ("kda-fixed", "kda-packed", "kda-slow", "kda-saturated", "kda-mixed", "segments")
CASES += ("kda-faults", "kda-lengths", "kda-offsets", "kda-context", "splits")
CASES += ("unbounded-packed", "unbounded-slow", "unbounded-saturated", "unbounded-mixed", "unbounded-decode")
CASES += ("decode", "decode-deferred", "conv", "norm")
CASES += ("decode-parts", "draw-cut")


def interpret(*words: str) -> None:
    interpreting.interpret(HERE / words[0], *words[1:])


@pytest.mark.parametrize("case", CASES)
def test_kernel_agrees_with_its_reference(case):
    interpret("interpreted.py", case)


@pytest.mark.parametrize("case", ["situ", "mix"])
def test_element_wise_kernels_agree_with_their_references(case):
    interpret("interpreted_elementwise.py", case)


def test_kernels_of_a_decode_step_agree_with_their_references():
    interpret("interpreted_step.py")


def test_the_largest_logits_are_those_of_every_visible_pair():
    interpret("interpreted_logits.py")


def test_attention_over_latents_of_several_tokens_is_that_of_each():
    interpret("interpreted_latents.py")


def test_many_tokens_are_routed_ordered_and_counted_as_by_plain_torch():
    interpret("interpreted_routing.py")
