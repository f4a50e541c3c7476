"""The plan of a seed: always the same, of every kind, and within what the local stack starts again."""

from collections import Counter

from benchmarks.chaos.faults import ENDINGS_PER_SERVICE, SERVICE, SHORT_STOP_S, Act, Target, draw
from benchmarks.chaos.trial import Shape


def test_a_seed_always_gives_the_same_faults() -> None:
    assert draw(3, 10, list(Target)) == draw(3, 10, list(Target)) != draw(4, 10, list(Target))


def test_every_act_comes_to_every_target() -> None:
    drawn = {(fault.target, fault.act) for seed in range(50) for fault in draw(seed, 10, list(Target))}
    assert drawn == {(target, act) for target in Target for act in Act}


def test_no_service_is_ended_so_often_that_the_stack_gives_it_up() -> None:
    for seed in range(50):
        endings: Counter[Target] = Counter()
        for fault in draw(seed, 20, list(Target)):
            lasting = fault.act is not Act.STOP or fault.stopped_s > SHORT_STOP_S[1]
            endings[SERVICE.get(fault.target, fault.target)] += lasting and fault.target is not Target.SCORER
        assert max(endings.values()) <= ENDINGS_PER_SERVICE


def test_only_processes_that_there_are_become_targets() -> None:
    assert Target.ENGINE not in Shape().targets
    assert Target.ENGINE in Shape(engine="transformers,vllm").targets
