"""Sandbox providers by name, and by config."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from k3rl.config import NOT_HASHED, Config, ConfigError
from k3rl.envs.sandbox.base import SandboxProvider
from k3rl.envs.sandbox.bwrap import BwrapProvider
from k3rl.envs.sandbox.remote.containers import ContainerConfig, ContainerProvider
from k3rl.envs.sandbox.remote.daytona import DaytonaConfig, DaytonaProvider
from k3rl.envs.sandbox.remote.e2b import E2BConfig, E2BProvider
from k3rl.envs.sandbox.remote.kubernetes import KubernetesConfig, KubernetesProvider
from k3rl.envs.sandbox.remote.modal import ModalConfig, ModalProvider
from k3rl.envs.sandbox.remote.swerex import SweRexConfig, SweRexProvider
from k3rl.envs.sandbox.unsafe import SubprocessProvider


class BwrapConfig(Config):
    """bubblewrap on this machine, the default everywhere."""

    type: Literal["bwrap"] = "bwrap"
    """The provider."""

    interpreter: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """The Python of program servers; by default the system's."""

    cgroups: bool = Field(default=True, json_schema_extra=NOT_HASHED)
    """Use control groups where there are some."""


class SubprocessConfig(Config):
    """Plain processes: unsafe, only for programs that you trust."""

    type: Literal["subprocess"] = "subprocess"
    """The provider."""

    cgroups: bool = Field(default=True, json_schema_extra=NOT_HASHED)
    """Use control groups where there are some."""


SandboxConfig: TypeAlias = Annotated[
    BwrapConfig
    | SubprocessConfig
    | ContainerConfig
    | KubernetesConfig
    | ModalConfig
    | E2BConfig
    | DaytonaConfig
    | SweRexConfig,
    Field(discriminator="type"),
]
_CONFIGS: TypeAdapter[SandboxConfig] = TypeAdapter(SandboxConfig)
NAMES = ("bwrap", "subprocess", "docker", "podman", "kubernetes", "modal", "e2b", "daytona", "swe-rex")


def provider_from(config: SandboxConfig) -> SandboxProvider:
    """The provider that a config describes."""
    match config:
        case BwrapConfig():
            return BwrapProvider(interpreter=config.interpreter, cgroups=config.cgroups)
        case SubprocessConfig():
            return SubprocessProvider(cgroups=config.cgroups)
        case ContainerConfig():
            return ContainerProvider(config)
        case KubernetesConfig():
            return KubernetesProvider(config)
        case ModalConfig():
            return ModalProvider(config)
        case E2BConfig():
            return E2BProvider(config)
        case DaytonaConfig():
            return DaytonaProvider(config)
        case SweRexConfig():
            return SweRexProvider(config)


def provider_named(name: str, **options: Any) -> SandboxProvider:
    """The provider of a name, one of NAMES, with the options of its config. "bwrap" is the default everywhere.

    Raises ValueError for another name, ConfigError for options that its config does not have.
    """
    if name not in NAMES:
        raise ValueError(f"no sandbox provider is named {name!r}; choose from {', '.join(NAMES)}")
    try:
        return provider_from(_CONFIGS.validate_python({"type": name, **options}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        raise ConfigError(
            f"sandbox provider {name!r}: {key}: {first['msg']}", key=key, got=first.get("input")
        ) from None
