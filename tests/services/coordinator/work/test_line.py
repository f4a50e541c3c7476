"""The line of members that wait for leases: nobody sleeps beside a lease, and few are woken in vain."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from millrace.ids import MemberId
from services.coordinator.work.line import AT_ONCE, Line


class Stock:
    """Leases, and members that want one each."""

    def __init__(self, may_look: Callable[[MemberId], bool] = lambda _: True) -> None:
        self.line = Line(may_look)
        self.left = 0
        self.looks = 0
        self.taken: list[MemberId] = []

    def add(self, count: int) -> None:
        self.left += count
        self.line.ring()

    async def _look(self, member: MemberId) -> bool:
        self.looks += 1
        await asyncio.sleep(0)  # the store is asked
        if self.left == 0:
            return False
        self.left -= 1
        self.taken.append(member)
        return True

    async def lease(self, name: str, timeout_s: float = 60.0) -> bool:
        member = MemberId(name)
        rings, found = self.line.rings, await self._look(member)
        while not found and await self.line.wait(member, rings, timeout_s):
            rings = self.line.rings
            try:
                found = await self._look(member)
            finally:
                self.line.looked(rings, found=found, exhausted=not found)
        return found


def played(scenario: Awaitable[None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(run())


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def test_what_a_member_found_holds_until_the_next_ring() -> None:
    async def scenario() -> None:
        stock = Stock()
        assert not stock.line.is_empty, "nobody has looked"
        waiting = asyncio.create_task(stock.lease("a"))
        stock.add(1)
        await waiting
        assert not stock.line.is_empty, "it found one"
        stock.line.found_nothing(stock.line.rings - 1)
        assert not stock.line.is_empty, "it looked before the ring"
        stock.line.found_nothing(stock.line.rings)
        assert stock.line.is_empty
        stock.line.ring()
        assert not stock.line.is_empty

    played(scenario())


@pytest.mark.parametrize("leases", [0, 1, 7, 100])
def test_looks_grow_with_the_leases_not_with_those_who_wait(leases: int) -> None:
    async def scenario() -> None:
        stock = Stock()
        waiting = [asyncio.create_task(stock.lease(f"rollout-{n}")) for n in range(1000)]
        await settled()
        before = stock.looks
        stock.add(leases)
        await settled()
        assert (stock.left, len(stock.taken)) == (0, leases)
        assert stock.taken == [MemberId(f"rollout-{n}") for n in range(leases)]
        assert stock.looks - before <= leases + AT_ONCE
        for task in waiting:
            task.cancel()

    played(scenario())


def test_several_rings_in_a_row_cost_as_much_as_one() -> None:
    async def scenario() -> None:
        stock = Stock()
        waiting = [asyncio.create_task(stock.lease(f"rollout-{n}")) for n in range(100)]
        await settled()
        before = stock.looks
        for _ in range(1000):
            stock.add(0)
        await settled()
        assert stock.looks - before <= AT_ONCE
        for task in waiting:
            task.cancel()

    played(scenario())


def test_those_who_may_not_lease_sleep_on_and_one_may_be_woken() -> None:
    async def scenario() -> None:
        stock = Stock(lambda member: member == "rollout-99")
        waiting = {n: asyncio.create_task(stock.lease(f"rollout-{n}")) for n in range(100)}
        await settled()
        stock.add(2)
        await settled()
        assert stock.taken == ["rollout-99"]
        stock.line.wake(MemberId("rollout-5"))
        await settled()
        assert stock.taken == ["rollout-99", "rollout-5"]
        stock.add(98)
        stock.line.wake_all()
        assert all(await asyncio.gather(*waiting.values()))

    played(scenario())


def test_a_wait_ends_after_its_time() -> None:
    async def scenario() -> None:
        stock = Stock()
        assert not await stock.lease("rollout-a", 0.01)
        stock.add(1)
        assert await stock.lease("rollout-a", 0.01)

    played(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_nobody_sleeps_beside_a_lease(seed: int) -> None:
    """Members come, wait, give up and are cancelled at random, while leases come at random."""

    async def scenario() -> None:
        chance, stock = random.Random(seed), Stock()
        tasks: list[asyncio.Task[bool]] = []
        for number in range(300):
            match chance.randrange(4):
                case 0 | 1:
                    timeout_s = chance.choice([0.0, 0.001, 60.0])
                    tasks.append(asyncio.create_task(stock.lease(f"rollout-{number}", timeout_s)))
                case 2:
                    stock.add(chance.randrange(4))
                case _ if tasks:
                    chance.choice(tasks).cancel()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        await settled()
        waiting = [task for task in tasks if not task.done()]
        assert not waiting or stock.left == 0
        stock.add(len(waiting))
        await asyncio.gather(*waiting)

    played(scenario())
