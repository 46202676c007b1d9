"""What every problem of `chip` looks like from outside: one stream in, one stream out, perhaps a memory.

A transaction passes at a rising clock edge where valid (and ready, where the stream has it) is 1. Values are kept
as unsigned bit patterns; a signed field is its two's complement.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Parameters = Mapping[str, int]
TOP = "dut"


@dataclass(frozen=True, slots=True)
class Stream:
    """Ports of one direction: `in_valid`, the fields as `in_NAME`, and `in_ready` when `ready` (`out_` likewise)."""

    fields: tuple[tuple[str, int], ...]  # name, bits
    ready: bool = False

    @property
    def bits(self) -> int:
        return sum(width for _, width in self.fields)

    def pack(self, values: Sequence[int]) -> int:
        """The fields of one transaction as one number, the first field on top. Values are cut to their width."""
        packed = 0
        for (_, width), value in zip(self.fields, values, strict=True):
            packed = packed << width | value & (1 << width) - 1
        return packed


@dataclass(frozen=True, slots=True)
class Interface:
    """All ports of the module `dut`. memory_bits: address bits of an outside memory of 32-bit words, or None."""

    input: Stream
    output: Stream
    memory_bits: int | None = None

    def ports(self) -> dict[str, tuple[str, int]]:
        """name -> (direction, bits), in the order of the module's header."""
        table = {"clk": ("input", 1), "rst": ("input", 1), "in_valid": ("input", 1)}
        if self.input.ready:
            table["in_ready"] = ("output", 1)
        table |= {f"in_{name}": ("input", width) for name, width in self.input.fields}
        table["out_valid"] = ("output", 1)
        if self.output.ready:
            table["out_ready"] = ("input", 1)
        table |= {f"out_{name}": ("output", width) for name, width in self.output.fields}
        if self.memory_bits is not None:
            table |= {"mem_we": ("output", 1), "mem_addr": ("output", self.memory_bits)}
            table |= {"mem_wdata": ("output", 32), "mem_rdata": ("input", 32)}
        return table

    def header(self, registers: Sequence[str] = (), name: str = TOP) -> str:
        """The Verilog module header; `registers` are the outputs to declare as `reg`."""
        lines = []
        for port, (direction, width) in self.ports().items():
            kind = " reg" if port in registers else ""
            lines.append(f"  {direction}{kind} {f'[{width - 1}:0] ' if width > 1 else ''}{port}")
        return f"module {name}(\n" + ",\n".join(lines) + "\n);\n"


Range = tuple[int, int]  # lowest and highest right value of a field; None where anything known or unknown is right


@dataclass(frozen=True, slots=True)
class Segment:
    """Transactions after one reset, and what must come out.

    inputs: (idle cycles before, field values) each. outputs: per transaction and field the right range.
    due: per output (number of the input that it waits for, cycles allowed between the two); empty when not timed.
    items: what throughput is counted in, 0 when it is not counted here. stall: random out_ready.
    hold: cycles without out_ready at the start; capacity: inputs that must be taken in them. cut: the segment ends
    with a reset after so many cycles and its outputs, though they must be right, need not all have come.
    """

    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    outputs: tuple[tuple[Range | None, ...], ...]
    due: tuple[tuple[int, int], ...] = ()
    items: int = 0
    stall: bool = False
    hold: int = 0
    capacity: int = 0
    cut: int = 0


def exact(values: Sequence[int], widths: Sequence[int]) -> tuple[Range | None, ...]:
    """Ranges that only these values (cut to their widths, so that negative ones become two's complement) meet."""
    cut = [value & (1 << width) - 1 for value, width in zip(values, widths, strict=True)]
    return tuple((value, value) for value in cut)


def gaps(count: int, rng: random.Random, busy: float = 0.5) -> list[int]:
    """Random idle cycles before each of `count` transactions: none with probability `busy`, else 1 to 4."""
    return [0 if rng.random() < busy else rng.randint(1, 4) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Problem(ABC):
    """A rung of the ladder. `train` and `heldout` are the parameters of the two splits, without a common element."""

    family: str
    level: int
    title: str
    train: tuple[Parameters, ...] = field(repr=False)
    heldout: tuple[Parameters, ...] = field(repr=False)

    @abstractmethod
    def interface(self, p: Parameters) -> Interface:
        """The ports."""

    @abstractmethod
    def behaviour(self, p: Parameters) -> str:
        """The part of the prompt that says what to compute and how late it may be."""

    @abstractmethod
    def reference(self, p: Parameters) -> str:
        """A right design in Verilog: the baseline of all ratios."""

    @abstractmethod
    def segments(self, p: Parameters, rng: random.Random) -> list[Segment]:
        """Random transactions with what a software model of the problem gives for them."""

    @abstractmethod
    def period_ns(self, p: Parameters) -> float:
        """The target clock period. The reference meets it."""


def signed(value: int, bits: int) -> int:
    """The number whose two's complement of `bits` bits is the low part of `value`."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def saturate(value: int, bits: int) -> int:
    """The nearest number that `bits` bits of two's complement hold."""
    return max(-(1 << (bits - 1)), min((1 << (bits - 1)) - 1, value))
