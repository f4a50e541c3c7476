"""The environment: a file of its own, as its process sees nothing else of this folder."""

import asyncio
import os
import random

from millrace.environments import Environment, Message, Row, Step


class Waits(Environment):
    """Answers each turn, after a while where the row says so."""

    def __init__(self, wait_s: float, answer: str = "go on") -> None:
        self.wait_s, self.answer = wait_s, answer

    async def reset(self, row: Row) -> list[Message]:
        self.waits = row["ground_truth"] == "waits"
        self.random = random.Random(os.urandom(8))
        return list(row["prompt"])

    async def step(self, message: Message) -> Step:
        if self.waits:
            await asyncio.sleep(self.random.expovariate(1.0 / self.wait_s))
        return self.answer, 0.0, False
