"""IR -> C. Neighbouring operations of one shape become one loop nest; products are tiled into registers.

A value is stored as a C scalar, as an array (row-major), or not at all: spreads, transpositions, ranges and integer
or boolean arithmetic are recomputed where they are used, inside the loop of whatever uses them.
"""

from __future__ import annotations

from typing import Any

from .affine import Rows
from .c_text import PRELUDE, c_type, flat, literal, start_of
from .dots import dot_lines
from .ir import ELEMENTWISE, REDUCTIONS, VIEWS, Op, Shape, reads, size, split, types_of, walk

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"eq": "==", "ne": "!=", "and": "&", "or": "|"},
}
_CALLS = {"exp": "mt_exp", "log": "logf", "sqrt": "sqrtf", "tanh": "mt_tanh"}


class Group:
    """Operations waiting to become one loop nest over `shape`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ops: list[Op] = []
        self.values: set[str] = set()  # elements, at hand inside the loop
        self.results: set[str] = set()  # reductions, at hand after it
        self.loaded: dict[str, set[str]] = {}  # pointer -> offsets
        self.stored: dict[str, set[str]] = {}


class Emitter:
    """One kernel -> one C function `mt_<name>(pid0, pid1, grid0, grid1, args)`."""

    def __init__(self, kernel: dict[str, Any], name: str) -> None:
        self._kernel, self._name = kernel, name
        self._types = types_of(kernel)
        self._made: dict[str, Op] = {}
        self._uses: dict[str, list[Op]] = {}
        self._yielded: dict[str, int] = {}
        for op in walk(kernel["body"]):
            self._made.update(dict.fromkeys(op["out"], op))
            for one in op["in"]:
                self._uses.setdefault(one, []).append(op)
            for block in op.get("blocks", ()):
                for one in block["yield"]:
                    self._yielded[one] = self._yielded.get(one, 0) + 1
        self._constant: set[str] = set()  # pointers that are only read
        self._lines: list[str] = []
        self._indent = 1
        self._place: dict[str, str] = {}  # value -> C variable or array
        self._group: Group | None = None
        self._count = 0
        self._rows = Rows(self._plain, self._shape, self._scalar_text)
        self._hoisted: dict[int, tuple[str, str | None]] = {}  # load or store -> its pointer and bound of j
        self._waiting: dict[int, str] = {}  # store -> the array that collects its row
        self._memo: dict[Any, str] = {}  # (value, indices) -> temporary of the loop body being written

    def run(self) -> str:
        """The function's text."""
        stored = {op["in"][0] for op in walk(self._kernel["body"]) if op["op"] == "store"}
        for number, (name, kind) in enumerate(self._kernel["params"]):
            text = c_type(kind.lstrip("*"))
            if kind.startswith("*"):
                if name not in stored:
                    self._constant.add(f"p_{name}")
                const = "" if name in stored else "const "
                self._line(f"{const}{text} *restrict p_{name} = ({const}{text} *)args[{number}];")
            else:
                self._line(f"const {text} p_{name} = *(const {text} *)args[{number}];")
            self._place[name] = f"p_{name}"
        self._ops(self._kernel["body"])
        self._flush()
        head = f"void mt_{self._name}(int32_t pid0, int32_t pid1, int32_t grid0, int32_t grid1, void *const *args) {{"
        return "\n".join([head, *self._lines, "}", ""])

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    def _shape(self, value: str) -> Shape:
        return split(self._types[value])[1]

    def _element(self, value: str) -> str:
        return split(self._types[value])[0]

    def _variable(self, value: str) -> str:
        """A fresh C variable or array for a value, declared here."""
        self._count += 1
        name = f"t{self._count}"
        shape, text = self._shape(value), c_type(self._element(value))
        if shape:
            self._line(f"{text} {name}[{size(shape)}] __attribute__((aligned(32)));")
        else:
            self._line(f"{text} {name};")
        return name

    # Which values have storage

    def _virtual(self, value: str) -> bool:
        op = self._made.get(value)
        if op is None or value in self._place:
            return False
        name = op["op"]
        if name in VIEWS or name in ("const", "arange"):
            return True
        return name in ELEMENTWISE and bool(self._shape(value)) and self._element(value) != "f32"

    def _bases(self, value: str, viewed: bool = False) -> set[tuple[str, bool]]:
        """The stored values behind a value, each with whether a change of index lies between."""
        if not self._virtual(value):
            return {(value, viewed)}
        op = self._made[value]
        found: set[tuple[str, bool]] = set()
        for one in op["in"]:
            found |= self._bases(one, viewed or op["op"] in VIEWS)
        return found

    def _waits(self, op: Op, shape: Shape | None) -> bool:
        """Whether the pending group must be written before this operation can be."""
        group = self._group
        if group is None:
            return False
        inside = shape == group.shape
        for one in op["in"]:
            for base, viewed in self._bases(one):
                if base in group.results or (base in group.values and (viewed or not inside)):
                    return True
        return False

    # Operations

    def _ops(self, ops: list[Op]) -> None:
        for op in ops:
            name = op["op"]
            if name in ("for", "if"):
                self._flush()
                self._for(op) if name == "for" else self._if(op)
            elif name == "dot":
                self._dot(op)
            elif name in ("program_id", "num_programs"):
                self._place[op["out"][0]] = f"{'pid' if name == 'program_id' else 'grid'}{op['axis']}"
            elif not (op["out"] and self._virtual(op["out"][0])) and not self._is_accumulation(op):
                self._loop_or_scalar(op)

    def _loop_or_scalar(self, op: Op) -> None:
        name = op["op"]
        shape = self._shape(op["in"][1 if name == "store" else 0]) if name != "load" else self._shape(op["out"][0])
        if not shape:
            if self._waits(op, None) or (self._group and name in ("load", "store")):
                self._flush()
            self._scalar(op)
            return
        if self._group and (self._group.shape != shape or self._waits(op, shape) or self._conflicts(op)):
            self._flush()
        if self._group is None:
            self._group = Group(shape)
        group = self._group
        group.ops.append(op)
        if name == "store":
            group.stored.setdefault(op["in"][0], set()).add(op["in"][1])
        elif name in REDUCTIONS:
            group.results.add(op["out"][0])
        else:
            group.values.add(op["out"][0])
            if name == "load":
                group.loaded.setdefault(op["in"][0], set()).add(op["in"][1])

    def _conflicts(self, op: Op) -> bool:
        """Whether fusing would reorder two accesses of one pointer, not both loads, at different offsets."""
        if self._group is None or op["op"] not in ("load", "store"):
            return False
        pointer, offset = op["in"][:2]
        others = set(self._group.stored.get(pointer, ()))
        if op["op"] == "store":
            others |= self._group.loaded.get(pointer, set())
        return bool(others - {offset})

    def _scalar(self, op: Op) -> None:
        name = op["op"]
        self._memo = {}
        if name == "store":
            pointer, offset, value, *mask = op["in"]
            guard = f"if ({self._at(mask[0], ())}) " if mask else ""
            self._line(f"{guard}{self._place[pointer]}[{self._at(offset, ())}] = {self._at(value, ())};")
            return
        text = self._expression(op, ())
        variable = self._variable(op["out"][0])
        self._line(f"{variable} = {text};")
        self._place[op["out"][0]] = variable

    # Elements

    def _at(self, value: str, index: tuple[str, ...]) -> str:
        """C text of one element; temporaries go into the loop body being written."""
        key = (value, index)
        if key in self._memo:
            return self._memo[key]
        if value in self._place:
            shape, place = self._shape(value), self._place[value]
            return f"{place}[{flat(index, shape)}]" if shape else place
        op = self._made[value]
        name, source = op["op"], (op["in"] or [""])[0]
        if name == "const":
            return literal(op["value"], self._element(value))
        if name == "arange":
            return f"({index[0]} + {op['lo']})" if op["lo"] else index[0]
        if name == "splat":
            return self._at(source, ())
        if name == "broadcast":
            own = self._shape(source)
            return self._at(source, tuple("0" if dim == 1 else one for one, dim in zip(index, own, strict=True)))
        if name == "expand":
            return self._at(source, (index[1 - op["axis"]],))
        if name == "trans":
            return self._at(source, index[::-1])
        text = self._expression(op, index)
        self._count += 1
        self._line(f"{c_type(self._element(value))} e{self._count} = {text};")
        self._memo[key] = f"e{self._count}"
        return self._memo[key]

    def _expression(self, op: Op, index: tuple[str, ...]) -> str:
        name = op["op"]
        if name == "load":
            place, test = self._access(op, index, op["in"][2:3])
            return f"{test} ? {place} : {self._at(op['in'][3], index)}" if test else place
        inputs = [self._at(one, index) for one in op["in"]]
        if name in _INFIX:
            return f"{inputs[0]} {_INFIX[name]} {inputs[1]}"
        if name in _CALLS:
            return f"{_CALLS[name]}({inputs[0]})"
        if name in ("maximum", "minimum"):
            return f"{inputs[0]} {'>' if name == 'maximum' else '<'} {inputs[1]} ? {inputs[0]} : {inputs[1]}"
        if name == "where":
            return f"{inputs[0]} ? {inputs[1]} : {inputs[2]}"
        if name == "cast":
            return f"({c_type(self._element(op['out'][0]))}){inputs[0]}"
        if name == "abs":
            return (
                f"fabsf({inputs[0]})"
                if self._element(op["out"][0]) == "f32"
                else f"({inputs[0]} < 0 ? -{inputs[0]} : {inputs[0]})"
            )
        return f"{'!' if name == 'not' else '-'}{inputs[0]}"

    # Rows

    def _plain(self, value: str) -> Op | None:
        """The operation of a value without storage."""
        return self._made[value] if self._virtual(value) else None

    def _scalar_text(self, value: str) -> str | None:
        if value in self._place:
            return self._place[value]
        op = self._made[value]
        return literal(op["value"], self._element(value)) if op["op"] == "const" else None

    def _hoist(self, op: Op, index: tuple[str, ...]) -> None:
        """Before a row's loop: where the row of a load or store starts, and where it ends."""
        pointer, offset = op["in"][:2]
        mask = op["in"][2:3] if op["op"] == "load" else op["in"][3:4]
        start = self._rows.affine(offset, index)
        limits = self._rows.mask(mask[0], index) if mask else ([], [])
        if start is None or start[0] != 1 or limits is None:
            return
        self._count += 1
        constant = "const " if self._place[pointer] in self._constant else ""
        text = c_type(self._types[pointer][1:])
        self._line(f"{constant}{text} *q{self._count} = {self._place[pointer]} + {start[1]};")
        bound = None
        if mask:
            bound = f"m{self._count}"
            self._line(f"int32_t {bound} = {' && '.join(limits[0]) or '1'} ? 1 << 30 : 0;")
            for one in limits[1]:
                self._line(f"{bound} = {bound} < {one} ? {bound} : {one};")
        self._hoisted[id(op)] = (f"q{self._count}", bound)

    def _wait(self, op: Op, cols: int) -> None:
        """Let a bounded store collect its row first: gcc would otherwise compute the whole row under a mask."""
        if self._hoisted.get(id(op), ("", None))[1] is None:
            return
        self._count += 1
        text = c_type(self._types[op["in"][0]][1:])
        self._line(f"{text} s{self._count}[{cols}] __attribute__((aligned(32)));")
        self._waiting[id(op)] = f"s{self._count}"

    def _write_rows(self, group: Group, cols: int) -> None:
        for op in group.ops:
            if id(op) in self._waiting:
                place, bound = self._hoisted[id(op)]
                self._line(f"{bound} = {bound} < {cols} ? {bound} : {cols};")
                self._line(f"for (int32_t j = 0; j < {bound}; j++) {place}[j] = {self._waiting[id(op)]}[j];")

    def _access(self, op: Op, index: tuple[str, ...], mask: list[str]) -> tuple[str, str | None]:
        """(C text of the element of memory, condition on it or None) of a load or store."""
        if index and id(op) in self._hoisted:
            place, bound = self._hoisted[id(op)]
            return f"{place}[j]", f"j < {bound}" if bound else None
        place = f"{self._place[op['in'][0]]}[{self._at(op['in'][1], index)}]"
        return place, self._at(mask[0], index) if mask else None

    # Groups

    def _escapes(self, value: str, group: Group) -> bool:
        """Whether a value of the group is read outside its loop."""
        if self._yielded.get(value):
            return True
        return any(
            not any(op is user for op in group.ops) and not self._dies_in(user, group)
            for user in self._uses.get(value, ())
        )

    def _dies_in(self, user: Op, group: Group) -> bool:
        """Whether a recomputed operation is read by this group alone, element by element."""
        if not user["out"] or not self._virtual(user["out"][0]) or user["op"] in VIEWS:
            return False
        value = user["out"][0]
        if self._yielded.get(value):
            return False
        return all(any(op is one for op in group.ops) or self._dies_in(one, group) for one in self._uses.get(value, ()))

    def _flush(self, into: dict[str, str] | None = None) -> None:
        """Write the pending group. `into`: values to be written to arrays that exist already."""
        group, self._group = self._group, None
        if group is None:
            return
        into = into or {}
        shape = group.shape
        arrays: dict[str, str] = {}
        for op in group.ops:
            for out in op["out"]:
                if out in group.results:
                    arrays[out] = self._variable(out)
                    self._start(op, arrays[out])
                elif out in into:
                    arrays[out] = into[out]
                elif self._escapes(out, group):
                    arrays[out] = self._variable(out)
        index = ("i", "j")[-len(shape) :]
        self._memo = {}
        rows = [op for op in group.ops if op["op"] in REDUCTIONS and len(shape) == 2 and op["axis"] == 1]
        if len(shape) == 2:
            self._open("i", shape[0])
            for op in rows:
                element = self._element(op["out"][0])
                self._line(f"{c_type(element)} r_{arrays[op['out'][0]]} = {start_of(op['op'], element)};")
        rows_of_tile = len(shape) == 2
        for number, op in enumerate(group.ops):
            if op["op"] in ("load", "store"):
                self._hoist(op, index)
            if (
                op["op"] == "store"
                and rows_of_tile
                and not any(one["in"][:1] == op["in"][:1] for one in group.ops[number + 1 :])
            ):
                self._wait(op, shape[-1])
        self._open("j", shape[-1])
        for op in group.ops:
            self._body(op, index, arrays, op in rows)
        self._close()
        self._write_rows(group, shape[-1])
        for op in rows:
            self._line(f"{arrays[op['out'][0]]}[i] = r_{arrays[op['out'][0]]};")
        if len(shape) == 2:
            self._close()
        self._memo = {}
        self._place.update(arrays)

    def _start(self, op: Op, array: str) -> None:
        out = op["out"][0]
        start = start_of(op["op"], self._element(out))
        if not self._shape(out):
            self._line(f"{array} = {start};")
        elif op["axis"] == 0:
            self._open("j", self._shape(out)[0])
            self._line(f"{array}[j] = {start};")
            self._close()

    def _body(self, op: Op, index: tuple[str, ...], arrays: dict[str, str], in_row: bool) -> None:
        name = op["op"]
        if name == "store":
            place, test = self._access(op, index, op["in"][3:4])
            value = self._at(op["in"][2], index)
            if id(op) in self._waiting:
                self._line(f"{self._waiting[id(op)]}[j] = {value};")
                return
            self._line(f"{f'if ({test}) ' if test else ''}{place} = {value};")
            return
        out = op["out"][0]
        if name in REDUCTIONS:
            value = self._at(op["in"][0], index)
            target = f"r_{arrays[out]}" if in_row else arrays[out] + ("[j]" if self._shape(out) else "")
            sign = {"max": ">", "min": "<"}.get(name)
            self._line(
                f"{target} += {value};" if sign is None else f"{target} = {target} {sign} {value} ? {target} : {value};"
            )
            return
        text = self._expression(op, index)
        self._count += 1
        temporary = f"e{self._count}"
        self._line(f"{c_type(self._element(out))} {temporary} = {text};")
        self._memo[(out, index)] = temporary
        if out in arrays:
            self._line(f"{arrays[out]}[{flat(index, self._shape(out))}] = {temporary};")

    def _open(self, variable: str, bound: int) -> None:
        self._line(f"for (int32_t {variable} = 0; {variable} < {bound}; {variable}++) {{")
        self._indent += 1

    def _close(self) -> None:
        self._indent -= 1
        self._line("}")

    def _copy(self, value: str, target: str) -> None:
        """Write all elements of a value into an existing array or variable."""
        shape = self._shape(value)
        index = ("i", "j")[-len(shape) :] if shape else ()
        self._memo = {}
        for variable, bound in zip(index, shape, strict=True):
            self._open(variable, bound)
        text = self._at(value, index)
        self._line(f"{target}{'[' + flat(index, shape) + ']' if shape else ''} = {text};")
        for _ in index:
            self._close()
        self._memo = {}

    # Products

    def _is_accumulation(self, op: Op) -> bool:
        """An addition whose work a product has done already."""
        return bool(op["out"]) and op["out"][0] in self._place

    def _accumulates(self, dot: Op) -> Op | None:
        """The addition that is the only reader of a product, when its other operand exists by now."""
        out = dot["out"][0]
        users = self._uses.get(out, [])
        if len(users) != 1 or self._yielded.get(out) or users[0]["op"] != "add":
            return None
        other = [one for one in users[0]["in"] if one != out]
        known = self._place.keys() | (self._group.values if self._group else set())
        return users[0] if len(other) == 1 and all(base in known for base, _ in self._bases(other[0])) else None

    def _dot(self, op: Op) -> None:
        total = self._accumulates(op)
        self._flush()
        left, right = op["in"]
        operand, swapped = self._operand(left, may_swap=True)
        other, _ = self._operand(right, may_swap=False)
        rows, inner = self._shape(left)
        cols = self._shape(right)[1]
        result = total["out"][0] if total else op["out"][0]
        start = next(one for one in total["in"] if one != op["out"][0]) if total else None
        if start is not None and self._owned(start, result):
            target = self._place[start]
        else:
            target = self._variable(result)
            if start is not None:
                self._copy(start, target)
        for line in dot_lines(
            operand, other, target, (rows, inner, cols), swapped=swapped, accumulate=total is not None
        ):
            self._line(line)
        self._place[result] = target

    def _owned(self, start: str, result: str) -> bool:
        """Whether `result` may be added into the array of `start`: a loop's value that only this reads."""
        if start not in self._place or len(self._uses.get(start, ())) != 1 or self._yielded.get(start):
            return False
        for op in walk(self._kernel["body"]):
            for block in op.get("blocks", ()):
                if op["op"] == "for" and start in block["args"]:
                    position = block["args"].index(start) - 1
                    return (
                        block["yield"].count(result) == 1
                        and block["yield"][position] == result
                        and not self._uses.get(result)
                    )
        return False

    def _operand(self, value: str, *, may_swap: bool) -> tuple[str, bool]:
        """(array, whether it holds the transpose) of a product's operand."""
        made = self._made.get(value)
        if value in self._place:
            return self._place[value], False
        if may_swap and made is not None and made["op"] == "trans" and made["in"][0] in self._place:
            return self._place[made["in"][0]], True
        target = self._variable(value)
        self._copy(value, target)
        return target, False

    # Control flow

    def _for(self, op: Op) -> None:
        low, high, step, *start = op["in"]
        block = op["blocks"][0]
        index, *args = block["args"]
        bounds = [self._at(one, ()) for one in (low, high, step)]
        for value, arg in zip(start, args, strict=True):
            variable = self._variable(arg)
            self._copy(value, variable)
            self._place[arg] = variable
        self._count += 1
        counter = f"n{self._count}"
        self._place[index] = counter
        self._line(f"for (int32_t {counter} = {bounds[0]}; {counter} < {bounds[1]}; {counter} += {bounds[2]}) {{")
        self._indent += 1
        self._ops(block["ops"])
        self._flush(self._direct(block, args))
        self._carry(block["yield"], [self._place[one] for one in args])
        self._close()
        self._place.update(zip(op["out"], (self._place[one] for one in args), strict=True))

    def _direct(self, block: dict[str, Any], args: list[str]) -> dict[str, str]:
        """Yields of the pending group that may be written straight into the carried array."""
        group = self._group
        chosen: dict[str, str] = {}
        if group is None:
            return chosen
        reread = {one for value in block["yield"] for one, _ in self._bases(value)} & set(args)
        for value, arg in zip(block["yield"], args, strict=True):
            users = self._uses.get(arg, [])
            plain = all(one["op"] not in VIEWS and one["op"] != "dot" and "blocks" not in one for one in users)
            inside = all(any(op is one for op in group.ops) for one in self._uses.get(value, ()))
            nested = any(arg in set(reads(one)) for one in block["ops"] if "blocks" in one)
            alone = block["yield"].count(value) == 1 and self._element(arg) == "f32" and arg not in reread
            if value in group.values and plain and inside and alone and not nested:
                chosen[value] = self._place[arg]
        return chosen

    def _carry(self, values: list[str], targets: list[str]) -> None:
        """Assign all targets at once: whatever reads a target is copied first."""
        pending = [(v, t) for v, t in zip(values, targets, strict=True) if self._place.get(v) != t]
        held: dict[str, str] = {}
        for value, _ in pending:
            if value not in held and any(self._place.get(base) in targets for base, _ in self._bases(value)):
                held[value] = self._variable(value)
                self._copy(value, held[value])
        before = {value: self._place.get(value) for value in held}
        self._place.update(held)
        for value, target in pending:
            self._copy(value, target)
        for value, place in before.items():
            self._restore(value, place)

    def _restore(self, value: str, saved: str | None) -> None:
        if saved is None:
            del self._place[value]
        else:
            self._place[value] = saved

    def _if(self, op: Op) -> None:
        test = self._at(op["in"][0], ())
        targets = [self._variable(out) for out in op["out"]]
        for word, block in zip((f"if ({test}) {{", "} else {"), op["blocks"], strict=True):
            self._line(word)
            self._indent += 1
            self._ops(block["ops"])
            self._flush()
            self._carry(block["yield"], targets)
            self._indent -= 1
        self._line("}")
        self._place.update(zip(op["out"], targets, strict=True))


def emit(kernels: list[tuple[str, dict[str, Any]]]) -> str:
    """One C file for (instance name, IR) pairs."""
    return PRELUDE + "\n".join(Emitter(kernel, name).run() for name, kernel in kernels)
