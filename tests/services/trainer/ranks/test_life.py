"""Ranks that are started again at a store which still holds what earlier ones wrote."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from millrace.errors import Unavailable
from services.trainer.ranks.world import agree

LIMIT_S = 60.0


@pytest.fixture
def connect() -> Callable[[], Store]:
    """A client of the store that the ranks share; each rank has its own."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> Store:
        limit = timedelta(seconds=LIMIT_S)
        own: Store = TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False, timeout=limit)
        return own

    return client


def test_the_second_life_reads_nothing_of_the_first(connect: Callable[[], Store]) -> None:
    with ThreadPoolExecutor(2) as ranks:
        for port in ("first", "second"):
            zero = ranks.submit(agree, connect(), 0, 2, LIMIT_S)
            one = ranks.submit(agree, connect(), 1, 2, LIMIT_S)
            zero.result().set("address", port)
            assert one.result().get("address").decode() == port


def test_a_rank_that_returns_early_waits_for_the_next_life(connect: Callable[[], Store]) -> None:
    """Rank 1 has died and is back before rank 0 has noticed; then it dies once more and is back again."""
    with ThreadPoolExecutor(4) as ranks:
        first = [ranks.submit(agree, connect(), rank, 2, LIMIT_S) for rank in (0, 1)]
        for one in first:
            one.result().set("of", "the first life")
        early: list[Future[Store]] = [ranks.submit(agree, connect(), 1, 2, LIMIT_S)]
        zero = ranks.submit(agree, connect(), 0, 2, LIMIT_S)
        second = [zero.result(), early[0].result()]
        assert not second[1].check(["of"])
        again, third = ranks.submit(agree, connect(), 1, 2, LIMIT_S), ranks.submit(agree, connect(), 0, 2, LIMIT_S)
        third.result().set("of", "the third life")
        assert again.result().get("of").decode() == "the third life"


def test_a_rank_that_does_not_come_is_named(connect: Callable[[], Store]) -> None:
    with pytest.raises(Unavailable, match=r"ranks \[1\] of the trainer did not come within 0\.2 s"):
        agree(connect(), 0, 2, 0.2)
    with pytest.raises(Unavailable, match="rank 1 of the trainer found no rank 0"):
        agree(connect(), 1, 3, 0.2)
