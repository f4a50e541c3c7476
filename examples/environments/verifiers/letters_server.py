"""A server of OpenEnv with an action of one text field, which the taskset `openenv` of verifiers plays.

`python letters_server.py PORT`; an episode has two turns, and earns the share of the alphabet that they use.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

SESSIONS = 64
TURNS = 2


class Say(Action):
    text: str = Field(description="Any text.")


class Heard(Observation):
    told: str


class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._used: set[str] = set()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Heard:
        self._used, self._state = set(), State(episode_id=episode_id)
        return Heard(told="Use as many letters of the alphabet as you can.")

    def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Heard:
        self._state.step_count += 1
        new = {each for each in action.text.lower() if "a" <= each <= "z"} - self._used
        self._used |= new
        over = self._state.step_count >= TURNS
        return Heard(told=f"{len(new)} new letters.", reward=len(new) / 26, done=over)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Letters, Say, Heard, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
