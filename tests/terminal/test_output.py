"""How commands print parts of a job."""

import pytest

from millrace.rest import Coverage, JobState, JobView
from millrace.terminal.output import held_out

JOB = JobView(id="job-1", name="one", state=JobState.RUNNING, step=4, steps=9, version=4, created_s=0.0, spec={})
ALL, PART, NONE = (Coverage(scored=scored, asked=256) for scored in (256, 107, 0))


@pytest.mark.parametrize(
    ("before", "last", "short", "full"),
    [
        ((None, None), None, "–", "–"),
        ((0.1, None), None, "0.100", "0.100"),  # of an earlier release
        ((0.1, ALL), None, "0.100", "0.100 (256 of 256)"),
        ((0.1, PART), None, "0.100 (107 of 256)", "0.100 (107 of 256)"),
        ((0.1, ALL), (0.42, PART), "0.100 → 0.420 (107 of 256)", "0.100 (256 of 256) → 0.420 (107 of 256)"),
        ((0.1, ALL), (None, NONE), "0.100 → – (0 of 256)", "0.100 (256 of 256) → – (0 of 256)"),
    ],
)
def test_a_held_out_score_says_of_how_many_prompts_it_is_unless_of_all(
    before: tuple[float | None, Coverage | None], last: tuple[float | None, Coverage] | None, short: str, full: str
) -> None:
    fields = {"evaluation_before": before[0], "evaluation_before_coverage": before[1]}
    if last is not None:
        fields |= {"evaluation_last": last[0], "evaluation_last_coverage": last[1], "evaluation_step": 4}
    job = JOB.model_copy(update=fields)
    assert (held_out(job), held_out(job, coverage=True)) == (short, full)
