"""Providers by name and by config."""

from __future__ import annotations

import itertools
import json
import warnings

import pytest

from k3rl.config import ConfigError
from k3rl.envs.sandbox import SandboxLimits, SandboxUnavailable, provider_from, provider_named
from k3rl.envs.sandbox.bwrap import BwrapProvider
from k3rl.envs.sandbox.providers import NAMES, BwrapConfig
from k3rl.envs.sandbox.remote.containers import ContainerConfig, ContainerProvider
from k3rl.envs.sandbox.remote.kubernetes import KubernetesConfig, KubernetesProvider


def test_every_name_makes_its_provider_and_only_local_ones_have_program_servers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = {name: provider_named(name) for name in NAMES}
    assert {name: provider.name for name, provider in made.items()} == {name: name for name in NAMES}
    assert [name for name, provider in made.items() if not provider.safe] == ["subprocess"]
    for name in NAMES[2:]:
        with pytest.raises(SandboxUnavailable, match="bwrap"):
            made[name].start_program_server()
    assert isinstance(provider_from(BwrapConfig()), BwrapProvider)


def test_an_option_that_a_provider_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match="colour"):
        provider_named("docker", colour="blue")
    with pytest.raises(ConfigError, match="lifetime_s"):
        provider_named("e2b", lifetime_s=0)
    with pytest.raises(ConfigError, match="servers"):
        provider_named("swe-rex").check()


def test_a_secret_is_not_shown() -> None:
    config = KubernetesConfig(token="hidden-token")
    assert "hidden-token" not in repr(config)


def test_a_container_is_never_privileged_and_has_its_limits() -> None:
    provider = provider_named("podman", image="img", runtime="runsc", lifetime_s=60)
    assert isinstance(provider, ContainerProvider)
    words = provider.arguments(
        "n", SandboxLimits(memory_bytes=2**20, tmp_bytes=1, workspace_bytes=2, processes=5, cpus=0.5)
    )
    pairs = dict(itertools.pairwise(words))
    assert "--privileged" not in words
    assert (pairs["--network"], pairs["--cap-drop"], pairs["--security-opt"]) == ("none", "ALL", "no-new-privileges")
    assert (pairs["--memory"], pairs["--memory-swap"], pairs["--cpus"]) == ("1048579", "1048579", "0.5")
    assert (pairs["--pids-limit"], pairs["--runtime"], pairs["--entrypoint"]) == ("13", "runsc", "sleep")
    assert "--read-only" in words
    assert words[-2:] == ["img", "60"]
    assert ContainerConfig().type == "docker"


def test_a_pod_is_restricted_and_has_its_limits() -> None:
    provider = provider_named("kubernetes", runtime_class="gvisor", lifetime_s=60)
    assert isinstance(provider, KubernetesProvider)
    pod = provider.manifest("n", SandboxLimits(memory_bytes=100, tmp_bytes=1, workspace_bytes=2, cpus=0.25))
    assert json.loads(json.dumps(pod)) == pod
    spec, (box,) = pod["spec"], pod["spec"]["containers"]
    assert box["resources"]["limits"] == {"memory": "101", "ephemeral-storage": "3", "cpu": "250m"}
    assert box["securityContext"]["readOnlyRootFilesystem"] is True
    assert "privileged" not in box["securityContext"]
    assert (spec["runtimeClassName"], spec["activeDeadlineSeconds"], spec["restartPolicy"]) == ("gvisor", 60, "Never")
    assert spec["automountServiceAccountToken"] is False
