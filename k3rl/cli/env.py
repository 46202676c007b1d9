"""`k3rl env {list,check,grade,play,new}`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser, unknown
from k3rl.config import Config, ConfigError, K3Error, MissingResource, load, read_toml, split_words
from k3rl.envs import Environment, builtin_names, gradable, honest, make, names, write_package
from k3rl.envs.check import Report, check
from k3rl.run import score_row, visible
from k3rl.types import Failed, Score, StopReason, Task

USAGE = """\
usage: k3rl env list [--json]
       k3rl env check [ENV ... | --all] [--tasks 1] [--json]
       k3rl env grade ENV SUBMISSION --task N [--split heldout] [--seed 0] [--json]
       k3rl env play ENV --task N [--split heldout] [--seed 0] [--state FILE] [--clocks] [--json]
       k3rl env new NAME [--out DIR]

ENV is a name from `k3rl env list`, package.module:Object, a .py file, or the folder of a package. check, grade
and play take its options as --env-args.KEY VALUE, and `@ FILE` in the place of ENV: the [env] of a run's file."""
MAX_FOLDER_BYTES = 16 * 2**20
_NOT_SUBMITTED = {".git", "__pycache__"}


class EnvWords(Config):
    """What stands on a command line for an environment."""

    env_args: dict[str, Any] = {}
    """Its options, as `env.args` of a run."""


def taken_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(the other words, options of the environment). `@ FILE` stands for `env.name` of a run's file, whose `env.args`
    are options, and --env-args.KEY VALUE gives others. Raises ConfigError."""
    rest: list[str] = []
    own: list[str] = []
    options: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        if word == "@":
            table = read_toml(Path(next(waiting, ""))).get("env")
            if not isinstance(table, dict) or not isinstance(table.get("name"), str):
                raise ConfigError("a file after @ wants a table [env] with a name, as a run's file has it", key="@")
            rest.append(table["name"])
            options |= table.get("args", {})
        elif word.startswith("--env-args."):
            own.append(word)
            if "=" not in word and (value := next(waiting, None)) is not None:
                own.append(value)
        else:
            rest.append(word)
    _, flags = split_words(own)
    given = load(EnvWords(env_args=options), flags=flags).env_args
    return rest, {key.replace("-", "_"): value for key, value in given.items()}  # those of the line come last


def env(words: Sequence[str]) -> int:
    """The `k3rl env` command."""
    if not words or words[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    actions = {"list": _list, "check": _check, "grade": _grade, "play": _play, "new": _new}
    if words[0] not in actions:
        raise unknown("env command", words[0], actions)
    return actions[words[0]](words[1:])


def _list(words: Sequence[str]) -> int:
    parser = Parser("env list", "Names the environments that are shipped, registered or installed.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    found = [_about(name) for name in names()]
    if arguments.json:
        print_json({"environments": found})
        return 0
    for about in found:
        if "error" in about:
            print(f"{about['name']}   broken: {visible(about['error'])}")
            continue
        sizes = "  ".join(f"{split} {'endless' if n is None else n}" for split, n in about["splits"].items())
        print(f"{about['name']}   {visible(about['description'])}\n    {sizes}")
    return 0


def _about(name: str) -> dict[str, Any]:
    """What the list says of an environment; one that cannot be made hides no other."""
    try:
        environment = make(name)
        splits = {split: environment.source.length(split) for split in environment.source.splits}
    except (K3Error, OSError, ValueError) as error:
        return {"name": name, "error": str(error)}
    about = {"name": name, "description": environment.description, "domain": environment.domain}
    return about | {"version": environment.version, "splits": splits}


def _check(words: Sequence[str]) -> int:
    parser = Parser("env check", "Tries the oracle, the null agent and every hack; compares seeds; looks for leaks.")
    parser.add_argument("env", nargs="*", help="names, package.module:Object, .py files or folders")
    parser.add_argument("--all", action="store_true", help="every environment that k3rl ships")
    parser.add_argument(
        "--tasks", type=int, default=1, metavar="N", help="kinds of tasks that get all hacks; default: 1"
    )
    parser.add_argument("--json", action="store_true")
    rest, options = taken_options(words)
    arguments = parser.read(rest)
    if arguments is None:
        return 0
    if bool(arguments.env) == arguments.all or arguments.tasks < 1:
        raise ConfigError("env check wants environments or --all, and --tasks of at least 1", key="env check")
    if options and len(arguments.env) != 1:
        raise ConfigError("options of an environment go with the one environment that takes them", key="--env-args")
    chosen = builtin_names() if arguments.all else arguments.env
    rows: dict[str, dict[str, Any]] = {}
    for name in chosen:
        row, words_for_people = _checked(name, arguments.tasks, options)
        rows[row["name"]] = row
        if not arguments.json:
            print(words_for_people, flush=True)
    if arguments.json:
        good = all(row["ok"] for row in rows.values())
        single = len(rows) == 1 and not arguments.all
        print_json(next(iter(rows.values())) if single else {"environments": rows, "ok": good})
    if any("missing" in row for row in rows.values()):
        return MissingResource.exit_code
    return 0 if all(row["ok"] for row in rows.values()) else 1


def _checked(name: str, tasks: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What a check found, for programs and for people; `missing` says what this machine lacks to check it."""
    environment = make(name, **options)
    try:
        report = check(name, tasks=tasks, options=options)
    except MissingResource as error:
        return {
            "name": environment.name,
            "ok": False,
            "missing": str(error),
        }, f"{environment.name}   missing\n  {error}"
    return report.row(), _about_report(report)


def _about_report(report: Report) -> str:
    refused = sum(tried.refused for tried in report.hacks.values())
    numbers = [
        "no oracle" if report.oracle is None else f"oracle {report.oracle:g} (wants {report.oracle_expected:g})",
        "no null agent" if report.null is None else f"null {report.null:g}",
        f"{refused} of {len(report.hacks)} hacks refused",
        f"{len(report.tasks)} kinds of tasks",
        f"{len(report.episodes)} episodes",
        f"{len(report.leaks)} leaks",
        f"{report.seconds:.0f} s",
    ]
    lines = [f"{report.name}   {'ok' if report.ok else 'FAILED'}   {', '.join(numbers)}"]
    lines += [f"  no {what}: {visible(why)}" for what, why in report.absent.items()]
    return "\n".join(lines + [f"  {visible(problem)}" for problem in report.problems])


def _new(words: Sequence[str]) -> int:
    parser = Parser("env new", "Writes a package with one environment that passes its own checks.")
    parser.add_argument("name", help="small letters, digits and hyphens, such as my-env")
    parser.add_argument("--out", type=Path, help="the folder to write; default: ./NAME")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    folder = arguments.out or Path(arguments.name)
    for path in write_package(arguments.name, folder):
        print(path)
    print(f"next: k3rl env check {folder}")
    return 0


def _play(words: Sequence[str]) -> int:
    parser = Parser("env play", "You are the policy: act by hand, under the rules and budgets of a run.")
    _add_task(parser)
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="keep the episode in FILE, and go on with the one that is there"
    )
    parser.add_argument("--clocks", action="store_true", help="the task's budgets of time count too")
    rest, options = taken_options(words)
    arguments = parser.read(rest)
    if arguments is None:
        return 0
    from k3rl.cli.play import play

    environment = make(arguments.env, **options)
    task = _task(environment, arguments.split, arguments.task, arguments.seed)
    episode = play(environment, task, sys.stdin, sys.stdout, state=arguments.state, clocks=arguments.clocks)
    about = {"task": task.id, "stop_reason": str(episode.stop_reason), "turns": episode.budgets_used["turns"]}
    if episode.stop_reason is StopReason.PAUSED:
        return _print_paused(arguments.state, about, as_json=arguments.json)
    score = _score(environment, task, episode.answer) if gradable(episode) else episode.score
    return _print_score(score, about, as_json=arguments.json)


def _print_paused(state: Path, about: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json({"status": "paused", "reward": None, "state": str(state)} | about)
    else:
        turns = f"{about['turns']:g} turns"
        print(f"{about['task']}: paused after {turns} and kept in {state}; the same command goes on with it")
    return 0


def _add_task(parser: Parser) -> None:
    parser.add_argument("env", help="a name from `k3rl env list`, package.module:Object, a .py file or a folder")
    parser.add_argument("--task", type=int, required=True, metavar="N", help="index of the task in its split")
    parser.add_argument("--split", default="heldout", help="default: heldout")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--json", action="store_true")


def _grade(words: Sequence[str]) -> int:
    parser = Parser("env grade", "Scores one answer to one task, as a run would.")
    _add_task(parser)
    parser.add_argument("submission", help="the file or folder that is the answer, or - for standard input")
    rest, options = taken_options(words)
    arguments = parser.read(rest)
    if arguments is None:
        return 0
    environment = make(arguments.env, **options)
    task = _task(environment, arguments.split, arguments.task, arguments.seed)
    score = _score(environment, task, _read(arguments.submission))
    return _print_score(score, {"task": task.id}, as_json=arguments.json)


def _print_score(score: Score, about: dict[str, Any], *, as_json: bool) -> int:
    result = result_of(score) | about
    if as_json:
        print_json(result)
    else:
        reward = "no reward" if result["reward"] is None else f"reward {result['reward']:g}"
        print(f"{about['task']}: {result['status']}, {reward}")
        for name, value in result["parts"].items():
            print(f"  {name} {value:g}")
        if result["evidence"]:
            print(f"  {visible(result['evidence'])}")
    return 1 if isinstance(score, Failed) else 0


def result_of(score: Score) -> dict[str, Any]:
    """status, reward (None where there is none), parts, evidence (why there is none), and the hack by name."""
    row = score_row(score)
    return {
        "status": row["status"],
        "reward": row.get("reward"),
        "parts": row.get("parts", {}),
        "evidence": row.get("evidence") or row.get("reason"),
        "hack": row.get("hack"),
    }


def _task(environment: Environment, split: str, index: int, seed: int) -> Task:
    if split not in environment.source.splits:
        raise unknown(f"split of {environment.name}", split, environment.source.splits)
    length = environment.source.length(split)
    if index < 0 or (length is not None and index >= length):
        wanted = "at least 0" if length is None else f"0 to {length - 1}"
        raise ConfigError(f"--task is {index}; {split} of {environment.name} wants {wanted}", key="--task", got=index)
    return environment.source.get(split, index, seed)


def _read(place: str) -> str:
    """The answer in a file, on standard input (`-`), or in a folder, whose answer is {"files": {path: text}}."""
    if place != "-" and Path(place).is_dir():
        return answer_of(Path(place))
    try:
        return sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8")
    except OSError as error:
        raise MissingResource(f"cannot read the submission {place}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8 text: {error}", key="submission", got=place) from None


def answer_of(folder: Path) -> str:
    """A folder as the answer of tasks that want files: JSON {"files": {path: text}}, in order of path.

    Raises ConfigError for a link, for what is not a plain UTF-8 file, and for more than MAX_FOLDER_BYTES.
    """
    found: dict[str, str] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if _NOT_SUBMITTED & set(inner.parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"{path} is a link or no plain file; a submission has plain files only", key="submission")
        size += path.stat().st_size
        if size > MAX_FOLDER_BYTES:
            raise ConfigError(f"{folder} holds more than {MAX_FOLDER_BYTES} bytes", key="submission", got=str(folder))
        try:
            found[inner.as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text: {error}", key="submission", got=str(path)) from None
    return json.dumps({"files": found})


def _score(environment: Environment, task: Task, answer: str) -> Score:
    rubric = environment.grader()
    try:
        return honest(rubric.score_batch([(task, answer)])[0], environment.reward_limits)
    finally:
        rubric.close()
