"""IR -> PTX. One thread block is one program instance; its threads share out the elements of every tile.

A tile lives in shared memory, one array a value; spreads, ranges and integer or boolean arithmetic are recomputed
where they are used. Scalars are in registers, the same in every thread; booleans are 0 or 1. A barrier follows
every step, so no step sees half of another.
"""

from __future__ import annotations

import struct
from typing import Any

from .ir import COMPARE, ELEMENTWISE, REDUCTIONS, VIEWS, Op, Shape, size, split, types_of, walk

THREADS = 128
_HEAD = ".version 7.0\n.target sm_75\n.address_size 64\n"
_PLAIN = {"add": "add", "sub": "sub", "maximum": "max", "minimum": "min"}
_START = {"sum": "0f00000000", "max": "0fFF7FFFFF", "min": "0f7F7FFFFF"}
_START_INT = {"sum": "0", "max": "-2147483648", "min": "2147483647"}
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


def f32(value: float) -> str:
    """A float literal of PTX."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


class PtxEmitter:
    """One kernel -> one entry."""

    def __init__(self, kernel: dict[str, Any], name: str) -> None:
        self._kernel, self._name = kernel, name
        self._types = types_of(kernel)
        self._made = {out: op for op in walk(kernel["body"]) for out in op["out"]}
        self._lines: list[str] = []
        self._registers = {"r": 0, "f": 0, "p": 0, "rd": 0}
        self._shared: list[str] = []
        self._labels = 0
        self._place: dict[str, str] = {}  # value -> register, or shared array
        self._memo: dict[Any, str] = {}

    def run(self) -> str:
        """The entry's text."""
        params = []
        for number, (name, kind) in enumerate(self._kernel["params"]):
            word = "u64" if kind.startswith("*") else "f32" if kind == "f32" else "s32"
            params.append(f".param .{word} p{number}")
            register = self._new("rd" if word == "u64" else "f" if word == "f32" else "r")
            self._line(f"ld.param.{word} {register}, [p{number}];")
            if word == "u64":
                self._line(f"cvta.to.global.u64 {register}, {register};")
            self._place[name] = register
        self._ops(self._kernel["body"])
        declared = [f".reg .{kind} %{name}<{count + 1}>;" for name, kind, count in self._register_kinds()]
        body = "\n".join([*declared, *self._shared, *self._lines, "ret;"])
        return f".visible .entry mt_{self._name}({', '.join(params)})\n{{\n{body}\n}}\n"

    def _register_kinds(self) -> list[tuple[str, str, int]]:
        kinds = {"r": "s32", "f": "f32", "p": "pred", "rd": "u64"}
        return [(name, kinds[name], count) for name, count in self._registers.items()]

    def _line(self, text: str) -> None:
        self._lines.append(text)

    def _new(self, kind: str) -> str:
        self._registers[kind] += 1
        return f"%{kind}{self._registers[kind]}"

    def _label(self) -> str:
        self._labels += 1
        return f"L{self._labels}"

    def _element(self, value: str) -> str:
        return split(self._types[value])[0]

    def _shape(self, value: str) -> Shape:
        return split(self._types[value])[1]

    def _register(self, value: str) -> str:
        return self._new("f" if self._element(value) == "f32" else "r")

    def _kind(self, value: str) -> str:
        return "f32" if self._element(value) == "f32" else "s32"

    def _array(self, value: str) -> str:
        name = f"tile{len(self._shared)}"
        self._shared.append(f".shared .align 4 .b8 {name}[{4 * size(self._shape(value))}];")
        return name

    def _virtual(self, value: str) -> bool:
        op = self._made.get(value)
        if op is None or value in self._place:
            return False
        if op["op"] in VIEWS or op["op"] in ("const", "arange"):
            return True
        return op["op"] in ELEMENTWISE and bool(self._shape(value)) and self._element(value) != "f32"

    # Operations

    def _ops(self, ops: list[Op]) -> None:
        for op in ops:
            name = op["op"]
            self._memo = {}
            if name == "for":
                self._for(op)
            elif name == "if":
                self._if(op)
            elif name == "store":
                self._store(op)
            elif name in ("program_id", "num_programs"):
                register = self._new("r")
                word = "ctaid" if name == "program_id" else "nctaid"
                self._line(f"mov.u32 {register}, %{word}.{'xy'[op['axis']]};")
                self._place[op["out"][0]] = register
            elif self._virtual(op["out"][0]):
                continue
            elif not self._shape(op["out"][0]):
                self._place[op["out"][0]] = self._compute(op, ())
            else:
                self._fill(op["out"][0])

    def _fill(self, value: str) -> str:
        """Compute a tile into a new array, and wait."""
        array = self._array(value)
        index, close = self._each(self._shape(value))
        op = self._made[value]
        register = self._at(value, index) if self._virtual(value) or value in self._place else self._compute(op, index)
        self._put(array, index, value, register)
        close()
        self._place[value] = array
        return array

    def _put(self, array: str, index: tuple[str, ...], value: str, register: str) -> None:
        self._line(f"st.shared.{self._kind(value)} [{self._address(array, index, self._shape(value))}], {register};")

    def _each(self, shape: Shape) -> tuple[tuple[str, ...], Any]:
        """Open the loop in which a thread visits its elements: (index registers, function that closes it)."""
        element, top, end = self._new("r"), self._label(), self._label()
        done = self._new("p")
        self._line(f"mov.u32 {element}, %tid.x;")
        self._line(f"{top}: setp.ge.s32 {done}, {element}, {size(shape)};")
        self._line(f"@{done} bra {end};")
        index: tuple[str, ...] = (element,)
        if len(shape) == 2:
            row, col = self._new("r"), self._new("r")
            self._line(f"div.s32 {row}, {element}, {shape[1]};")
            self._line(f"rem.s32 {col}, {element}, {shape[1]};")
            index = (row, col)
        self._memo = {}

        def close() -> None:
            self._line(f"add.s32 {element}, {element}, {THREADS};")
            self._line(f"bra {top};")
            self._line(f"{end}: bar.sync 0;")
            self._memo = {}

        return index, close

    def _address(self, array: str, index: tuple[str, ...], shape: Shape) -> str:
        place, base = self._new("r"), self._new("r")
        if len(index) == 1:
            self._line(f"shl.b32 {place}, {index[0]}, 2;")
        else:
            self._line(f"mad.lo.s32 {place}, {index[0]}, {shape[1]}, {index[1]};")
            self._line(f"shl.b32 {place}, {place}, 2;")
        self._line(f"mov.u32 {base}, {array};")
        self._line(f"add.s32 {place}, {place}, {base};")
        return place

    def _at(self, value: str, index: tuple[str, ...]) -> str:
        """A register with one element of a value."""
        key = (value, index)
        if key not in self._memo:
            self._memo[key] = self._element_of(value, index)
        return self._memo[key]

    def _element_of(self, value: str, index: tuple[str, ...]) -> str:
        shape = self._shape(value)
        if value in self._place:
            if not shape:
                return self._place[value]
            register = self._register(value)
            address = self._address(self._place[value], index, shape)
            self._line(f"ld.shared.{self._kind(value)} {register}, [{address}];")
            return register
        op = self._made[value]
        name, source = op["op"], (op["in"] or [""])[0]
        if name == "const":
            register = self._register(value)
            text = f32(op["value"]) if self._element(value) == "f32" else str(int(op["value"]))
            self._line(f"mov.{self._kind(value).replace('s32', 'b32')} {register}, {text};")
            return register
        if name == "arange":
            register = self._new("r")
            self._line(f"add.s32 {register}, {index[0]}, {op['lo']};")
            return register
        if name == "splat":
            return self._at(source, ())
        if name == "broadcast":
            own = self._shape(source)
            return self._at(
                source, tuple(self._zero() if dim == 1 else one for one, dim in zip(index, own, strict=True))
            )
        if name == "expand":
            return self._at(source, (index[1 - op["axis"]],))
        if name == "trans":
            return self._at(source, index[::-1])
        return self._compute(op, index)

    def _zero(self) -> str:
        register = self._new("r")
        self._line(f"mov.b32 {register}, 0;")
        return register

    def _compute(self, op: Op, index: tuple[str, ...]) -> str:
        """A register with one element of an operation's result."""
        name, out = op["op"], op["out"][0]
        if name == "load":
            return self._load(op, index)
        if name in REDUCTIONS:
            return self._reduce(op, index)
        if name == "dot":
            return self._dot(op, index)
        inputs = [self._at(one, index) for one in op["in"]]
        result, kind = self._register(out), self._kind(op["in"][-1])
        if name in COMPARE.values():
            test = self._new("p")
            self._line(f"setp.{name}.{kind} {test}, {inputs[0]}, {inputs[1]};")
            self._line(f"selp.s32 {result}, 1, 0, {test};")
        elif name == "where":
            test = self._test(inputs[0])
            self._line(f"selp.{kind} {result}, {inputs[1]}, {inputs[2]}, {test};")
        elif name in ("and", "or"):
            self._line(f"{name}.b32 {result}, {inputs[0]}, {inputs[1]};")
        elif name == "not":
            self._line(f"xor.b32 {result}, {inputs[0]}, 1;")
        elif name in _PLAIN:
            self._line(f"{_PLAIN[name]}.{kind} {result}, {inputs[0]}, {inputs[1]};")
        elif name == "mul":
            self._line(f"mul{'' if kind == 'f32' else '.lo'}.{kind} {result}, {inputs[0]}, {inputs[1]};")
        elif name in ("div", "rem"):
            self._line(f"{name}{'.rn' if kind == 'f32' else ''}.{kind} {result}, {inputs[0]}, {inputs[1]};")
        elif name == "cast":
            self._cast(op, inputs[0], result)
        elif name in ("abs", "neg"):
            self._line(f"{name}.{kind} {result}, {inputs[0]};")
        else:
            self._function(name, inputs[0], result)
        return result

    def _test(self, register: str) -> str:
        test = self._new("p")
        self._line(f"setp.ne.s32 {test}, {register}, 0;")
        return test

    def _cast(self, op: Op, source: str, result: str) -> None:
        element, target = self._element(op["in"][0]), self._element(op["out"][0])
        if target == "f32":
            self._line(f"cvt.rn.f32.s32 {result}, {source};")
        elif element == "f32":
            self._line(f"cvt.rzi.s32.f32 {result}, {source};")
        else:
            self._line(f"mov.b32 {result}, {source};")

    def _function(self, name: str, source: str, result: str) -> None:
        if name == "sqrt":
            self._line(f"sqrt.rn.f32 {result}, {source};")
        elif name == "log":
            self._line(f"lg2.approx.f32 {result}, {source};")
            self._line(f"mul.f32 {result}, {result}, {f32(LN_2)};")
        else:
            factor = LOG2_E if name == "exp" else 2 * LOG2_E
            self._line(f"mul.f32 {result}, {source}, {f32(factor)};")
            self._line(f"ex2.approx.f32 {result}, {result};")
        if name == "tanh":  # 1 - 2 / (exp(2 x) + 1)
            self._line(f"add.f32 {result}, {result}, {f32(1.0)};")
            self._line(f"div.rn.f32 {result}, {f32(-2.0)}, {result};")
            self._line(f"add.f32 {result}, {result}, {f32(1.0)};")

    # Memory

    def _global(self, pointer: str, offset: str) -> str:
        wide = self._new("rd")
        self._line(f"mul.wide.s32 {wide}, {offset}, 4;")
        self._line(f"add.u64 {wide}, {wide}, {self._place[pointer]};")
        return wide

    def _load(self, op: Op, index: tuple[str, ...]) -> str:
        pointer, offset, *rest = op["in"]
        result, kind = self._register(op["out"][0]), self._kind(op["out"][0])
        address = self._global(pointer, self._at(offset, index))
        guard = ""
        if rest:
            guard = f"@{self._test(self._at(rest[0], index))} "
            self._line(f"mov.{kind} {result}, {self._at(rest[1], index)};")
        self._line(f"{guard}ld.global.{kind} {result}, [{address}];")
        return result

    def _store(self, op: Op) -> None:
        pointer, offset, value, *mask = op["in"]
        index, close = self._each(self._shape(offset) or (1,))
        index = index if self._shape(offset) else ()
        address = self._global(pointer, self._at(offset, index))
        register = self._at(value, index)
        guard = f"@{self._test(self._at(mask[0], index))} " if mask else ""
        self._line(f"{guard}st.global.{self._kind(value)} [{address}], {register};")
        close()

    # Sums over an axis

    def _inner(self, bound: int) -> tuple[str, Any]:
        """Open a loop of every thread: (counter, function that closes it)."""
        counter, top, end, done = self._new("r"), self._label(), self._label(), self._new("p")
        self._line(f"mov.b32 {counter}, 0;")
        self._line(f"{top}: setp.ge.s32 {done}, {counter}, {bound};")
        self._line(f"@{done} bra {end};")
        outside = dict(self._memo)

        def close() -> None:
            self._line(f"add.s32 {counter}, {counter}, 1;")
            self._line(f"bra {top};")
            self._line(f"{end}:")
            self._memo = outside

        return counter, close

    def _reduce(self, op: Op, index: tuple[str, ...]) -> str:
        name, source, out = op["op"], op["in"][0], op["out"][0]
        total, kind = self._register(out), self._kind(out)
        start = _START[name] if kind == "f32" else _START_INT[name]
        self._line(f"mov.{kind} {total}, {start};")
        counter, close = self._inner(self._shape(source)[op["axis"]])
        element = self._at(source, (*index[: op["axis"]], counter, *index[op["axis"] :]))
        self._line(f"{'add' if name == 'sum' else name}.{kind} {total}, {total}, {element};")
        close()
        return total

    def _dot(self, op: Op, index: tuple[str, ...]) -> str:
        left, right = op["in"]
        total = self._new("f")
        self._line(f"mov.f32 {total}, {f32(0.0)};")
        counter, close = self._inner(self._shape(left)[1])
        a, b = self._at(left, (index[0], counter)), self._at(right, (counter, index[1]))
        self._line(f"fma.rn.f32 {total}, {a}, {b}, {total};")
        close()
        return total

    # Control flow: conditions and bounds are the same in every thread

    def _held(self, value: str) -> str:
        """A value in storage of its own: a register or an array that nothing else writes."""
        self._memo = {}
        if self._shape(value):
            return self._copied(value, self._array(value))
        register = self._register(value)
        self._line(f"mov.{self._kind(value)} {register}, {self._at(value, ())};")
        return register

    def _copied(self, value: str, array: str) -> str:
        index, close = self._each(self._shape(value))
        self._put(array, index, value, self._at(value, index))
        close()
        return array

    def _move(self, value: str, source: str, target: str) -> None:
        """target = source, both storage of the type of `value`."""
        if not self._shape(value):
            self._line(f"mov.{self._kind(value)} {target}, {source};")
            return
        index, close = self._each(self._shape(value))
        register = self._register(value)
        address = self._address(source, index, self._shape(value))
        self._line(f"ld.shared.{self._kind(value)} {register}, [{address}];")
        self._put(target, index, value, register)
        close()

    def _carry(self, values: list[str], targets: list[str]) -> None:
        held = [self._held(one) for one in values]
        for value, source, target in zip(values, held, targets, strict=True):
            self._move(value, source, target)
        self._memo = {}

    def _for(self, op: Op) -> None:
        low, high, step, *start = op["in"]
        block = op["blocks"][0]
        index, *args = block["args"]
        bounds = [self._at(one, ()) for one in (high, step)]
        counter = self._new("r")
        self._line(f"mov.b32 {counter}, {self._at(low, ())};")
        targets = [self._held(one) for one in start]
        self._place.update(zip([index, *args], [counter, *targets], strict=True))
        top, end, done = self._label(), self._label(), self._new("p")
        self._line(f"{top}: setp.ge.s32 {done}, {counter}, {bounds[0]};")
        self._line(f"@{done} bra {end};")
        self._ops(block["ops"])
        self._carry(block["yield"], targets)
        self._line(f"add.s32 {counter}, {counter}, {bounds[1]};")
        self._line(f"bra {top};")
        self._line(f"{end}:")
        self._place.update(zip(op["out"], targets, strict=True))

    def _if(self, op: Op) -> None:
        test = self._test(self._at(op["in"][0], ()))
        targets = [self._array(out) if self._shape(out) else self._register(out) for out in op["out"]]
        other, end = self._label(), self._label()
        self._line(f"@!{test} bra {other};")
        for number, block in enumerate(op["blocks"]):
            self._ops(block["ops"])
            self._carry(block["yield"], targets)
            self._line(f"bra {end};" if number == 0 else f"{end}:")
            if number == 0:
                self._line(f"{other}:")
        self._place.update(zip(op["out"], targets, strict=True))


def emit_ptx(kernels: list[tuple[str, dict[str, Any]]]) -> str:
    """One module for (instance name, IR) pairs."""
    return _HEAD + "".join(PtxEmitter(kernel, name).run() for name, kernel in kernels)
