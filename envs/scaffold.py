"""`k3rl env new`: writes a package with one environment that passes its own checks, to be changed by its user."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from string import Template

from k3rl.config import ConfigError
from k3rl.envs.registry import names

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def module_of(name: str) -> str:
    """The importable name of an environment's package. Raises ConfigError for a name that cannot be one."""
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise ConfigError(
            f"{name!r} cannot name an environment; use small letters, digits and single hyphens, such as my-env",
            key="NAME",
            got=name,
        )
    if name in names() or module in ("k3rl", "tests"):
        raise ConfigError(f"the name {name!r} is taken; choose another one", key="NAME", got=name)
    return module


def write_package(name: str, folder: Path) -> list[Path]:
    """Write the package into `folder`, which must not hold anything yet; the files written."""
    module = module_of(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; name an empty folder with --out", key="--out", got=str(folder))
    targets = {
        "pyproject.txt": folder / "pyproject.toml",
        "readme.txt": folder / "README.md",
        "module.txt": folder / module / "__init__.py",
        "test.txt": folder / "tests" / f"test_{module}.py",
    }
    for template, target in targets.items():
        text = files("k3rl.envs").joinpath("template", template).read_text(encoding="utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(text).substitute(name=name, module=module), encoding="utf-8")
    return list(targets.values())
