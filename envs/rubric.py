"""Rubrics from plain reward functions, each in a process of its own with a hard deadline.

    @reward(kind="gate")
    def compiles(files, sandbox): ...

    @reward(weight=0.7)
    def right(answer, hidden): ...

    Environment(..., grader=Rubric.of(compiles, right))

A function asks for what it needs by the names of its arguments (`ARGUMENTS`). It gives a number in its declared
range, or `Invalid` for a submission that cheats. One that raises, hangs, floods or gives anything else makes the
score `Failed`, with its name: nobody judged the answer, so it is not worth 0.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import math
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from k3rl.config import ConfigError
from k3rl.envs.base import Rubric
from k3rl.envs.harness.workspace import files_from, is_artifact
from k3rl.envs.rubric_values import decode, encode
from k3rl.envs.rubric_worker import PRINTED_BYTES, receive, send
from k3rl.envs.sandbox.local import sealed_file
from k3rl.types import Episode, Failed, FailureKind, Invalid, Score, Scored, Task

Kind: TypeAlias = Literal["gate", "add", "mul", "metric"]

ARGUMENTS: Mapping[str, str] = {
    "task": "the Task with its hidden part",
    "answer": "the text that was handed in",
    "parsed": "the JSON value of the answer, None when it is no JSON",
    "files": "files that were handed in, text by path; empty when the answer is no {'files': ...}",
    "data": "task.data",
    "hidden": "task.hidden",
    "episode": "the Episode, None when an answer is graded by itself",
    "messages": "what was said in the episode, a tuple of Message",
    "info": "a dict: task_id, seed, stop_reason, budgets_used, metrics of the episode",
    "sandbox": "a fresh sandbox with `files` in it: run(argv), read, write, function(source, name) (GraderSandbox)",
}
START_S = 60.0  # a worker imports the module of the functions
GRACE_S = 10.0  # past a call's own deadline before its worker counts as dead
_MARK = "__k3rl_reward__"


@dataclass(frozen=True)
class RewardFunction:
    """A function and how it counts.

    kind: "gate" (0 makes the whole 0, anything else changes nothing), "add" (the sum of weight times value), "mul"
    (multiplies the sum), "metric" (recorded only). range: what its values may be. timeout_s: when it is killed.
    memory_bytes: its address space, None for no limit. Raises ConfigError for what cannot work.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    kind: Kind = "add"
    range: tuple[float, float] = (0.0, 1.0)
    timeout_s: float = 30.0
    memory_bytes: int | None = 4 * 2**30
    wants: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.kind not in ("gate", "add", "mul", "metric"):
            raise _error(self, f"kind is {self.kind!r}; choose gate, add, mul or metric")
        low, high = self.range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise _error(self, f"range is {self.range}; give two finite numbers, the smaller one first")
        if self.kind in ("gate", "mul") and low < 0:
            raise _error(self, f"a {self.kind} has the range {self.range}; it must not go below 0")
        if not math.isfinite(self.weight) or (self.weight != 1.0 and self.kind != "add"):
            raise _error(self, f"weight is {self.weight} on a {self.kind}; only `add` has a weight, a finite number")
        if not self.timeout_s > 0:
            raise _error(self, f"timeout_s is {self.timeout_s}; it must be above 0")
        object.__setattr__(self, "wants", _wanted(self))

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def place(self) -> dict[str, str]:
        """Where another process finds the function. Raises ConfigError for one that has no such place."""
        module, name = self.function.__module__, self.function.__qualname__
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or "<" in name:
            raise _error(
                self,
                "it runs in a process of its own, which must find it again: "
                "write it with `def` at the top level of a .py file",
            )
        return {"module": module, "file": os.path.realpath(file), "name": name}


def reward(
    *,
    weight: float = 1.0,
    kind: Kind = "add",
    range: tuple[float, float] = (0.0, 1.0),
    timeout_s: float = 30.0,
    memory_bytes: int | None = 4 * 2**30,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Says how a function counts (see `RewardFunction`); it stays a plain function."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _MARK, RewardFunction(function, weight, kind, range, timeout_s, memory_bytes))
        return function

    return mark


@dataclass(frozen=True)
class FunctionGrader:
    """What `Rubric.of` gives: an `Environment.grader`, checked when it is made."""

    functions: tuple[RewardFunction, ...]

    def __post_init__(self) -> None:
        names = [function.name for function in self.functions]
        if not names:
            raise ConfigError("a rubric needs at least one reward function", key="Rubric.of")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two reward functions are named {twice!r}; give each its own name", key="Rubric.of")
        if all(function.kind == "metric" for function in self.functions):
            raise ConfigError("every function is a metric, so there is no reward; make one a gate or an add")
        for function in self.functions:
            function.place()

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest reward that the declared ranges allow."""
        adds = [f for f in self.functions if f.kind == "add"]
        low = high = 0.0 if adds else 1.0
        for function in adds:
            ends = sorted(function.weight * end for end in function.range)
            low, high = low + ends[0], high + ends[1]
        for function in self.functions:
            if function.kind == "mul":
                products = [end * factor for end in (low, high) for factor in function.range]
                low, high = min(products), max(products)
        gated = any(function.kind == "gate" for function in self.functions)
        return (min(low, 0.0), max(high, 0.0)) if gated else (low, high)

    def __call__(self, provider: str = "bwrap", workers: int = 1) -> FunctionRubric:
        return FunctionRubric(self, provider=provider, workers=workers)


def rubric_of(functions: Sequence[Callable[..., Any] | RewardFunction]) -> FunctionGrader:
    """Use it as `Rubric.of(...)`."""
    made = (
        one if isinstance(one, RewardFunction) else getattr(one, _MARK, None) or RewardFunction(one)
        for one in functions
    )
    return FunctionGrader(tuple(made))


class FunctionRubric(Rubric):
    """Gates first, then sums, products and metrics. `parts` are the values of the functions by name.

    provider: name of the sandbox provider for functions that ask for a sandbox; workers: processes beside each other.
    """

    def __init__(self, grader: FunctionGrader, *, provider: str = "bwrap", workers: int = 1) -> None:
        self._functions = grader.functions
        self._provider = provider
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="k3rl-reward")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        places = [function.place() for function in self._functions]
        self._workers = [_Worker(places) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order."""
        return list(self._pool.map(lambda item: self._score(item[0], item[1], None), items))

    def score_episodes(self, items: Sequence[tuple[Task, Episode]]) -> list[Score]:
        """The same, for functions that look at the whole episode."""
        return list(self._pool.map(lambda item: self._score(item[0], item[1].answer, item[1]), items))

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()

    def _score(self, task: Task, answer: str, episode: Episode | None) -> Score:
        if task.hidden is None and any("hidden" in function.wants for function in self._functions):
            raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the task source")
        worker = self._idle.get()
        try:
            return self._judge(worker, _material(task, answer, episode))
        finally:
            self._idle.put(worker)

    def _judge(self, worker: _Worker, material: Mapping[str, Any]) -> Score:
        parts: dict[str, float] = {}
        closed = False
        for kinds in (("gate",), ("add", "mul", "metric")):
            for number, function in enumerate(self._functions):
                if function.kind not in kinds or (closed and function.kind in ("add", "mul")):
                    continue
                value = self._value(worker, number, material)
                if not isinstance(value, float):
                    return value
                parts[function.name] = value
                closed = closed or (function.kind == "gate" and value == 0.0)
        return Scored(0.0 if closed else self._total(parts), parts)

    def _total(self, parts: Mapping[str, float]) -> float:
        sums = [f.weight * parts[f.name] for f in self._functions if f.kind == "add"]
        factors = [parts[f.name] for f in self._functions if f.kind == "mul"]
        return math.prod(factors, start=math.fsum(sums) if sums else 1.0)

    def _value(self, worker: _Worker, number: int, material: Mapping[str, Any]) -> float | Invalid | Failed:
        """What one function says."""
        function = self._functions[number]
        job = {
            "function": number,
            "timeout_s": function.timeout_s,
            "memory_bytes": function.memory_bytes,
            "sandbox": self._provider if "sandbox" in function.wants else None,
        }
        given = {name: material[name] for name in function.wants if name != "sandbox"}
        if job["sandbox"]:
            given["sandbox_files"] = material["files"]
        try:
            job["arguments"] = encode(given)
        except TypeError as error:
            return _failed(function, f"its arguments cannot be handed over: {error}", FailureKind.RAISED)
        return _read(function, worker.call(job, function.timeout_s))


def _read(function: RewardFunction, report: Mapping[str, Any]) -> float | Invalid | Failed:
    """A worker's report as a value in the declared range."""
    match report["status"]:
        case "value":
            value = decode(report["value"])
        case "timeout":
            return _failed(function, f"no value after {function.timeout_s:g} s; it was killed", FailureKind.HUNG)
        case "flood":
            return _failed(function, f"printed more than {PRINTED_BYTES} bytes; it was killed", FailureKind.FLOODED)
        case "raised":
            return _failed(function, report["error"], FailureKind.RAISED)
        case _:
            return _failed(function, f"its process ended: {report['error']}", FailureKind.DIED)
    if isinstance(value, Invalid):
        return value
    low, high = function.range
    if not isinstance(value, bool | int | float):
        return _failed(function, f"gave {type(value).__name__}; wants a number", FailureKind.BAD_REWARD)
    if not low <= value <= high:  # NaN is nowhere
        return _failed(function, f"gave {value}, outside its range [{low:g}, {high:g}]", FailureKind.BAD_REWARD)
    return float(value)


def _failed(function: RewardFunction, what: str, kind: FailureKind) -> Failed:
    return Failed(f"reward function {function.name}: {what}", kind)


def _material(task: Task, answer: str, episode: Episode | None) -> dict[str, Any]:
    """Everything that a function may ask for but the sandbox."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        parsed = None
    patterns = tuple(task.data.get("artifacts", ("*",)))
    files = {path: text for path, text in (files_from(answer) or {}).items() if is_artifact(path, patterns)}
    info: dict[str, Any] = {"task_id": task.id, "seed": task.seed}
    if episode is not None:
        info |= {
            "stop_reason": str(episode.stop_reason),
            "budgets_used": dict(episode.budgets_used),
            "metrics": dict(episode.metrics),
        }
    return {
        "task": task,
        "answer": answer,
        "parsed": parsed,
        "files": files,
        "data": task.data,
        "hidden": task.hidden,
        "episode": episode,
        "messages": () if episode is None else episode.messages,
        "info": info,
    }


class _Worker:
    """This side of one worker process, started when it is needed and anew when it is gone."""

    def __init__(self, places: Sequence[Mapping[str, str]]) -> None:
        self._places = places
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors = -1

    def call(self, job: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The report of one call; {"status": "died"} when the worker itself failed."""
        try:
            control = self._started()
            control.settimeout(timeout_s + GRACE_S)
            send(control, job)
            report = receive(control)
        except OSError as error:  # a timeout is one
            report = {"status": "died", "error": f"{type(error).__name__}: {error}"}
            self.kill()
        if report is None:
            report = {"status": "died", "error": f"the worker is gone: {self._complaint()}"}
            self.kill()
        if "error" in report and "status" not in report:
            self.kill()
            return {"status": "raised", "error": f"its module cannot be loaded: {report['error']}"}
        found: Mapping[str, Any] = report
        return found

    def kill(self) -> None:
        """End the process; what it runs ends with it. Idempotent."""
        if self._process is None or self._control is None:
            return
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it leaves by itself, so that it can clear up
            self._process.wait(GRACE_S)
        self._process.kill()
        self._process.wait()
        os.close(self._errors)
        self._process = self._control = None

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        self._errors = sealed_file("errors", b"")
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
            "from k3rl.envs.rubric_worker import main; main(int(sys.argv[2]))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, json.dumps(sys.path), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._control = ours
        ours.settimeout(START_S)
        send(ours, list(self._places))
        ready = receive(ours)
        if ready is None or "error" in ready:
            what = self._complaint() if ready is None else ready["error"]
            self.kill()
            raise ConnectionError(f"the functions cannot be loaded in a process of their own: {what}")
        return ours

    def _complaint(self) -> str:
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 400, max(0, size - 400)).decode("utf-8", "replace").strip()


def _wanted(function: RewardFunction) -> tuple[str, ...]:
    """The names of the arguments that it asks for. Raises ConfigError for one that nobody has."""
    wants = []
    for name, parameter in inspect.signature(function.function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            wants.append(name)
        elif parameter.default is parameter.empty:
            near = difflib.get_close_matches(name, ARGUMENTS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            listing = "\n".join(f"  {known:<9} {about}" for known, about in ARGUMENTS.items())
            raise _error(function, f"there is no argument {name!r}{hint} It can ask for:\n{listing}")
    return tuple(wants)


def _error(function: RewardFunction, what: str) -> ConfigError:
    return ConfigError(f"reward function {function.name}: {what}", key=function.name)
