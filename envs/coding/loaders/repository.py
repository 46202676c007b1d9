"""Repositories of users' tasks: a folder, or a git bundle at a commit, as files; and patches to them."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

MAX_FILES = 20_000
MAX_BYTES = 256 * 2**20
GIT_S = 120.0


class BadRepository(ValueError):
    """What is named as a repository is none, or a patch does not fit it."""


@lru_cache(maxsize=8)
def files_of(place: str, commit: str | None) -> Mapping[str, str]:
    """The files of a folder (its .git left out) or of a bundle's commit, by path. Raises BadRepository.

    Bytes that are no UTF-8 are kept as surrogates, so writing a file back gives the same bytes.
    """
    path = Path(place)
    if path.is_dir():
        found = {
            file.relative_to(path).as_posix(): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file() and not file.is_symlink() and ".git" not in file.relative_to(path).parts
        }
    elif path.is_file():
        found = _bundled(path, commit or "HEAD")
    else:
        raise BadRepository(f"{place} is neither a folder nor a git bundle")
    if not found:
        raise BadRepository(f"{place} holds no file")
    if len(found) > MAX_FILES or sum(map(len, found.values())) > MAX_BYTES:
        raise BadRepository(f"{place} has more than {MAX_FILES} files or {MAX_BYTES} bytes")
    return {name: data.decode("utf-8", "surrogateescape") for name, data in found.items()}


def _bundled(bundle: Path, commit: str) -> dict[str, bytes]:
    if commit.startswith("-"):
        raise BadRepository(f"{commit!r} is no commit")
    with tempfile.TemporaryDirectory(prefix="k3rl-bundle-") as folder:
        _git(["clone", "--quiet", "--bare", str(bundle), folder])
        packed = _git(["-C", folder, "archive", "--format=tar", commit])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {}
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                files[member.name] = content.read()
    return files


def touched(patch: str) -> frozenset[str]:
    """Paths that a unified diff names, before and after."""
    names = re.findall(r"^(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)", patch, re.MULTILINE)
    names += [name for pair in re.findall(r"^diff --git a/(\S+) b/(\S+)$", patch, re.MULTILINE) for name in pair]
    return frozenset(name.strip() for name in names) - {"/dev/null"}


def patched(files: Mapping[str, str], patch: str) -> dict[str, str]:
    """Files after a patch. Raises BadRepository when it does not apply."""
    with tempfile.TemporaryDirectory(prefix="k3rl-patch-") as folder:
        root = Path(folder)
        for name in touched(patch) & files.keys():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(files[name].encode("utf-8", "surrogateescape"))
        _git(["-C", folder, "init", "--quiet"])
        _git(["-C", folder, "apply", "--whitespace=nowarn", "-"], patch.encode("utf-8", "surrogateescape"))
        after = {name: text for name, text in files.items() if name not in touched(patch)}
        for name in touched(patch):
            if (root / name).is_file():
                after[name] = (root / name).read_bytes().decode("utf-8", "surrogateescape")
    return after


def _git(arguments: list[str], stdin: bytes = b"") -> bytes:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"}
    try:
        done = subprocess.run(
            ["git", *arguments], input=stdin, capture_output=True, timeout=GIT_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadRepository(f"git {arguments[0]}: {error}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise BadRepository(f"git {' '.join(arguments[:4])}: {said}")
    return done.stdout
