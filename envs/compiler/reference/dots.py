"""C text of a matrix product: blocks of rows and vector columns held in registers over the inner loop."""

from __future__ import annotations

ROWS = 4
_WIDTHS = ((8, "v8"), (4, "v4"), (1, "float"))


def dot_lines(
    left: str, right: str, target: str, dims: tuple[int, int, int], *, swapped: bool, accumulate: bool
) -> list[str]:
    """target [M,N] (+)= left [M,K] @ right [K,N], all row-major; `swapped`: left is stored as [K,M]."""
    rows, inner, cols = dims
    lines: list[str] = []
    for first, count, step in segments(rows, (ROWS, 2, 1)):
        for start, stop, panel in panels(cols):
            lines.append(f"for (int32_t i = {first}; i < {first + count}; i += {step})")
            lines.append(f"for (int32_t j = {start}; j < {stop}; j += {sum(panel)}) {{")
            lines += block_lines(left, right, target, dims, step, panel, swapped=swapped, accumulate=accumulate)
            lines.append("}")
    return lines if inner else []


def segments(total: int, sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first, how many, block) that cover `total` with the largest blocks first."""
    found, first = [], 0
    for block in sizes:
        count = (total - first) // block * block
        if count:
            found.append((first, count, block))
            first += count
    return found


def panels(cols: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, vector widths of one panel) that cover the columns."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    start = 0
    for widths in ((8, 8), (8,), (4,), (1,)):
        stop = start + (cols - start) // sum(widths) * sum(widths)
        if stop > start:
            found.append((start, stop, widths))
            start = stop
    return found


def block_lines(
    left: str,
    right: str,
    target: str,
    dims: tuple[int, int, int],
    rows: int,
    panel: tuple[int, ...],
    *,
    swapped: bool,
    accumulate: bool,
) -> list[str]:
    """The register block at (i, j)."""
    total, inner, cols = dims
    names = dict(_WIDTHS)
    starts = [sum(panel[:number]) for number in range(len(panel))]
    lines = []
    for row in range(rows):
        for number, width in enumerate(panel):
            place = f"*({names[width]} *)&{target}[(i + {row}) * {cols} + j + {starts[number]}]"
            zero = "0.0f" if width == 1 else f"({names[width]}){{0}}"
            lines.append(f"    {names[width]} c{row}{number} = {place if accumulate else zero};")
    lines.append('    _Pragma("GCC unroll 4")')
    lines.append(f"    for (int32_t k = 0; k < {inner}; k++) {{")
    for number, width in enumerate(panel):
        place = f"*(const {names[width]} *)&{right}[k * {cols} + j + {starts[number]}]"
        lines.append(f"        const {names[width]} b{number} = {place};")
    for row in range(rows):
        position = f"k * {total} + i + {row}" if swapped else f"(i + {row}) * {inner} + k"
        lines.append(f"        const float a{row} = {left}[{position}];")
        lines += [f"        c{row}{number} += a{row} * b{number};" for number in range(len(panel))]
    lines.append("    }")
    for row in range(rows):
        for number, width in enumerate(panel):
            place = f"*({names[width]} *)&{target}[(i + {row}) * {cols} + j + {starts[number]}]"
            lines.append(f"    {place} = c{row}{number};")
    return lines
