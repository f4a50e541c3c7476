import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import Fenced, InvalidState
from millrace.ids import Epoch, JobId, Version
from millrace.weights.phases import NEXT, Phase, PublicationId, PublicationState


def publication(version=1, epoch=1, attempt=1, job="job-a"):
    return PublicationId(Epoch(epoch), Version(version), attempt, JobId(job))


WHOLE = [Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT]


def run(state, steps):
    for which, phase in steps:
        state = state.advance(which, phase)
    return state


def test_a_whole_publication_and_the_next():
    state = run(PublicationState(), [(publication(), p) for p in WHOLE])
    state = run(state, [(publication(version=2), p) for p in WHOLE])
    assert state == PublicationState(publication(version=2), Phase.COMMIT)


def test_every_phase_repeated_changes_nothing():
    state = PublicationState()
    for phase in WHOLE:
        state = state.advance(publication(), phase)
        assert state.advance(publication(), phase) is state


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(Phase, 2)))
def test_the_table_is_what_advance_does(one, other):
    state = PublicationState(publication(), one)
    if other in NEXT[one]:
        assert state.advance(publication(), other).phase is other
    elif one is Phase.COMMIT and other is not Phase.PREPARE:
        assert state.advance(publication(), other) is state, "repeats of what was committed change nothing"
    else:
        with pytest.raises(InvalidState):
            state.advance(publication(), other)


def test_nothing_older_is_accepted_after_an_abort():
    state = run(PublicationState(), [(publication(epoch=5), Phase.PREPARE)]).fail()
    for old in (publication(epoch=4), publication(epoch=5, version=0), publication(epoch=5, attempt=0)):
        with pytest.raises(Fenced):
            state.advance(old, Phase.PREPARE)
    assert state.advance(publication(epoch=5, attempt=2), Phase.PREPARE).phase is Phase.PREPARE


def test_another_job_begins_anew():
    state = PublicationState(publication(epoch=9, version=9), Phase.COMMIT)
    assert state.advance(publication(job="job-b"), Phase.PREPARE).publication == publication(job="job-b")


REFS = st.builds(publication, version=st.integers(0, 3), epoch=st.integers(0, 3), attempt=st.integers(1, 2))


@given(st.lists(st.tuples(REFS, st.sampled_from(Phase))))
def test_commit_is_reached_only_through_every_phase_in_order(calls):
    state, done = PublicationState(), {}
    for which, phase in calls:
        before = state
        try:
            state = state.advance(which, phase)
        except (Fenced, InvalidState):
            continue
        if state is not before:
            done.setdefault(which, []).append(phase)
        if before.publication and state.publication != before.publication:
            assert state.publication > before.publication
    for phases in done.values():
        if Phase.COMMIT in phases:
            last = phases[: phases.index(Phase.COMMIT) + 1]
            assert last[-4:] == WHOLE
