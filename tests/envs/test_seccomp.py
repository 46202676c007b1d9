"""The system call filter, run here by a small interpreter of classic BPF for both machines."""

from __future__ import annotations

import errno
import struct

import pytest

from k3rl.envs.sandbox.seccomp import DENIED, filter_bytes

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, SOCKET, READ = {"x86_64": 56, "aarch64": 220}, {"x86_64": 41, "aarch64": 198}, {"x86_64": 0, "aarch64": 63}


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would answer: struct seccomp_data is nr, arch, instruction pointer, six arguments."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, place = 0, 0
    while True:
        code, if_true, if_false, value = instructions[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += if_true if test else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_verdicts(machine: str) -> None:
    program = filter_bytes(machine)
    column = list(MACHINES).index(machine)

    def ask(number: int, argument: int = 0) -> int:
        return verdict(program, MACHINES[machine], number, argument)

    assert {ask(numbers[column]) for numbers in DENIED.values()} == {ERRNO | errno.EPERM}
    assert ask(READ[machine]) == ALLOW
    assert ask(435) == ERRNO | errno.ENOSYS
    assert ask(CLONE[machine], 0x01200011) == ALLOW  # what fork passes
    assert ask(CLONE[machine], 0x003D0F00) == ALLOW  # what a thread passes
    for namespace in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(CLONE[machine], namespace | 17) == ERRNO | errno.EPERM
    assert ask(SOCKET[machine]) == ALLOW
    assert verdict(filter_bytes(machine, sockets=False), MACHINES[machine], SOCKET[machine]) == ERRNO | errno.EPERM


def test_other_architectures_and_x32_are_killed() -> None:
    assert verdict(filter_bytes("x86_64"), 0x40000003, 0) == KILL
    assert verdict(filter_bytes("aarch64"), MACHINES["x86_64"], 0) == KILL
    assert verdict(filter_bytes("x86_64"), MACHINES["x86_64"], 0x40000000) == KILL


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        filter_bytes("riscv64")
