"""The grader's C driver, and the two binary files it reads and writes.

plan (little endian int32 words): magic, buffers, launches, repeats; per buffer: float32/int32 words that follow;
per launch: kernel number, grid 0, grid 1, number of arguments, then pairs (is buffer, buffer number or raw word).
Output: nanoseconds of all launches in the quickest repeat (int64), then every buffer after the last repeat.
Every repeat starts from the buffers' first contents, so that repeats do equal work.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAGIC = 0x4D54524E
HEADER = 8  # bytes before the buffers in the output

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
typedef void (*kernel_t)(int32_t, int32_t, int32_t, int32_t, void *const *);
extern const kernel_t mt_table[];
static int32_t *plan;
static int32_t *next_words(int32_t count) { int32_t *here = plan; plan += count; return here; }
int main(int argc, char **argv) {
    FILE *file = fopen(argv[1], "rb");
    if (!file || argc < 3) return 10;
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    rewind(file);
    plan = malloc(bytes);
    if (fread(plan, 1, bytes, file) != (size_t)bytes) return 11;
    fclose(file);
    int32_t *head = next_words(4), buffers = head[1], launches = head[2], repeats = head[3];
    int32_t **start = malloc(buffers * sizeof *start), **data = malloc(buffers * sizeof *data);
    int32_t *sizes = malloc(buffers * sizeof *sizes);
    for (int32_t b = 0; b < buffers; b++) {
        sizes[b] = *next_words(1);
        start[b] = next_words(sizes[b]);
        if (posix_memalign((void **)&data[b], 64, (size_t)sizes[b] * 4 + 64)) return 12;
    }
    int32_t *first = plan;
    int64_t spent = 0;
    for (int32_t r = 0; r < (repeats ? repeats : 1); r++) {
        for (int32_t b = 0; b < buffers; b++) memcpy(data[b], start[b], (size_t)sizes[b] * 4);
        struct timespec t0, t1;
        clock_gettime(CLOCK_MONOTONIC, &t0);
        plan = first;
        for (int32_t l = 0; repeats && l < launches; l++) {
            int32_t *launch = next_words(4);
            void *args[64];
            for (int32_t a = 0; a < launch[3]; a++) {
                int32_t *pair = next_words(2);
                args[a] = pair[0] ? (void *)data[pair[1]] : (void *)&pair[1];
            }
            for (int32_t i = 0; i < launch[1]; i++)
                for (int32_t j = 0; j < launch[2]; j++) mt_table[launch[0]](i, j, launch[1], launch[2], args);
        }
        clock_gettime(CLOCK_MONOTONIC, &t1);
        int64_t took = (t1.tv_sec - t0.tv_sec) * 1000000000LL + (t1.tv_nsec - t0.tv_nsec);
        if (!r || took < spent) spent = took;
    }
    file = fopen(argv[2], "wb");
    if (!file) return 13;
    fwrite(&spent, 8, 1, file);
    for (int32_t b = 0; b < buffers; b++) fwrite(data[b], 4, sizes[b], file);
    return fclose(file) ? 14 : 0;
}
"""


def table(case: Mapping[str, Any]) -> str:
    """C text of the table of kernels, in the order of the case's instances."""
    names = [f"mt_{one['name']}" for one in case["instances"]]
    parts = ["#include <stdint.h>"]
    parts += [f"extern void {name}(int32_t, int32_t, int32_t, int32_t, void *const *);" for name in names]
    parts.append("typedef void (*kernel_t)(int32_t, int32_t, int32_t, int32_t, void *const *);")
    parts.append(f"const kernel_t mt_table[] = {{{', '.join(names)}}};\n")
    return "\n".join(parts)


def plan(case: Mapping[str, Any], contents: Sequence[np.ndarray], repeats: int) -> bytes:
    """The plan file: buffers with `contents` and the case's launches. repeats 0 runs no kernel."""
    order = {one["name"]: number for number, one in enumerate(case["instances"])}
    parts = [struct.pack("<4i", MAGIC, len(contents), len(case["launches"]), repeats)]
    for array in contents:
        parts += [struct.pack("<i", array.size), array.astype(array.dtype.newbyteorder("<")).tobytes()]
    for launch in case["launches"]:
        parts.append(struct.pack("<4i", order[launch["instance"]], *launch["grid"], len(launch["args"])))
        for kind, value in launch["args"]:
            if kind == "buffer":
                parts.append(struct.pack("<2i", 1, value))
            else:
                parts.append(struct.pack("<if" if kind == "f32" else "<2i", 0, value))
    return b"".join(parts)


def unpack(case: Mapping[str, Any], data: bytes) -> tuple[int, list[np.ndarray]] | None:
    """(nanoseconds, buffers) of an output file; None when it is not complete."""
    sizes = [buffer["size"] for buffer in case["buffers"]]
    if len(data) != HEADER + 4 * sum(sizes):
        return None
    found, position = [], HEADER
    for buffer in case["buffers"]:
        kind = "<f4" if buffer["dtype"] == "f32" else "<i4"
        found.append(np.frombuffer(data, kind, buffer["size"], position))
        position += 4 * buffer["size"]
    return int(struct.unpack_from("<q", data)[0]), found
