"""What happens to the hosts of a scenario, and what the job's events have to say about it."""

from collections.abc import Callable

from millrace.events import Event, EventKind, MemberOut
from tests.hosts.scenario import Scenario
from tests.hosts.services import HEAD

TRAINERS = ("trainer-0", "trainer-1")
NODES = ("node-0", "node-1")
"""The hosts of one replica."""
BOTH_NODES = ", ".join(NODES)
"""As it registers."""
SINGLE = "single"
"""The host of the other replica."""
CUT_S = 20.0
"""Longer than the silence after which a replica, and a rank of the trainer, counts as lost."""
SLOW_MBIT_PER_S = 100.0


def lose_a_replica(scenario: Scenario) -> None:
    """The link of a replica is cut: its leases go to the other one, and it returns."""
    member = scenario.member(SINGLE)
    with scenario.fault(f"link of a replica's host cut for {CUT_S:g} s", _out(member)):
        _cut(scenario, SINGLE)


def kill_a_node(scenario: Scenario) -> None:
    """The second node of a replica over two hosts dies: that replica is lost as one, and starts again as one."""
    member = scenario.member(BOTH_NODES)
    launcher, *_ = sorted(scenario.services.network[NODES[1]].processes(), key=lambda one: one.create_time())
    forked = [process for server in launcher.children() for process in server.children()]
    with scenario.fault("a node of a replica over two hosts killed", _out(member)):
        min(forked, key=lambda one: one.create_time()).kill()


def lose_a_rank(scenario: Scenario) -> None:
    """The link of the trainer's second host is cut: the trainer names the rank and its host, and starts again."""

    def names_the_rank(event: Event) -> bool:
        return _trainer_lost(event) and f"rank 1 on {TRAINERS[1]}" in event.message

    with scenario.fault(f"link of a trainer's host cut for {CUT_S:g} s", names_the_rank):
        _cut(scenario, TRAINERS[1])


def kill_a_rank(scenario: Scenario) -> None:
    """A rank dies: the torchrun of each host starts its own rank again, and they meet."""
    ranks = [one for one in scenario.services.network[TRAINERS[1]].processes() if "RANK" in one.environ()]
    with scenario.fault("a trainer's rank killed", _trainer_lost):
        min(ranks, key=lambda one: one.create_time()).kill()


def lose_the_coordinator(scenario: Scenario) -> None:
    """The link of the coordinator's host is cut: it counts everybody as lost, and nobody has lost anything."""
    step = scenario.step
    with scenario.fault(f"link of the coordinator's host cut for {CUT_S:g} s", _trainer_lost) as cost:
        _cut(scenario, HEAD)
    kinds = {event.kind for event in cost.losses}
    assert {EventKind.TRAINER_LOST, EventKind.MEMBER_OUT} <= kinds
    assert EventKind.JOB_REWOUND not in kinds and scenario.step > step


def _out(member: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event.data, MemberOut) and event.data.member == member


def _trainer_lost(event: Event) -> bool:
    return event.kind is EventKind.TRAINER_LOST


def _cut(scenario: Scenario, host: str) -> None:
    scenario.services.network.cut(host)
    scenario.wait(CUT_S)
    scenario.services.network.heal(host)


def publications_over_a_slow_link(scenario: Scenario) -> str:
    """Median seconds of a publication at full speed, and with a slow link of the trainer's first host."""
    network = scenario.services.network
    fast_s = scenario.publishing_s(5)
    network.throttle(TRAINERS[0], SLOW_MBIT_PER_S)
    slow_s = scenario.publishing_s(5)
    network.release(TRAINERS[0])
    return f"publication, median: {fast_s:.2f} s, over {SLOW_MBIT_PER_S:g} Mbit/s {slow_s:.2f} s"
