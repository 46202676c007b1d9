"""The run directory: the files that are the interface of a run, for people, tools and a later resume.

    outputs/<name>/
      run.json                      status, ids, hash, versions; replaced atomically
      run.lock                      held while a process works on the run
      configs/attempt_1/            resolved.json, launch.toml, command.txt, launch.json, dirty.diff
      configs/latest -> attempt_1
      logs/attempt_1/driver.log     what the run said; logs/latest -> attempt_1
      metrics.jsonl                 k3rl.run.metrics
      tensorboard/ wandb/           the same elsewhere, where it was asked for: k3rl.run.sinks
      traces/                       k3rl.run.recorder
      checkpoints/<stage>/step_20/  written by the pipelines
      export/<stage>/               checkpoints in the official layout
      tokenizer/                    of the checkpoint that the run starts from, for whoever reads its tokens

An attempt never overwrites another one.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import BaseModel

from k3rl.config import ConfigError, K3Error, MissingResource, config_hash, diff, to_tree
from k3rl.run.files import link_atomic, read_object, write_atomic
from k3rl.run.options import RunOptions
from k3rl.run.redact import redact, redact_words

SCHEMA = 1
PACKAGES = ("k3rl", "torch", "ray", "numpy", "pydantic", "safetensors", "datasets", "pyarrow", "triton", "vllm")
_MENDED = (
    "states and exports of the run are not touched: rename this file, and the command of the run with --resume writes "
    "it anew and goes on"
)
_UNKNOWN = "its states are not touched: delete this file, and what changed since that attempt is not told"
_LARGEST_DIFF_BYTES = 1_000_000
_LOCK_TRIES = 5


class RunStopped(K3Error):
    """A run ended itself at a limit that it was given; its last state is saved. The message says what to do."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What run.json holds. Times are Unix seconds; `ended` is None while the run goes on."""

    schema: int
    id: str
    name: str
    pipeline: str
    status: str  # running | finished | failed | interrupted | stopped
    attempt: int
    started: float
    ended: float | None
    config_hash: str
    git: Mapping[str, Any] | None
    versions: Mapping[str, str]
    error: str | None = None
    notes: Sequence[str] = ()
    """What a person should know of this attempt: a GPU without kernels, for example."""


class RunDirectory:
    """One run on disk. `create` starts an attempt and holds the lock; `open` only reads.

    As a context manager it writes how the attempt ended: finished, failed (with the error), interrupted, or stopped at
    a limit of its own (with what was passed).
    """

    def __init__(self, root: Path, info: RunInfo, lock: IO[bytes] | None = None, changed: tuple[str, ...] = ()) -> None:
        self.root = root
        self.info = info
        self.changed = changed
        """Dotted names whose values differ from the attempt before; empty for a first attempt."""
        self._lock = lock

    # ------------------------------------------------------------------------------------------------ starting

    @classmethod
    def create(cls, root: Path, config: BaseModel, pipeline: str, options: RunOptions | None = None) -> RunDirectory:
        """Start an attempt: a new run, the next attempt with `resume`, a fresh run in its place with `clean`.

        Raises ConfigError when the name is used and neither was asked for, when another process works on the run,
        when there is nothing to resume or a run of another kind, or when the folder holds something else than a run.
        """
        root, options = root.absolute(), options or RunOptions()  # other processes have another working directory
        if options.resume and options.clean:
            raise ConfigError("--resume continues a run and --clean deletes it: give one of them", key="--resume")
        before = _existing(root, options, pipeline)
        if before is not None:
            _check_kind(root, before, pipeline, config)
        root.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(root)
        if options.clean:
            _empty(root)
            before = None
        attempt = before.attempt + 1 if before else 1
        info = RunInfo(
            schema=SCHEMA,
            id=before.id if before else secrets.token_hex(6),
            name=root.resolve().name,
            pipeline=pipeline,
            status="running",
            attempt=attempt,
            started=time.time(),
            ended=None,
            config_hash=config_hash(config),
            git=git_state(),
            versions=package_versions(),
        )
        write_atomic(root / "run.json", json.dumps(asdict(info), indent=1) + "\n")
        changed = _write_attempt(root, info, config, options)
        return cls(root, info, lock, changed)

    @classmethod
    def open(cls, root: Path) -> RunDirectory:
        """A run to read, whatever its state. Raises MissingResource when there is none."""
        info = _read_info(root)
        if info is None:
            raise MissingResource(f"{root} is not a run directory: it has no run.json")
        return cls(root, info)

    def next_attempt(self) -> None:
        """Count on, in the same process and with the same configuration: its actors were started again."""
        before = self.attempt_dir()
        self._write(attempt=self.info.attempt + 1, started=time.time(), notes=())
        shutil.copytree(before, self.attempt_dir())
        self.logs_dir.mkdir(parents=True)
        for path in (self.attempt_dir(), self.logs_dir):
            link_atomic(path.with_name("latest"), path.name)

    def add_note(self, text: str) -> None:
        """Keeps a sentence about this attempt in run.json, once."""
        if (text := redact(text)) not in self.info.notes:
            self._write(notes=[*self.info.notes, text])

    def _write(self, **changes: Any) -> None:
        self.info = RunInfo(**asdict(self.info) | changes)
        write_atomic(self.root / "run.json", json.dumps(asdict(self.info), indent=1) + "\n")

    # -------------------------------------------------------------------------------------------------- ending

    def finish(self, status: str, error: str | None = None) -> None:
        """Write how the attempt ended and give the lock back."""
        self._write(status=status, ended=time.time(), error=error and redact(error))
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish("finished")
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.finish("interrupted")
        else:
            status = "stopped" if isinstance(error, RunStopped) else "failed"
            self.finish(status, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------------- reading

    def refresh(self) -> RunInfo:
        """Read run.json again, for a reader that follows a run."""
        self.info = _read_info(self.root) or self.info
        return self.info

    def is_alive(self) -> bool:
        """Whether a process works on the run now. A run that says `running` and is not alive has crashed."""
        if self._lock is not None:
            return True
        try:
            with open(self.root / "run.lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def resolved(self, attempt: int | None = None) -> dict[str, Any]:
        """The resolved configuration of an attempt (the last one) as plain values."""
        path = self.attempt_dir(attempt) / "resolved.json"
        if not path.is_file():
            raise MissingResource(f"{path} is missing; the run has no attempt whose configuration could be read")
        return read_object(path, _UNKNOWN)

    # --------------------------------------------------------------------------------------------------- paths

    def attempt_dir(self, attempt: int | None = None) -> Path:
        return self.root / "configs" / f"attempt_{attempt or self.info.attempt}"

    @property
    def logs_dir(self) -> Path:
        return self.root / "logs" / f"attempt_{self.info.attempt}"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def traces_dir(self) -> Path:
        return self.root / "traces"

    @property
    def checkpoints_dir(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tokenizer_dir(self) -> Path:
        return self.root / "tokenizer"


def _read_info(root: Path) -> RunInfo | None:
    path = root / "run.json"
    try:
        values = read_object(path, _MENDED)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if values.get("schema") != SCHEMA:
        raise ConfigError(f"{path} has schema {values.get('schema')!r}; this version reads {SCHEMA}")
    try:
        info = RunInfo(**values)
    except TypeError as error:
        raise ConfigError(f"{path} is damaged ({str(error).removeprefix('RunInfo.__init__() ')}); {_MENDED}") from error
    wanted = {"id": str, "name": str, "pipeline": str, "status": str, "attempt": int, "config_hash": str}
    for name, kind in wanted.items():
        if not isinstance(getattr(info, name), kind) or (name == "attempt" and info.attempt < 1):
            raise ConfigError(f"{path} is damaged ({name} is {getattr(info, name)!r:.60}); {_MENDED}")
    return info


def _rebuilt(root: Path, pipeline: str) -> RunInfo | None:
    """What is known of a run without its run.json, by its other files; None where it never began an attempt."""
    attempts = [int(path.name.removeprefix("attempt_")) for path in (root / "configs").glob("attempt_*")]
    if not attempts:
        return None
    folder = root / "configs" / f"attempt_{max(attempts)}"
    about = read_object(folder / "launch.json", _MENDED) if (folder / "launch.json").is_file() else {}
    return RunInfo(
        schema=SCHEMA,
        id=str(about.get("id") or secrets.token_hex(6)),
        name=root.resolve().name,
        pipeline=str(about.get("pipeline", pipeline)),
        status="failed",
        attempt=max(attempts),
        started=float(about.get("started", 0.0)),
        ended=None,
        config_hash=str(about.get("config_hash", "")),
        git=about.get("git"),
        versions=about.get("versions", {}),
    )


def _existing(root: Path, options: RunOptions, pipeline: str) -> RunInfo | None:
    """What `root` holds before the attempt. Raises ConfigError where the options do not fit it.

    A run whose run.json is gone is known by its other files.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; name a folder with --out", key="--out", got=str(root))
    used = {path.name for path in root.iterdir()} - {"run.lock"} if root.exists() else set()
    if not used:
        if options.resume:
            raise ConfigError(f"there is no run in {root} to resume; leave out --resume to start one", key="--resume")
        return None
    if "run.json" not in used and (options.clean or _rebuilt(root, pipeline) is None):
        raise ConfigError(
            f"{root} holds files that are not a run ({', '.join(sorted(used)[:3])}); name another folder with --out",
            key="--out",
            got=str(root),
        )
    if options.clean:
        return None
    info = _read_info(root) or _rebuilt(root, pipeline)
    if info is not None and not options.resume:
        raise ConfigError(
            f"{root} already holds a run ({info.pipeline}, {info.status}, attempt {info.attempt}): "
            "use --resume to continue it, --clean to delete it and start again, or --out for another folder",
            key="--out",
            got=str(root),
        )
    return info


def _check_kind(root: Path, before: RunInfo, pipeline: str, config: BaseModel) -> None:
    """Refuses to go on with another pipeline, or with a preset whose sections are others (`quickstart`)."""
    folder = root / "configs" / f"attempt_{before.attempt}"
    path = folder / "resolved.json"
    old = set(read_object(path, _UNKNOWN)) if path.is_file() else set()
    new = set(type(config).model_fields)
    if before.pipeline == pipeline and (not old or len(old ^ new) <= len(old & new)):  # versions add single keys
        return
    command = (folder / "command.txt").read_text(encoding="utf-8").strip() if old else f"k3rl {before.pipeline}"
    raise ConfigError(
        f"{root} holds a run of another kind, started by `{command}`; resume it with those words, or name another "
        "folder with --out",
        key="--resume",
        got=str(root),
    )


def _take_lock(root: Path) -> IO[bytes]:
    """Held by the process until it ends, however it ends."""
    lock = open(root / "run.lock", "ab")  # noqa: SIM115 (it stays open as long as the attempt)
    for _ in range(_LOCK_TRIES):  # a reader that asks `is_alive` holds it for an instant
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(0.05)
    lock.close()
    message = f"another process works on {root} now; wait for it, stop it, or name another folder with --out"
    raise ConfigError(message, key="--out", got=str(root))


def _empty(root: Path) -> None:
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "run.lock":
            path.unlink()


def _write_attempt(root: Path, info: RunInfo, config: BaseModel, options: RunOptions) -> tuple[str, ...]:
    """Fill configs/attempt_N; returns the dotted names that differ from the attempt before."""
    folder, logs = (root / room / f"attempt_{info.attempt}" for room in ("configs", "logs"))
    for path in (folder, logs):
        path.mkdir(parents=True)
    tree = to_tree(config)
    write_atomic(folder / "resolved.json", json.dumps(tree, indent=1) + "\n")
    write_atomic(folder / "command.txt", redact(shlex.join(redact_words(options.argv))) + "\n")
    launch = "".join(f"# {path.name}\n{path.read_text(encoding='utf-8')}\n" for path in options.files)
    write_atomic(folder / "launch.toml", redact(launch))
    about: dict[str, Any] = {"id": info.id, "pipeline": info.pipeline, "preset": options.preset}
    about |= {"config_hash": info.config_hash, "git": info.git, "versions": info.versions, "started": info.started}
    write_atomic(folder / "launch.json", json.dumps(about, indent=1) + "\n")
    if patch := dirty_diff():
        write_atomic(folder / "dirty.diff", redact(patch))
    before = folder.with_name(f"attempt_{info.attempt - 1}") / "resolved.json"
    changed = tuple(diff(read_object(before, _UNKNOWN), tree)) if before.exists() else ()
    for path in (folder, logs):
        link_atomic(path.with_name("latest"), path.name)
    return changed


# ------------------------------------------------------------------------------------------------- provenance


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a number, as installed; nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state() -> dict[str, Any] | None:
    """Commit and whether files differ from it, of the repository k3rl runs from; None when installed elsewhere."""
    top = _repository()
    commit = _git(top, "rev-parse", "HEAD") if top else None
    if top is None or commit is None:
        return None
    return {"commit": commit.strip(), "dirty": bool((_git(top, "status", "--porcelain") or "").strip())}


def dirty_diff() -> str | None:
    """`git diff HEAD` of that repository, cut at 1 MB; None when there is none."""
    top = _repository()
    patch = _git(top, "diff", "HEAD") if top else None
    return patch[:_LARGEST_DIFF_BYTES] if patch else None


def _repository() -> Path | None:
    top = Path(__file__).resolve().parents[2]
    return top if (top / ".git").exists() else None


def _git(top: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(top), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
