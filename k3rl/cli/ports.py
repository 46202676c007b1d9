"""Which ports the Ray of this machine listens on, who can reach each, and whether it asks for a token."""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"  # the state of a socket in /proc/net/tcp
_RAY = re.compile(r"gcs_server|raylet|ray::|ray/_private|ray/dashboard|default_worker\.py|plasma")
_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Port:
    """One listening socket. token: whether it asks for one, None where that could not be told."""

    address: str
    port: int
    process: str
    token: bool | None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    def described(self) -> str:
        """Address, process and who may use it, for a reader."""
        asks = {True: "asks for a token", False: "asks for NO token", None: "unknown whether it asks for a token"}
        return f"{self.address}:{self.port} {self.process}: {asks[self.token]}"


def ray_ports(proc: Path = Path("/proc")) -> list[Port]:
    """The listening sockets of the Ray processes that this user may look at, in order of their numbers."""
    sockets = dict(_listening(proc))
    found: dict[tuple[str, int], Port] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if not _RAY.search(command):
                continue
            held = {os.readlink(link) for link in (folder / "fd").iterdir()}
            with_token = b"RAY_AUTH_MODE=token" in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or is another user's
            continue
        for inode, (address, port) in sockets.items():
            if f"socket:[{inode}]" in held and (address, port) not in found:
                name = Path(command.split(" ")[0]).name or "ray"
                found[address, port] = Port(address, port, name[:40], _asks(address, port, with_token))
    return sorted(found.values(), key=lambda one: (one.loopback, one.port))


def _listening(proc: Path) -> Iterator[tuple[str, tuple[str, int]]]:
    """(inode, (address, port)) of every listening TCP socket."""
    for name in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in (proc / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield fields[9], (_address(address), int(port, 16))


def _address(text: str) -> str:
    """The kernel writes words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _asks(address: str, port: int, with_token: bool) -> bool | None:
    """By its answer to a request without one; what does not speak HTTP is gRPC, which asks where its mode says so."""
    place = ipaddress.ip_address(address)
    host = ("127.0.0.1" if place.version == 4 else "::1") if place.is_unspecified else address
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status in (401, 403)
    except (http.client.HTTPException, ConnectionError):
        return with_token
    except OSError:
        return with_token or None
    finally:
        connection.close()
