"""Pages of the groups that a job's samples show, the newest first, with filters."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from millrace.rest import GroupPage, GroupView, SampleView
from services.coordinator.store.records import Records

READ = 400
"""Samples that are read from the store at a time."""
MOST_READ = 8000
"""Samples that are looked at for one page; those that come after have another page."""


@dataclass(frozen=True)
class Wanted:
    """Which groups a page has; None and empty texts: any."""

    step: int | None = None
    purpose: str = ""
    member: str = ""
    data_source: str = ""
    text: str = ""
    """Part of a prompt or of an answer, small or capital letters."""
    least: float | None = None
    greatest: float | None = None
    """Bounds of the reward of at least one sample."""

    def fits(self, group: GroupView) -> bool:
        first = group.samples[0]
        return (
            (self.step is None or group.step == self.step)
            and (not self.purpose or group.purpose == self.purpose)
            and (not self.member or first.member == self.member)
            and (not self.data_source or group.data_source == self.data_source)
            and ((self.least is None and self.greatest is None) or any(self._rewarded(s) for s in group.samples))
            and (not self.text or any(self._says(sample) for sample in group.samples))
        )

    def _rewarded(self, sample: SampleView) -> bool:
        reward = sample.reward
        return (
            reward is not None
            and (self.least is None or reward >= self.least)
            and (self.greatest is None or reward <= self.greatest)
        )

    def _says(self, sample: SampleView) -> bool:
        text = self.text.lower()
        return text in sample.answer.lower() or text in sample.prompt.lower()


async def page(records: Records, wanted: Wanted, limit: int, cursor: int | None) -> GroupPage:
    """Up to `limit` groups. `cursor`: `next` of the page before."""
    total = await records.sample_count()
    end = total if cursor is None else min(cursor, total)
    if wanted.step is not None and cursor is None:
        end = await _end_of(records, wanted.step, total)
    found: list[GroupView] = []
    held: list[SampleView] = []  # those from `first` up to `end`
    first, oldest = end, max(0, end - MOST_READ)
    while end > oldest and len(found) < limit:
        held = [*await records.sample_range(max(0, first - READ), first), *held]
        first = max(0, first - READ)
        groups = list(_groups(held))
        for group in reversed(groups if first == 0 else groups[1:]):  # the first one may begin further back
            if wanted.step is not None and group.step < wanted.step:
                return GroupPage(groups=found, next=None, total=total)
            end -= len(group.samples)
            if wanted.fits(group):
                found.append(group)
            if len(found) == limit:
                break
        held = held[: end - first]
    return GroupPage(groups=found, next=end or None, total=total)


def _groups(samples: list[SampleView]) -> Iterator[GroupView]:
    for (step, prompt, purpose), own in groupby(samples, key=lambda s: (s.step, s.prompt_id, s.purpose)):
        of_group = list(own)
        yield GroupView(
            step=step, prompt_id=prompt, purpose=purpose, data_source=of_group[0].data_source, samples=of_group
        )


async def _end_of(records: Records, step: int, total: int) -> int:
    """Index after the last sample of `step`, or after those before it if there is none. Steps grow along the list,
    except where a job went back to an earlier one: then the end of one of its runs is found."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        found = await records.sample_range(middle, middle + 1)
        if found and found[0].step <= step:
            low = middle + 1
        else:
            high = middle
    return low
