"""The same words as a Ray job: uploads nothing but the command, follows its log, ends with its exit code."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from typing import Any

from k3rl.config import K3Error, MissingResource
from k3rl.run import visible

_GOOD = "SUCCEEDED"
_NO_AGENT = "No available agent"
_AGENT_S = 180.0  # a busy machine takes minutes to start one


class JobFailed(K3Error):
    """The submitted job ended other than well."""


def submit(words: list[str], address: str) -> int:
    """Runs `k3rl <words>` on the cluster at `address` (http://host:8265) and prints its log as it comes.

    The cluster's nodes need k3rl installed. Authentication is Ray's token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN
    (or its token file) as on the cluster. Returns 0, or raises JobFailed; Ctrl-C stops the job.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise MissingResource(
            f"the Ray cluster at {address} does not take this job: {error}\n"
            "Start one with `ray start --head`, give its dashboard's address, and set RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on the cluster"
        ) from error
    entrypoint = shlex.join([sys.executable, "-m", "k3rl", *words])
    # The token itself does not travel: the job's processes inherit the one that the cluster was started with.
    variables = {"RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"], "PYTHONSAFEPATH": "1", "RAY_DEDUP_LOGS": "0"}
    job = _submitted(client, address, entrypoint, variables)
    print(f"job {job} at {address}", file=sys.stderr)
    try:
        asyncio.run(_follow(client, job))
    except KeyboardInterrupt:
        client.stop_job(job)
        print(f"job {job} was asked to stop", file=sys.stderr)
        raise
    status = client.get_job_status(job)
    if str(status) != _GOOD and getattr(status, "value", None) != _GOOD:
        raise JobFailed(f"job {job} ended as {status}: {client.get_job_info(job).message}")
    return 0


def _submitted(client: Any, address: str, entrypoint: str, variables: dict[str, str]) -> str:
    """The id of the job. The dashboard answers a little before the agent that starts jobs has come up."""
    until = time.monotonic() + _AGENT_S
    while True:
        try:
            job: str = client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": variables})
            return job
        except RuntimeError as error:
            if _NO_AGENT not in str(error):
                raise
            if time.monotonic() > until:
                raise MissingResource(
                    f"no agent of the cluster at {address} came up to start a job within {_AGENT_S:g} s; "
                    "see dashboard_agent.log among Ray's logs on its head, and submit again"
                ) from error
        time.sleep(1.0)


async def _follow(client: object, job: str) -> None:
    async for lines in client.tail_job_logs(job):  # type: ignore[attr-defined]
        print(visible(lines), end="", flush=True)
