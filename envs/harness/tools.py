"""The tools of an agent in a workspace. What they say is text for the policy; its mistakes are said, never raised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from k3rl.envs.harness.workspace import Workspace

_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float)}
MAX_FILE_BYTES = 256 * 1024


class ToolError(Exception):
    """A call that cannot be done as asked; the policy reads why."""


class Tool(ABC):
    """One tool. properties: JSON schema of its arguments; required: those that a call must give."""

    name: ClassVar[str]
    about: ClassVar[str]
    properties: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    required: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, timeout_s: float, output_chars: int) -> None:
        self._timeout_s = timeout_s
        self._output_chars = output_chars

    def declaration(self) -> dict[str, Any]:
        """In OpenAI form."""
        parameters = {"type": "object", "properties": dict(self.properties), "required": list(self.required)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }

    async def call(self, arguments: Any, workspace: Workspace) -> str:
        """What the policy reads, cut to `output_chars`. Raises SandboxError when the machine failed."""
        try:
            return shortened(await self.run(self._checked(arguments), workspace), self._output_chars)
        except ToolError as error:
            return f"error: {error}"

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """Do it. Raises ToolError for a mistake of the caller."""

    def _checked(self, arguments: Any) -> Mapping[str, Any]:
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {self.name} are not a JSON object")
        wanted = f"{self.name} takes {', '.join(self.properties) or 'no arguments'}"
        for name in self.required:
            if name not in arguments:
                raise ToolError(f"{name} is missing; {wanted}")
        for name, value in arguments.items():
            if name not in self.properties:
                raise ToolError(f"there is no argument {name!r}; {wanted}")
            kind = self.properties[name]["type"]
            if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
                raise ToolError(f"{name} must be of type {kind}")
        return arguments


class Bash(Tool):
    """Runs a command."""

    name = "bash"
    about = "run a bash command in the workspace; nothing that it starts goes on after it"
    properties = {"command": {"type": "string"}, "timeout_s": {"type": "number"}}
    required = ("command",)

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """Exit status, then both outputs."""
        command = arguments["command"]
        if "\0" in command or len(command) > 100_000:
            raise ToolError("a command has at most 100000 characters, none of them NUL")
        limit = min(self._timeout_s, max(0.1, float(arguments.get("timeout_s", self._timeout_s))))
        done = await workspace.run(command, limit)
        if done.timed_out:
            state = f"killed after {limit:g} s"
        elif done.returncode is None:
            state = "killed for printing too much"
        else:
            state = f"exit status {done.returncode}"
        notes = " (output cut)" if done.truncated else ""
        notes += " (the workspace is over its size; delete files)" if done.workspace_exceeded else ""
        parts = [part.decode("utf-8", "replace").rstrip("\n") for part in (done.stdout, done.stderr)]
        return "\n".join([state + notes, *filter(None, parts)])


class ReadFile(Tool):
    """Shows lines of a file."""

    name = "read_file"
    about = "show a text file with line numbers; first and last limit it to these lines"
    properties = {"path": {"type": "string"}, "first": {"type": "integer"}, "last": {"type": "integer"}}
    required = ("path",)

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """Numbered lines."""
        lines = (await _text(workspace, arguments["path"])).splitlines()
        first, last = max(1, arguments.get("first", 1)), arguments.get("last", len(lines))
        shown = [f"{number:>5}  {line}" for number, line in enumerate(lines, 1) if first <= number <= last]
        return "\n".join(shown) or f"(no such lines; the file has {len(lines)})"


class WriteFile(Tool):
    """Makes or replaces a file."""

    name = "write_file"
    about = "make or replace a file"
    properties = {"path": {"type": "string"}, "content": {"type": "string"}}
    required = ("path", "content")

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """How much was written."""
        await _write(workspace, arguments["path"], arguments["content"])
        return f"wrote {len(arguments['content'])} characters"


class Edit(Tool):
    """Replaces one piece of a file."""

    name = "edit"
    about = "replace `old`, which must occur exactly once in the file, by `new`"
    properties = {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}}
    required = ("path", "old", "new")

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """That it was done."""
        text = await _text(workspace, arguments["path"])
        count = text.count(arguments["old"]) if arguments["old"] else 0
        if count != 1:
            raise ToolError(f"`old` occurs {count} times; give text that occurs exactly once")
        await _write(workspace, arguments["path"], text.replace(arguments["old"], arguments["new"]))
        return "done"


class Submit(Tool):
    """Hands in the declared files; the environment acts on it."""

    name = "submit"
    about = "hand in the workspace as it is now"

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """Nothing is left to do in the workspace."""
        return "submitted"


TOOLS: dict[str, type[Tool]] = {tool.name: tool for tool in (Bash, ReadFile, WriteFile, Edit, Submit)}


def shortened(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning and the end, and how much is left out between them."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


async def _text(workspace: Workspace, path: str) -> str:
    try:
        data = await workspace.read(path.removeprefix("/box/"), MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ToolError(_reason(path, error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(f"{path} has more than {MAX_FILE_BYTES} bytes; look at parts of it with bash")
    return text


async def _write(workspace: Workspace, path: str, text: str) -> None:
    try:
        await workspace.write(path.removeprefix("/box/"), text)
    except (OSError, ValueError) as error:
        raise ToolError(_reason(path, error)) from None


def _reason(path: str, error: Exception) -> str:
    """Why a path cannot be used; the host's own paths are not told."""
    return f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else f"{path}: cannot be used"
