from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples on every run and machine, and no deadline, because the cores are shared.
# HYPOTHESIS_PROFILE=default searches at random instead.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# A test compiles one function by torch.compile: without trying each set of vector instructions that the processor says
# it has, and without a precompiled header, which take longer than the function.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# Tests of several folders run scripts under Triton's interpreter, and test folders are no packages.
_spec = importlib.util.spec_from_file_location("interpreting", Path(__file__).parent / "kernels" / "interpreting.py")
sys.modules["interpreting"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["interpreting"])

# Files that take long start first, so that no worker waits for the others at the end: those that keep both cores busy
# by turns with those that wait for time limits.
LONG = (
    "parallel/test_deepspeed.py",
    "pipelines/test_submit.py",
    "envs/compiler/test_compiler_hacks.py",
    "pipelines/test_quickstart.py",
    "envs/sandbox/test_sandbox_contract.py",
    "pipelines/test_restart.py",
    "actors",
    "checkpoint/test_kill_and_resume.py",
    "parallel",
    "kernels/test_interpreter.py",
    "model/test_kernels.py",
)
# Files that share what is costly to make stay with one worker.
TOGETHER = {
    "tests/structure/test_files.py": "syntax trees",
    "tests/structure/test_imports.py": "syntax trees",
    **{
        f"tests/pipelines/test_{name}.py": "a Ray for commands"
        for name in ("lost_engines", "restart", "rollout_modes", "submit")
    },
    **{
        f"tests/actors/test_{name}.py": "a Ray for actors"
        for name in ("broken_environment", "going_on", "learner_ranks", "placement", "publish", "reward_places")
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: min(places.get(path, len(places)) for path in (item.path, item.path.parent)))


gc.disable()  # until all is collected: what is imported stays to the end, however often one looks at it


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays with one worker, and so do the files of `TOGETHER`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = super()._split_scope(nodeid)
            return TOGETHER.get(name, name)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def shown_by_tensorboard() -> Callable[[Path], dict[str, list[tuple[int, float]]]]:
    """A function from a folder of event files to tag -> (step, value) pairs, read by TensorBoard itself."""
    from tensorboard.backend.event_processing import event_accumulator

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        everything = event_accumulator.STORE_EVERYTHING_SIZE_GUIDANCE
        events = event_accumulator.EventAccumulator(str(folder), size_guidance=everything).Reload()
        pairs = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        return {tag: shown for tag, shown in pairs.items() if shown}

    return read


@pytest.fixture(autouse=True)
def own_float_settings() -> Iterator[None]:
    """An actor that is made in this process sets it to flush denormals; what tests come after it must not see that."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
