"""Parts that a harness may have beyond its tools: a memory that outlives the conversation, and skills on demand.

Each part brings tools, a word for the system message, and a word for a conversation that begins anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.config import ConfigError
from k3rl.envs.harness.tools import Tool, ToolError
from k3rl.envs.harness.workspace import Workspace

MAX_NOTE_CHARS = 4_000
MAX_SKILL_CHARS = 64_000


class Module(ABC):
    """A part of a harness, made anew for each episode."""

    @abstractmethod
    def tools(self, *, timeout_s: float, output_chars: int) -> Sequence[Tool]:
        """What it adds to the tools."""

    def system(self) -> str:
        """What it adds to the system message."""
        return ""

    def recalled(self) -> str:
        """What a policy whose conversation begins anew should know."""
        return ""

    def state(self) -> Any:
        """Plain values from which `restore` goes on."""
        return None

    def restore(self, state: Any) -> None:
        """Go on from what `state` gave."""
        return None


# --------------------------------------------------------------------------------------------------------- memory


class Memory(Module):
    """Notes by key. They outlive cuts of the conversation and are shared with sub-agents; an episode has its own."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self.notes: dict[str, str] = {}

    def tools(self, *, timeout_s: float, output_chars: int) -> Sequence[Tool]:
        """memory_write, memory_read."""
        kinds = (MemoryWrite, MemoryRead)
        return [kind(self, timeout_s=timeout_s, output_chars=output_chars) for kind in kinds]

    def write(self, key: str, text: str) -> str:
        """What the policy reads. Empty text forgets the key."""
        if not key or len(key) > 100 or len(text) > MAX_NOTE_CHARS:
            raise ToolError(f"a key has 1 to 100 characters, a note at most {MAX_NOTE_CHARS}")
        if not text:
            return "forgotten" if self.notes.pop(key, None) is not None else "there was no such note"
        if key not in self.notes and len(self.notes) >= self._entries:
            raise ToolError(f"the memory is full ({self._entries} notes); write empty text to one to forget it")
        self.notes[key] = text
        return "kept"

    def read(self, key: str) -> str:
        """A note, or the keys when none is named."""
        if not key:
            return "\n".join(sorted(self.notes)) or "(nothing is kept)"
        if key not in self.notes:
            raise ToolError(f"nothing is kept as {key!r}; there is {', '.join(sorted(self.notes)) or 'nothing'}")
        return self.notes[key]

    def system(self) -> str:
        """That there is one."""
        return "What you write with memory_write stays when the conversation is shortened."

    def recalled(self) -> str:
        """The keys."""
        return f"Your memory holds: {', '.join(sorted(self.notes))}." if self.notes else ""

    def state(self) -> dict[str, str]:
        """All notes."""
        return dict(self.notes)

    def restore(self, state: Mapping[str, str]) -> None:
        """All notes."""
        self.notes = dict(state)


class _MemoryTool(Tool):
    def __init__(self, memory: Memory, *, timeout_s: float, output_chars: int) -> None:
        super().__init__(timeout_s=timeout_s, output_chars=output_chars)
        self._memory = memory


class MemoryWrite(_MemoryTool):
    """Keeps a note."""

    name = "memory_write"
    about = "keep a note under a key, in the place of what was there; empty text forgets it"
    properties = {"key": {"type": "string"}, "text": {"type": "string"}}
    required = ("key", "text")

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """Whether it was kept."""
        return self._memory.write(arguments["key"], arguments["text"])


class MemoryRead(_MemoryTool):
    """Shows a note."""

    name = "memory_read"
    about = "show the note of a key, or all keys when none is given"
    properties = {"key": {"type": "string"}}

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """The note."""
        return self._memory.read(arguments.get("key", ""))


# --------------------------------------------------------------------------------------------------------- skills


@dataclass(frozen=True, slots=True)
class Skill:
    """A text that is read when it is needed. about: one line for the list of skills."""

    name: str
    about: str
    text: str


def read_skills(folder: Path) -> tuple[Skill, ...]:
    """The skills of a folder: each `NAME/SKILL.md` or `NAME.md`, in order of name.

    A file may begin with lines between two `---`, of which `name:` and `description:` count; without them the name
    is the file's and the description its first line of text. Raises ConfigError.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of skills", key="harness.skills", got=str(folder), wanted="a folder")
    found: dict[str, Skill] = {}
    for path in sorted([*folder.glob("*/SKILL.md"), *folder.glob("*.md")]):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a skill: {error}", key="harness.skills") from None
        if len(text) > MAX_SKILL_CHARS:
            raise ConfigError(f"{path} has more than {MAX_SKILL_CHARS} characters", key="harness.skills")
        skill = _skill(path.parent.name if path.name == "SKILL.md" else path.stem, text)
        if skill.name in found:
            raise ConfigError(f"{path}: there is another skill named {skill.name!r}", key="harness.skills")
        found[skill.name] = skill
    if not found:
        raise ConfigError(f"{folder} holds no skill (NAME/SKILL.md or NAME.md)", key="harness.skills", got=str(folder))
    return tuple(found[name] for name in sorted(found))


def _skill(name: str, text: str) -> Skill:
    head: dict[str, str] = {}
    lines = text.splitlines()
    if lines and lines[0].strip() == "---" and "---" in (line.strip() for line in lines[1:]):
        end = next(number for number, line in enumerate(lines[1:], 1) if line.strip() == "---")
        head = {
            key.strip(): value.strip().strip("\"'") for key, _, value in (line.partition(":") for line in lines[1:end])
        }
        lines = lines[end + 1 :]
    first = next((line.lstrip("# ").strip() for line in lines if line.strip()), "")
    return Skill(head.get("name") or name, head.get("description") or first, "\n".join(lines).strip())


class Skills(Module):
    """A list in the system message, and a tool that shows one of them."""

    def __init__(self, skills: Sequence[Skill]) -> None:
        self._skills = {skill.name: skill for skill in skills}

    def tools(self, *, timeout_s: float, output_chars: int) -> Sequence[Tool]:
        """load_skill, whose text is not cut."""
        return [LoadSkill(self._skills, timeout_s=timeout_s, output_chars=MAX_SKILL_CHARS)]

    def system(self) -> str:
        """The list."""
        rows = [f"- {skill.name}: {skill.about}" for skill in self._skills.values()]
        return "\n".join(["Skills, to be read with load_skill before work that they are about:", *rows])


class LoadSkill(Tool):
    """Shows a skill."""

    name = "load_skill"
    about = "show the text of a skill by its name"
    properties = {"name": {"type": "string"}}
    required = ("name",)

    def __init__(self, skills: Mapping[str, Skill], *, timeout_s: float, output_chars: int) -> None:
        super().__init__(timeout_s=timeout_s, output_chars=output_chars)
        self._skills = skills

    async def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> str:
        """Its text."""
        if arguments["name"] not in self._skills:
            raise ToolError(f"there is no skill {arguments['name']!r}; there are {', '.join(self._skills)}")
        return self._skills[arguments["name"]].text
