"""Runs inside a sandbox without a network: an HTTP endpoint on its own loopback whose requests go out as files.

Started as `python3 -I forward.py FOLDER TOKEN PROGRAM ARGUMENT...`. Request N is written to FOLDER/N.asked, whole or
not at all; the host writes FOLDER/N.answer and then FOLDER/N.done. The program gets OPENAI_BASE_URL and
OPENAI_API_KEY; its exit status is this one's. Plain standard library.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY_BYTES = 64 * 2**20
_numbers = itertools.count()
_naming = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """One request at a time per connection."""

    protocol_version = "HTTP/1.1"
    folder = ""

    def do_GET(self) -> None:
        self._forward("")

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_BODY_BYTES or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            self._reply(413, "application/json", json.dumps({"error": {"message": "send a Content-Length"}}).encode())
            return
        self._forward(self.rfile.read(size).decode("utf-8", "replace"))

    def _forward(self, body: str) -> None:
        asked = json.dumps({"method": self.command, "path": self.path, "body": body})
        with _naming:
            name = os.path.join(self.folder, str(next(_numbers)))
            with open(f"{name}.part", "w", encoding="utf-8") as file:
                file.write(asked)
            os.rename(f"{name}.part", f"{name}.asked")
        pause = 0.002
        while not os.path.exists(f"{name}.done"):
            time.sleep(pause)
            pause = min(pause * 1.3, 0.05)
        with open(f"{name}.answer", encoding="utf-8") as file:
            answer = json.load(file)
        for end in ("asked", "answer", "done"):
            os.unlink(f"{name}.{end}")
        self._reply(answer["status"], answer["type"], answer["body"].encode())

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main(folder: str, token: str, command: list[str]) -> int:
    """Serve until the program has ended; its exit status."""
    os.makedirs(folder, mode=0o777, exist_ok=True)
    Handler.folder = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}/s/{token}/v1",
        "OPENAI_API_KEY": token,
    }
    code = subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
