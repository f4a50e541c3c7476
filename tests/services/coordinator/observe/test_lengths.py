"""Lengths of answers by what became of them."""

from dataclasses import replace

from services.coordinator.observe.step_metrics import Fate, Lengths
from services.coordinator.state.group import GroupSummary
from tests.services.coordinator.state.test_group import group, trajectory


def summary(prompt: str, *lengths: int, carried: bool = False) -> GroupSummary:
    spans = [[(1, 0, 1), (3, 1, n)] if carried else [(3, 0, n)] for n in lengths]
    made = GroupSummary.of(group(*(trajectory(s, tokens=n) for s, n in zip(spans, lengths, strict=True))))
    return replace(made, prompt_id=prompt)  # type: ignore[arg-type]


def test_lengths_are_told_by_what_became_of_the_answers() -> None:
    lengths, short, long = Lengths(), summary("a", 2, 4), summary("b", 10, 20, carried=True)
    stale, equal = summary("c", 100), summary("d", 7)
    for group_, fate in ((short, Fate.KEPT), (long, Fate.KEPT), (stale, Fate.TOO_STALE), (equal, Fate.WITHOUT_SIGNAL)):
        lengths.add(group_, fate)
        lengths.add(group_, fate)
    assert lengths.metrics([short, long]) == {
        "response_length/offered_mean": (2 + 4 + 10 + 20 + 100 + 7) / 6,
        "response_length/too_stale_mean": 100,
        "response_length/without_signal_mean": 7,
        "response_length/carried_mean": 15,
        "training/too_stale_groups": 1,
        "fully_async/partial/total_partial_num": 2,
        "fully_async/partial/partial_ratio": 0.5,
        "fully_async/partial/max_partial_span": 2,
    }
    assert lengths.metrics([short])["training/too_stale_groups"] == 0
