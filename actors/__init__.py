"""The Ray actors of a run, and what starts and stops them.

`cluster.py` starts or joins Ray, `placement.py` reserves resources or says what is missing, one file each for the
learner, rollout, environment, reward and weight-publishing actors (`publication.py` is what is published), and
`fleet.py` holds them all for a pipeline.
No algorithm lives here; loops are in `k3rl.pipelines`.
"""

import os
import secrets

# Ray reads these when it is imported, so they are set before any module of this package can import it: token
# authentication is on for every cluster that k3rl starts or joins, because Ray's control port listens on all
# interfaces. A token that is already set, or another mode that the user chose, stays.
os.environ.setdefault("RAY_AUTH_MODE", "token")
if os.environ["RAY_AUTH_MODE"] == "token" and not (
    os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
):
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets any other process hold up a step
os.environ.setdefault("PYTHONSAFEPATH", "1")
