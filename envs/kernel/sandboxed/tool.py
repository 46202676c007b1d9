"""compile, test and profile for an agent in its workspace: `python3 tool.py compile`. Standard library only.

visible.plan holds calls on the visible shapes, visible.json their places and tolerances, visible.want the right outputs
in float64.
"""

from __future__ import annotations

import array
import json
import math
import struct
import subprocess
import sys

MACHINE_LINES, FUNCTIONS = 15, 8


def compile_kernel(flags: list[str]) -> None:
    """kernel.c and driver.c to ./run."""
    for line in (
        ["gcc", *flags, "-g", "-c", "kernel.c"],
        ["gcc", "-O2", "-fno-pie", "-c", "driver.c"],
        ["gcc", "-no-pie", "-static", "driver.o", "kernel.o", "-o", "run", "-lm"],
    ):
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        print(done.stderr, end="")
        if done.returncode != 0:
            sys.exit(f"{line[-1]}: the compiler failed")


def values_of(data: bytes, dtype: str) -> list[float]:
    """float32 or bfloat16 bytes as numbers."""
    if dtype == "f32":
        return array.array("f", data).tolist()
    wide = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return array.array("f", wide).tolist()


def row_errors(got: list[float], want: list[float], width: int, rounding: float) -> tuple[float, float]:
    """(root-mean-square, largest) error of the worst row, relative to that row, as in judging.

    rounding: units in the last place of a bfloat16 that are taken off each error.
    """
    whole = math.sqrt(sum(x * x for x in want) / len(want))
    worst = (0.0, 0.0)
    for start in range(0, len(want), width):
        rows = list(zip(got[start : start + width], want[start : start + width], strict=True))
        scale = max(math.sqrt(sum(y * y for _, y in rows) / width), 0.01 * whole, 1e-30)
        free = [math.ldexp(rounding, math.frexp(y)[1] - 8) for _, y in rows]
        errors = [math.inf if x != x else max(abs(x - y) - o, 0.0) for (x, y), o in zip(rows, free, strict=True)]
        rms = math.sqrt(sum(e * e for e in errors) / width) / scale
        worst = (max(worst[0], rms), max(worst[1], max(errors) / scale))
    return worst


def test(info: dict) -> bool:
    """Run the visible shapes and say what is wrong."""
    done = subprocess.run(["./run", "visible.plan", "out"], capture_output=True, timeout=20, check=False)
    if done.returncode != 0:
        print(f"the run ended with status {done.returncode}")
        return False
    with open("out", "rb") as file:
        data = file.read()
    with open("visible.want", "rb") as file:
        want = array.array("d", file.read())
    here, place, fine = 0, 0, True
    for call in info["calls"]:
        ns = struct.unpack_from("<q", data, here)[0]
        for output in call["outputs"]:
            first = here + 8 + output["place"]
            got = values_of(data[first : first + output["bytes"]], output["dtype"])
            rms, largest = row_errors(got, want[place : place + len(got)].tolist(), output["width"], info["rounding"])
            place += len(got)
            right = rms <= info["rms"] and largest <= info["largest"]
            fine &= right
            state = "right" if right else "WRONG"
            print(f"{call['dims']} {output['name']}: {state}, errors {rms:.2g} and {largest:.2g}; {ns} ns")
        here += 8 + call["arena"]
    return fine


def profile() -> None:
    """Instructions of all visible shapes together, by function and by line."""
    line = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--vgdb=no", "-q", "--cachegrind-out-file=counts"]
    subprocess.run([*line, "./run", "visible.plan", "out"], check=True, timeout=60)
    functions: dict[str, int] = {}
    lines: dict[int, int] = {}
    file, function, total = "", "", 0
    with open("counts", encoding="utf-8") as text:
        for row in text:
            if row.startswith("fl="):
                file = row[3:].strip()
            elif row.startswith("fn="):
                function = row[3:].strip()
            elif row.startswith("summary:"):
                total = int(row.split()[1])
            elif row[:1].isdigit():
                number, count = map(int, row.split()[:2])
                functions[function] = functions.get(function, 0) + count
                if file.endswith("kernel.c"):
                    lines[number] = lines.get(number, 0) + count
    print(f"{total} instructions, of which about 20000 are the driver's")
    for name, count in sorted(functions.items(), key=lambda one: -one[1])[:FUNCTIONS]:
        print(f"{count:>12}  {name}")
    with open("kernel.c", encoding="utf-8") as text:
        source = text.read().splitlines()
    for number, count in sorted(lines.items(), key=lambda one: -one[1])[:MACHINE_LINES]:
        print(f"{count:>12}  kernel.c:{number}: {source[number - 1].strip() if number <= len(source) else ''}")


def main(what: str) -> None:
    """One of the three."""
    with open("visible.json", encoding="utf-8") as file:
        info = json.load(file)
    compile_kernel(info["flags"])
    if what == "test" and not test(info):
        sys.exit(1)
    if what == "profile":
        profile()
    if what == "compile":
        print("compiled")


if __name__ == "__main__":
    main(sys.argv[1])
