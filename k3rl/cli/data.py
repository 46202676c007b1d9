"""`k3rl data check`: what a file of chat data holds, and what of it cannot be trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser, unknown
from k3rl.config import ConfigError, MissingResource

if TYPE_CHECKING:
    from k3rl.data.chat_check import Thinking
    from k3rl.tokens import Tokenizer

USAGE = """\
usage: k3rl data check FILE [--model DIR] [--max-tokens N] [--thinking auto|on|off] [--row N] [--json]

Looks at every row of chat data the way `k3rl sft` does before it starts. Status 0 without problems, 2 with.
`k3rl data check --help` says more; docs/data.md says what a row may hold."""

_SHOWN = 50  # problems in text


def data(words: Sequence[str]) -> int:
    """The `k3rl data` command."""
    if not words or words[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    if words[0] != "check":
        raise unknown("data command", words[0], ["check"])
    return _check(words[1:])


def _check(words: Sequence[str]) -> int:
    parser = Parser(
        "data check", "Looks at every row of a file of chat data, and shows one conversation with its loss."
    )
    parser.add_argument("file", type=Path, help=".jsonl, .ndjson, .json (with .gz or .zst), or .parquet")
    parser.add_argument("--model", help="the checkpoint whose tokenizer counts; by default the one of the small sizes")
    parser.add_argument("--max-tokens", type=int, help="the most tokens that a row may have")
    parser.add_argument("--thinking", choices=("auto", "on", "off"), default="auto", help="as in sft")
    parser.add_argument("--row", type=int, help="the row that is shown; by default the first without problems")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    from k3rl.data import Fit, check_chat_file
    from k3rl.run import visible
    from k3rl.tokens import Tokenizer, TokenizerError

    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ConfigError("--max-tokens is at least 1", key="--max-tokens", got=arguments.max_tokens)
    try:
        tokenizer = Tokenizer.builtin() if arguments.model is None else Tokenizer.load(arguments.model)
    except TokenizerError as error:
        raise MissingResource(f"--model {arguments.model}: {error}") from error
    fit = None if arguments.max_tokens is None else Fit(arguments.max_tokens, "--max-tokens")
    report = check_chat_file(arguments.file, tokenizer, thinking=arguments.thinking, fit=fit)
    status = 2 if report.problems else 0
    if arguments.json:
        print_json(report.to_json())
        return status
    for line in report.lines():
        print(visible(line))
    for problem in report.problems[:_SHOWN]:
        where = "the file" if problem.row is None else f"row {problem.row}"
        print(visible(f"{where}: {problem.why}"))
    if len(report.problems) > _SHOWN:
        print(f"and {len(report.problems) - _SHOWN:,} more problems; --json has all")
    bad = {problem.row for problem in report.problems}
    if None not in bad:
        row = next((n for n in range(report.rows) if n not in bad), None) if arguments.row is None else arguments.row
        _show(arguments.file, row, tokenizer, arguments.thinking)
    print(f"{len(report.problems):,} problems" if report.problems else "no problems")
    return status


def _show(path: Path, row: int | None, tokenizer: Tokenizer, thinking: Thinking) -> None:
    """One conversation as it is trained: what carries loss has a mark at the left, and a colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    from k3rl.data import encode_example, example_of, raw_rows, thinks
    from k3rl.run import framed

    found = None if row is None else next((raw for raw in raw_rows(path) if raw.row == row), None)
    if found is None:
        return
    example = example_of(found, path)
    ids, mask = encode_example(example.messages, example.tools, tokenizer, thinks(example, thinking))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"row {row}, {len(ids)} tokens; `+` marks what carries loss:")
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and mask[end] == mask[start]:
            continue
        text = framed(tokenizer.decode(ids[start:end].tolist()), "+ " if mask[start] else "  ")
        console.print(Text(text, style="green" if mask[start] else "dim"))
        start = end
