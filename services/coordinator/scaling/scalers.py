"""What starts and stops replicas. A scaler is asked for a number; whoever places the replicas does the rest, and
SIGTERM drains a replica that has to go."""

import asyncio
import json
from pathlib import Path
from typing import Protocol

from millrace.errors import InvalidState, Unavailable
from millrace.local.state_folder import scale, told


class Scaler(Protocol):
    """Starts and stops the replicas of one pool."""

    async def current(self) -> int:
        """Replicas that were asked for last. Raises Unavailable."""
        ...

    async def set(self, wanted: int) -> None:
        """Asks for so many replicas. Idempotent. Raises Unavailable, or InvalidState if so many cannot run."""
        ...


class LocalScaler:
    """The replicas of a local stack, by its supervisor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def current(self) -> int:
        try:
            state = await asyncio.to_thread(told, self._folder)
        except (OSError, json.JSONDecodeError) as error:
            what = f"the supervisor's {self._folder}/stack.json cannot be read: {error}."
            raise Unavailable(what, "start the stack with `millrace up`.") from error
        if not state["complete"]:
            return int(state["replicas"])  # it still starts them
        running = [name for name in state["processes"] if name.startswith("rollout-")]
        # One that was drained by hand is to be started again.
        return min(int(state["replicas"]), len(running))

    async def set(self, wanted: int) -> None:
        await asyncio.to_thread(scale, self._folder, wanted)


class NoScaler:
    """Starts nothing. KEDA, or somebody else, reads `millrace_replicas_wanted`."""

    def __init__(self) -> None:
        self._wanted = 0

    async def current(self) -> int:
        return self._wanted

    async def set(self, wanted: int) -> None:
        self._wanted = wanted


def scaler(kind: str, stack: str) -> Scaler:
    """The scaler that was asked for. `stack`: state folder of the local stack, if this coordinator belongs to one.
    Raises InvalidState."""
    if kind == "local":
        if not stack:
            what = "--scaler local: this coordinator belongs to no local stack."
            raise InvalidState(what, "start it by `millrace up --replicas MIN:MAX`, or choose another --scaler.")
        return LocalScaler(Path(stack))
    if kind == "none":
        return NoScaler()
    raise InvalidState(f"--scaler: {kind!r} is unknown.", "choose one of local, none.")
