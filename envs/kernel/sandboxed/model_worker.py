"""Runs a task file's `Model`, or a submission's `ModelNew`, on the CPU. In a sandbox; the two never share one.

request.json: kind ("reference" or "candidate"), seeds of the trials, init_seed. The reference makes the
arguments and inputs, as torch saves tensors, and leaves outputs in float64 as N.P.out; the candidate reads those files
and has no reference, and leaves N.P.ghost too, outputs made while Triton kernels do nothing.
"""

from __future__ import annotations

import copy
import glob
import json
from typing import Any

import torch
from launches import module_of


def widened(value: Any) -> Any:
    """Floating-point tensors in float64."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def outputs_of(value: Any) -> list[torch.Tensor]:
    """The tensors that a model returned."""
    values = list(value) if isinstance(value, tuple | list) else [value]
    if not all(type(one) is torch.Tensor for one in values):
        raise TypeError("a model must return plain tensors")
    return values


def without_kernels() -> None:
    """Launches of interpreted Triton kernels do nothing from now on."""
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.run = lambda *arguments, **options: None


def saved(number: int, results: list[torch.Tensor], kinds: list[torch.dtype], ending: str) -> list[dict[str, Any]]:
    """Write outputs in float64; what they are."""
    row = []
    for place, (one, kind) in enumerate(zip(results, kinds, strict=True)):
        with open(f"{number}.{place}.{ending}", "wb") as file:
            file.write(one.double().contiguous().numpy().tobytes())
        row.append({"dtype": str(kind).removeprefix("torch."), "shape": list(one.shape)})
    return row


def reference(request: dict[str, Any]) -> dict[str, Any]:
    """Make arguments and inputs, and the right outputs."""
    task = module_of("task.py")
    torch.manual_seed(request["init_seed"])
    arguments = task.get_init_inputs()
    torch.save(arguments, "init.args")
    torch.manual_seed(request["init_seed"])
    model, wide = task.Model(*arguments), None
    made: dict[str, Any] = {"inputs": ["init.args"], "out": []}
    for number, seed in enumerate(request["seeds"]):
        torch.manual_seed(seed)
        inputs = task.get_inputs()
        for place, one in enumerate(inputs):
            torch.save(one, f"{number}.{place}.in")
            made["inputs"].append(f"{number}.{place}.in")
        with torch.no_grad():
            kinds = [one.dtype for one in outputs_of(model(*inputs))]
            wide = wide or copy.deepcopy(model).double()
            made["out"].append(saved(number, outputs_of(wide(*map(widened, inputs))), kinds, "out"))
    return made


def candidate(request: dict[str, Any]) -> dict[str, Any]:
    """The submission's outputs, and those that it gives when no Triton kernel does anything."""
    torch.manual_seed(request["init_seed"])
    model = module_of("kernel.py").ModelNew(*torch.load("init.args", weights_only=True))
    made: dict[str, Any] = {"out": [], "ghost": []}
    for ending in ("out", "ghost"):
        if ending == "ghost":
            without_kernels()
        for number, _ in enumerate(request["seeds"]):
            count = len(glob.glob(f"{number}.*.in"))
            inputs = [torch.load(f"{number}.{place}.in", weights_only=True) for place in range(count)]
            with torch.no_grad():
                results = outputs_of(model(*inputs))
            made[ending].append(saved(number, results, [one.dtype for one in results], ending))
    return made


def main() -> None:
    """All trials in order."""
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    made = (reference if request["kind"] == "reference" else candidate)(request)
    with open("made.json", "w", encoding="utf-8") as file:
        json.dump(made, file)


if __name__ == "__main__":
    main()
