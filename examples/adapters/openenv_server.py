"""A small OpenEnv server to try the client with: a digit to guess. Run it in a Python that has openenv.

python openenv_server.py PORT
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""


class DigitGame(Environment):
    """Each wrong guess costs 0.05, the right one pays 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._digit, self._state = 0, State()

    def reset(self, seed=None, episode_id=None, **options):
        self._digit = (seed or 0) % 10
        return Told(text="Guess my digit.", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        right = action.message.strip() == str(self._digit)
        return Told(text="Yes." if right else "No.", done=right, reward=1.0 if right else -0.05)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(DigitGame, Guess, Told, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
