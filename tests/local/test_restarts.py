from pathlib import Path

from millrace.local.lives import Restarts
from millrace.local.options import StackOptions, services
from millrace.local.supervisor import Supervisor


def test_waits_grow_up_to_a_bound_and_then_it_gives_up() -> None:
    restarts = Restarts(limit=6, window_s=600, first_wait_s=1, longest_wait_s=8)
    assert [restarts.wait_s(now) for now in range(8)] == [1, 2, 4, 8, 8, 8, None, None]


def test_a_process_that_ran_well_for_long_starts_with_a_clean_slate() -> None:
    restarts = Restarts(limit=2, window_s=100, first_wait_s=1)
    assert [restarts.wait_s(now) for now in (0, 1)] == [1, 2]
    assert restarts.wait_s(50) is None
    assert restarts.wait_s(101) == 2  # the death at 0 s is forgotten, the one at 1 s not yet
    assert restarts.used == 2


def test_a_process_that_had_joined_the_fleet_is_never_given_up() -> None:
    restarts = Restarts(limit=2, first_wait_s=1, longest_wait_joined_s=3)
    assert [restarts.wait_s(now, joined=True) for now in range(50)] == [1, 2] + [3] * 48
    assert restarts.used == 0, "what it died of may be a job's fault: it leaves the limit to lives that never joined"
    assert [restarts.wait_s(50), restarts.wait_s(51), restarts.wait_s(52)] == [15, 15, None]
    assert restarts.wait_s(53, joined=True) == 3


def test_the_stack_is_of_no_use_once_no_service_of_a_kind_can_run(tmp_path: Path) -> None:
    def given_up(*names: str) -> bool:
        options = StackOptions(str(tmp_path), replicas=2, standby_trainers=1)
        stack = Supervisor(options, services(options), services)
        for service in stack.services:
            if service.name in names:
                stack.give_up(service)
        return stack.failure is not None and stack.stopping.is_set()

    assert not given_up("trainer", "rollout-1") and not given_up("trainer-1")
    assert given_up("trainer", "trainer-1") and given_up("rollout-0", "rollout-1") and given_up("coordinator")
