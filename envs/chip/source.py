"""A submission's text: which files it is, and what no submission may contain.

Comments are removed before any tool reads the text, so that no tool obeys one. Then words are looked at one by one:
what a design has an honest use for passes; what only a trick needs is named as that hack; what breaks a rule and is
often written in good faith (`initial`, delays, assertions) is worth nothing but is no hack. The list is the first
guard, and an early one; what counts in the end is the simulation of the gates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from k3rl.envs.chip.library import areas

MAX_CHARS = 200_000
MAX_FILES = 16
_FENCED = re.compile(r"```(?:verilog|systemverilog|sv|v)?[ \t]*\n(.*?)```", re.DOTALL)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.s?v")
# An open comment runs to the end of the text, so that a text full of openings is read once and not once for each.
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_TOKEN = re.compile(
    r"[$`][A-Za-z_]?\w*|\\\S+|\(\*(?!\s*\))|\d[\w.]*|'[sS]?[bBoOdDhH][0-9a-fA-FxXzZ?_]+|[A-Za-z_]\w*|\"[^\"]*\"|\S"
)

_FUNCTIONS = frozenset({"$signed", "$unsigned", "$clog2", "$bits"})
_DIRECTIVES = frozenset({"`default_nettype", "`timescale"})
_REPORTS = re.compile(r"\$(?:finish|stop|exit|f?display\w*|f?write\w*|f?strobe\w*|f?monitor\w*)")
_FILES = re.compile(r"\$(?:f\w+|readmem\w*|writemem\w*|system|s?w?sformat\w*|sscanf|test|value|dump\w*)")
_TOOL_MACRO = re.compile(r"SYNTH\w*|SIM\w*|__ICARUS__|YOSYS|VERILATOR|IVERILOG|COCOTB\w*|GATE\w*|GL\w*")
_TOOL_ATTRIBUTE = re.compile(r"keep|blackbox|whitebox|dont_touch|techmap|abc|lib_|init|gentb|top")
# Words that only reach into the simulator, and words that are no hardware but that people write in good faith.
_TRICKS_TEXT = "force release deassign bind defparam import export primitive specify"
_NOT_HARDWARE_TEXT = """
initial final fork join join_any join_none wait event forever real realtime shortreal time specparam table
trireg strong0 strong1 pull0 pull1 pullup pulldown tri tri0 tri1 supply0 supply1 weak0 weak1 highz0 highz1 small
medium large nmos pmos cmos tran program class package interface modport clocking chandle config string mailbox
semaphore randomize dist rand virtual alias assert assume cover property sequence restrict expect covergroup
checker
"""
# Words after which `#(` is a delay and not the parameters of an instance.
_STATEMENT_WORDS_TEXT = """
assign always always_comb always_ff begin end else and or not nand nor xor xnor buf bufif0 bufif1 notif0 notif1
wire reg logic repeat do default
"""


_TRICKS = frozenset(_TRICKS_TEXT.split())
_NOT_HARDWARE = frozenset(_NOT_HARDWARE_TEXT.split())
_STATEMENT_WORDS = frozenset(_STATEMENT_WORDS_TEXT.split())


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a submission is not even compiled. `hack` is None for one that is merely malformed."""

    reason: str
    hack: str | None = None


def files_of(answer: str) -> dict[str, str] | Refused:
    """The files of an answer: JSON {"files": {name: text}}, the last fenced block, or the whole text as `dut.v`."""
    if len(answer) > MAX_CHARS:
        return Refused(f"the answer has {len(answer)} characters; at most {MAX_CHARS} are read")
    blocks: list[str] = _FENCED.findall(answer)
    text = blocks[-1] if blocks else answer
    if not blocks and answer.lstrip().startswith("{"):
        return _json_files(answer)
    return {"dut.v": text} if text.strip() else Refused("the answer is empty")


def _json_files(answer: str) -> dict[str, str] | Refused:
    try:
        files = json.loads(answer)["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Refused('the answer begins like JSON and is not {"files": {"name.v": "text", ...}}')
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        return Refused("`files` must map names to text")
    if not 0 < len(files) <= MAX_FILES or not any(text.strip() for text in files.values()):
        return Refused(f"there must be 1 to {MAX_FILES} files, not all empty")
    for name in files:
        if "/" in name or "\\" in name or name.startswith("."):
            return Refused(f"{name[:80]!r} is not a plain file name", "path_escape")
        if not _FILE_NAME.fullmatch(name):
            return Refused(f"{name[:80]!r}: file names end in .v or .sv and have letters, digits, `_`, `-` only")
    return files


def cleaned(files: Mapping[str, str]) -> dict[str, str] | Refused:
    """The same files without comments, or what is forbidden in them."""
    clean = {}
    for name, text in files.items():
        if not text.isascii() or "\0" in text:
            return Refused(f"{name} has characters outside ASCII")
        for match in _COMMENT_OR_STRING.finditer(text):
            if match[0].startswith("/") and re.search(r"\b(?:translate|synthesis)_(?:off|on)\b", match[0]):
                return Refused(f"{name}: comment {match[0][:60]!r} hides code from synthesis", "synthesis_split")
        clean[name] = _COMMENT_OR_STRING.sub(lambda match: " " if match[0].startswith("/") else match[0], text)
        if found := _forbidden(clean[name]):
            return Refused(f"{name}: {found.reason}", found.hack)
    return clean


def _forbidden(text: str) -> Refused | None:
    tokens: list[str] = _TOKEN.findall(text)
    library = areas()
    inside = False
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else ""
        after = tokens[place + 1] if place + 1 < len(tokens) else ""
        if token[0] == "$" and token not in _FUNCTIONS:
            return _system_task(token)
        if token[0] == "`" and token not in _DIRECTIVES:
            return _directive(token, after)
        if token.startswith("(*"):
            hack = "attribute" if _TOOL_ATTRIBUTE.match(after) else None
            return Refused(f"attributes are not allowed: (* {after} ... *)", hack)
        if token in _TRICKS:
            hack = "file_access" if token == "import" and after[:1] == '"' else "simulator_access"
            return Refused(f"`{token} {after[:40]}` is not allowed", hack)
        if token in library:
            return Refused(f"`{token}` is a name of the cell library", "library_cell")
        if not inside and not _between_modules(token):
            return Refused(f"there is text outside of modules: {token[:40]!r}")
        inside = token == "module" or (inside and token != "endmodule")
        if token[0] in '\\"':
            return Refused(f"escaped names and strings are not allowed: {token[:40]}")
        if token == "#" and (after != "(" or not _is_name(before)):
            return Refused("delays (`#`) are not hardware")
        if token == "." and (_is_name(before) or before in ("]", "$root", "$unit")):
            return Refused(f"hierarchical name {before}.{after}: signals pass through ports only", "hierarchical_name")
        if token in _NOT_HARDWARE:
            return Refused(f"`{token}` is not allowed")
    return None


def _between_modules(token: str) -> bool:
    """Whether a token may stand outside of modules: a module's beginning or end, and parts of directives."""
    return token in ("module", "endmodule", "none", "wire", "/", ";") or token in _DIRECTIVES or token[0].isdigit()


def _directive(token: str, after: str) -> Refused:
    reason = f"compiler directive {token} {after}: allowed are {', '.join(sorted(_DIRECTIVES))}"
    if token == "`include":
        return Refused(reason, "file_access")
    split = token in ("`ifdef", "`ifndef", "`elsif") and _TOOL_MACRO.fullmatch(after)
    return Refused(reason, "synthesis_split" if split else None)


def _system_task(token: str) -> Refused:
    reason = f"system task {token}: allowed are {', '.join(sorted(_FUNCTIONS))}"
    if token in ("$root", "$unit"):
        return Refused(reason, "hierarchical_name")
    if _REPORTS.fullmatch(token):
        return Refused(reason, "forged_report")
    return Refused(reason, "file_access" if _FILES.fullmatch(token) else None)


def _is_name(token: str) -> bool:
    return (token[:1].isalpha() or token[:1] == "_") and token not in _STATEMENT_WORDS
