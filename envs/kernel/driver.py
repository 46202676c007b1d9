"""The C driver that calls a submission's kernel, and the two binary files it reads and writes.

One call has one arena: all inputs and outputs, each 64-aligned between guard bytes, outputs filled with NaN. The
driver reads the arena of a call from the plan, calls the kernel, and writes the arena as it then is; the grader's
process compares. Scratch is fresh zeros for every call. What the driver itself executes does not depend on sizes. Its
process clears its environment and gives up `fork`, `clone` and `execve` before it calls a kernel.

plan (little endian int64): calls, repeats; per call: arena bytes, dimensions, tensors in, tensors out, the dimensions,
the tensors' places in the arena; then the arena. Output: per call nanoseconds of the quickest repeat, then the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from k3rl.envs.kernel.operators import STORAGE, Arrays, Dims, Operator

GUARD = 64
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF  # NaN in float32 and in bfloat16
SCRATCH_BYTES = 4 * 2**20
MAX_ARENA_BYTES = 32 * 2**20

DRIVER = r"""
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#define SCRATCH SCRATCH_BYTES
#define LARGEST LARGEST_BYTES
extern void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch);
static int take(int file, void *to, int64_t bytes) {
    for (int64_t got; bytes > 0; bytes -= got, to = (char *)to + got)
        if ((got = read(file, to, bytes)) <= 0) return 1;
    return 0;
}
static int give(int file, const void *from, int64_t bytes) {
    for (int64_t got; bytes > 0; bytes -= got, from = (const char *)from + got)
        if ((got = write(file, from, bytes)) <= 0) return 1;
    return 0;
}
static void *pages(int64_t bytes) {
    return mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
/* No other process, thread or program than this one, whatever code a kernel finds to jump to. */
static int alone(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execve, 5, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execveat, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fork, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_vfork, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}
int main(int argc, char **argv, char **variables) {
    if (argc < 3) return 10;
    int plan = open(argv[1], O_RDONLY), result = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    /* Nothing in memory tells under which tool this runs. */
    for (; *variables; variables++)
        for (char *letter = *variables; *letter; letter++) *letter = 0;
    if (alone()) return 18;
    int64_t head[2], size[4], words[64];
    char *arena = pages(LARGEST);
    if (plan < 0 || result < 0 || arena == MAP_FAILED || take(plan, head, sizeof head)) return 11;
    for (int64_t call = 0; call < head[0]; call++) {
        if (take(plan, size, sizeof size) || size[0] > LARGEST || size[1] + size[2] + size[3] > 64) return 12;
        if (take(plan, words, 8 * (size[1] + size[2] + size[3]))) return 13;
        const void *in[64];
        void *out[64];
        for (int64_t i = 0; i < size[2]; i++) in[i] = arena + words[size[1] + i];
        for (int64_t i = 0; i < size[3]; i++) out[i] = arena + words[size[1] + size[2] + i];
        int64_t spent = 0, here = lseek(plan, 0, SEEK_CUR);
        for (int64_t r = 0; r < head[1]; r++) {
            if (lseek(plan, here, SEEK_SET) < 0 || take(plan, arena, size[0])) return 14;
            void *scratch = pages(SCRATCH);
            if (scratch == MAP_FAILED) return 15;
            struct timespec a, b;
            clock_gettime(CLOCK_MONOTONIC, &a);
            kernel(words, in, out, scratch);
            clock_gettime(CLOCK_MONOTONIC, &b);
            munmap(scratch, SCRATCH);
            int64_t took = (b.tv_sec - a.tv_sec) * 1000000000LL + (b.tv_nsec - a.tv_nsec);
            if (!r || took < spent) spent = took;
        }
        if (give(result, &spent, 8) || give(result, arena, size[0])) return 16;
    }
    return close(result) ? 17 : 0;
}
""".replace("SCRATCH_BYTES", f"{SCRATCH_BYTES}L").replace("LARGEST_BYTES", f"{MAX_ARENA_BYTES}L")

HEADER = """\
#include <stdint.h>
/* dim: the sizes; in, out: the tensors, dense and in row-major order; scratch: 4 MiB of zeros. */
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch);
"""
EMPTY = """\
#include <stdint.h>
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
}
"""


@dataclass(frozen=True)
class Call:
    """One call of an operator's kernel: its sizes, its inputs as stored, and the memory it gets."""

    operator: Operator
    dims: Dims
    inputs: Arrays
    arena: bytes
    places: Mapping[str, int]

    @property
    def head(self) -> bytes:
        """What stands before the arena in a plan."""
        names = [one.name for one in (*self.operator.inputs, *self.operator.outputs)]
        words = [*self.dims.values(), *(self.places[name] for name in names)]
        counts = len(self.arena), len(self.dims), len(self.operator.inputs), len(self.operator.outputs)
        return struct.pack(f"<{4 + len(words)}q", *counts, *words)


def call(operator: Operator, dims: Dims, seed: Sequence[int]) -> Call:
    """A call with fresh contents."""
    inputs = operator.inputs_for(dims, seed)
    parts, places, here = [bytes([GUARD_BYTE]) * GUARD], {}, GUARD
    for tensor in (*operator.inputs, *operator.outputs):
        known = tensor.name in inputs
        data = inputs[tensor.name].tobytes() if known else bytes([POISON_BYTE]) * tensor.bytes(dims)
        guard = bytes([GUARD_BYTE]) * (GUARD + -len(data) % GUARD)
        places[tensor.name] = here
        parts += [data, guard]
        here += len(data) + len(guard)
    return Call(operator, dims, inputs, b"".join(parts), places)


def plan(calls: Sequence[Call], repeats: int = 1) -> bytes:
    """The plan of these calls; every repeat of a call begins with the same arena."""
    return struct.pack("<2q", len(calls), repeats) + b"".join(one.head + one.arena for one in calls)


@dataclass(frozen=True)
class Returned:
    """What came back of one call. strayed: bytes outside the outputs that are not as they were; ns: quickest repeat."""

    outputs: Arrays
    strayed: int
    ns: int


def unpack(calls: Sequence[Call], data: bytes) -> list[Returned] | None:
    """What an output file says; None when it is not complete."""
    if len(data) != sum(8 + len(one.arena) for one in calls):
        return None
    found, here = [], 0
    for one in calls:
        ns = struct.unpack_from("<q", data, here)[0]
        after = np.frombuffer(data, np.uint8, len(one.arena), here + 8)
        same = after == np.frombuffer(one.arena, np.uint8)
        outputs = {}
        for tensor in one.operator.outputs:
            place, size = one.places[tensor.name], tensor.bytes(one.dims)
            same[place : place + size] = True
            outputs[tensor.name] = (
                after[place : place + size].view(STORAGE[tensor.dtype]).reshape(tensor.sizes(one.dims))
            )
        found.append(Returned(outputs, int((~same).sum()), ns))
        here += 8 + len(one.arena)
    return found
