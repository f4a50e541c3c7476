"""A server of OpenEnv: the game of `guess.py`, for a program of its own. It needs the package openenv-core.

`python number_server.py PORT`; the number is that of the row's `extra_info.reset`: {"number": 37}.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

SESSIONS = 64


class Guess(Action):
    """Guesses the number."""

    guess: int = Field(description="A number from 1 to 100.", ge=1, le=100)


class Said(Observation):
    text: str


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 1
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 1, **more: Any) -> Said:
        self.number, self._state = number, State(episode_id=episode_id)
        return Said(text="I think of a number from 1 to 100. Guess it.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Said:
        self._state.step_count += 1
        if action.guess == self.number:
            return Said(text="equal", reward=1.0, done=True)
        return Said(text="higher" if action.guess < self.number else "lower", reward=-0.05)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Number, Guess, Said, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
