"""What a run does when an actor dies or hangs: all of them start again, and training goes on from its last state."""

from __future__ import annotations

from collections.abc import Callable

from k3rl.actors.worker_pool import ActorLost
from k3rl.parallel import PeerFailed
from k3rl.pipelines.session import Session
from k3rl.pipelines.stage import StageResult


def with_restarts(session: Session, train: Callable[[Session], StageResult]) -> StageResult:
    """`train(session)`, again from the newest state after each lost actor, `cluster.restarts` times in a run at most.

    Only lost processes are worth another try: an error that an actor raised would come again, and comes through.
    """
    while True:
        try:
            return train(session)
        except (ActorLost, PeerFailed) as error:
            if session.fleet.restarts_left == 0:
                raise
            lost = str(error).partition("\n")[0].rstrip(":")
        left = session.fleet.restarts_left - 1
        session.progress.note(f"{lost}; all actors start again and go on from the last state ({left} restarts left)")
        session = session.restarted()
