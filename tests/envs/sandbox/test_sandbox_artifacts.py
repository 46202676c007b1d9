"""Only declared, plain, small files come out of a sandbox; everything else is refused with its reason."""

from __future__ import annotations

import asyncio

import pytest

from k3rl.config import ConfigError
from k3rl.envs.sandbox import ArtifactLimits, Artifacts, Refusal, SandboxLimits, collect, provider_named
from k3rl.envs.sandbox.artifacts import refusal_of

LIMITS = ArtifactLimits(files=3, file_bytes=200_000, total_bytes=300_000)


def collected(script: str, *patterns: str, limits: ArtifactLimits = LIMITS) -> Artifacts:
    async def body() -> Artifacts:
        async with await provider_named("bwrap").create(SandboxLimits(output_bytes=4096)) as box:
            done = await box.exec(["bash", "-c", script])
            assert done.returncode == 0, done.stderr
            return await collect(box, patterns, limits)

    return asyncio.run(body())


def test_declared_plain_files_come_out_and_every_other_kind_is_refused_by_name() -> None:
    script = """
mkdir -p out/deep; printf one > out/a.txt; printf two > out/deep/b.txt; printf no > other.txt
ln -s /usr/bin/env out/link; ln -s deep out/folder; printf x > out/h1; ln out/h1 out/h2; mkfifo out/pipe
truncate -s 50M out/sparse; head -c 250000 /dev/zero > out/large
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('out/socket')"
"""
    found = collected(script, "out/*")
    assert found.files == {"out/a.txt": b"one", "out/deep/b.txt": b"two"}
    assert found.refused == {
        "out/link": Refusal.SYMLINK,
        "out/folder": Refusal.SYMLINK,
        "out/h1": Refusal.HARDLINK,
        "out/h2": Refusal.HARDLINK,
        "out/pipe": Refusal.PIPE,
        "out/socket": Refusal.SOCKET,
        "out/sparse": Refusal.SPARSE,
        "out/large": Refusal.TOO_LARGE,
    }


def test_numbers_and_sizes_are_limited_together() -> None:
    found = collected("for i in 1 2 3 4 5; do head -c 110000 /dev/urandom > f$i; done", "f*")
    assert list(found.files) == ["f1", "f2"]
    assert found.refused == {"f3": Refusal.TOO_LARGE, "f4": Refusal.TOO_LARGE, "f5": Refusal.TOO_LARGE}
    many = collected("for i in 1 2 3 4 5; do echo $i > f$i; done", "f*")
    assert (list(many.files), many.refused) == (["f1", "f2", "f3"], {"f4": Refusal.TOO_MANY, "f5": Refusal.TOO_MANY})
    flood = collected("touch f{1..400}", "f*")
    assert (flood.files, flood.refused) == ({}, {"f*": Refusal.TOO_MANY})


def test_names_cannot_lie_about_where_a_file_is() -> None:
    found = collected(
        "printf v > $'line\\nfeed'; printf w > $'tab\\there'; mkdir -p 'a/ b'; printf x > 'a/ b/..c'", "*"
    )
    assert found.files == {"a/ b/..c": b"x", "line\nfeed": b"v", "tab\there": b"w"}


@pytest.mark.parametrize("pattern", ["../up", "a/../../up", "/etc/passwd", "", "a\0b"])
def test_a_declaration_outside_the_workspace_is_refused(pattern: str) -> None:
    async def body() -> None:
        async with await provider_named("bwrap").create() as box:
            await collect(box, [pattern])

    with pytest.raises(ConfigError, match="inside the workspace"):
        asyncio.run(body())


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (("b", 1, 0, 0, "disk"), Refusal.DEVICE),
        (("c", 1, 0, 0, "null"), Refusal.DEVICE),
        (("D", 1, 0, 0, "door"), Refusal.UNREADABLE),
        (("f", 1, 1, 8, "/etc/passwd"), Refusal.PATH_ESCAPE),
        (("f", 1, 1, 8, "a/../../up"), Refusal.PATH_ESCAPE),
        (("f", 1, 1, 8, ""), Refusal.PATH_ESCAPE),
        (("f", 1, 100_000, 8, "holes"), Refusal.SPARSE),
        (("f", 1, 100_000, 200, "full"), None),
        (("f", 1, 60_000, 0, "small"), None),
    ],
)
def test_what_a_listing_says_decides(listed: tuple[str, int, int, int, str], why: Refusal | None) -> None:
    assert refusal_of(*listed, ArtifactLimits()) is why


def test_a_file_that_is_exchanged_for_a_link_after_it_was_listed_is_not_read() -> None:
    async def body() -> Artifacts:
        async with await provider_named("bwrap").create() as box:
            await box.write("answer", b"mine")

            class Swapping(type(box)):  # type: ignore[misc]
                async def read(self, path: str, max_bytes: int = 0) -> bytes:
                    await box.exec(["ln", "-sf", "/usr/bin/env", path])
                    data: bytes = await super().read(path, max_bytes)
                    return data

            box.__class__ = Swapping
            return await collect(box, ["answer"])

    assert asyncio.run(body()) == Artifacts({}, {"answer": Refusal.UNREADABLE})
