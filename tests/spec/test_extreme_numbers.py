"""Numbers far beyond what anybody trains with: refused with the field and a fix, or accepted at a bounded cost.

The numbers of a job spec are found in its models, so that a new field is drawn here too.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from millrace.admission import choices
from millrace.backends import BACKENDS
from millrace.errors import InvalidJob
from millrace.rl.registry import catalogue
from millrace.rl.registry.catalogue import AlgorithmKind
from millrace.rl.registry.options import TYPES
from millrace.spec import JobSpec, parse
from millrace.validation import limits
from millrace.validation.fields import model_in
from millrace.validation.mistakes import options
from services.coordinator.stages.issue import training_sampling
from services.coordinator.work.terms import LeaseTerms

SMALLEST = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
SECTIONS = {
    "evaluation": {"files": ["held_out.parquet"]},
    "algorithm": {"critic": {}, "advantage": "gae", "distillation": {"pool": "teacher"}},
    "reward": {"functions": [{"function": "math", "name": "right"}, {"pool": "quality", "name": "liked"}]},
    "webhooks": [{"url": "https://hooks.example.com"}],
    "pools": [{"name": "quality", "path": "/reward-model"}, {"name": "teacher", "path": "/teacher"}],
}
"""Sections that a job may leave out and that have numbers."""
Place = tuple[str, ...]


def numbers(model: type[BaseModel], above: Place = ()) -> Iterator[Place]:
    """The paths of all fields that hold a number, or a list of numbers."""
    for name, field in model.model_fields.items():
        place = (*above, name)
        if (inner := model_in(field.annotation)) is not None:
            yield from numbers(inner, (*place, "0") if get_origin(field.annotation) is list else place)
        elif {int, float} & set(kinds(field.annotation)):
            yield place


def kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from kinds(each)


def with_numbers(values: Mapping[Place, object]) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps({**SMALLEST, **SECTIONS}))
    for place, value in values.items():
        part: Any = tree
        for name in place[:-1]:
            part = part[0] if name == "0" else part.setdefault(name, {})
        part[place[-1]] = value
    return tree


PLACES = sorted(numbers(JobSpec))
TOO_FAR = (2**31, 2**63, 2**64, 10**400, 10**5000, -1, -(2**63), 1e308, -1e308, 1e-320, math.inf, -math.inf, math.nan)
EXTREME = st.sampled_from([*TOO_FAR, 0, 1, True, False, "8", "many", None, [], {}, [0.9, 1e308], [0.5, math.nan]])
ANY = EXTREME | st.integers() | st.floats() | st.integers(-(2**70), 2**70)


def check_refusal(refused: InvalidJob, place: Place) -> None:
    """It names the field, or says of a rule between fields what to do, in plain words."""
    told = str(refused)
    assert len(told) < 4000
    assert all(mistake.field and mistake.fix for mistake in refused.mistakes), told
    fields = [mistake.field for mistake in refused.mistakes]
    section = place[0]
    assert any(f.startswith(".".join(place)) or f.partition(".")[0] == section or place[-1] in told for f in fields)
    for word in ("pydantic", "int_parsing", "Traceback", "Input should be", "dict", "str "):
        assert word not in told


def check_cost(spec: JobSpec) -> None:
    """What a coordinator does for the job before the first answer is bounded, and its messages hold the numbers."""
    schedule = spec.schedule
    assert schedule.prompts_per_step * (schedule.max_staleness + 1) <= limits.MOST_IN_FLIGHT
    assert schedule.prompts_per_step * spec.rollout.samples_per_prompt <= limits.MOST_TRAJECTORIES
    assert all(0 < wait <= limits.LONGEST_S for wait in spec.deadlines.model_dump().values())
    training_sampling(spec)
    LeaseTerms.of(spec)
    assert parse(json.loads(spec.model_dump_json())) == spec


def test_the_numbers_of_every_section_are_found() -> None:
    assert ("schedule", "prompts_per_step") in PLACES and ("trainer", "optimizer", "betas") in PLACES
    assert ("evaluation", "samples_per_prompt") in PLACES and ("algorithm", "critic", "clip") in PLACES
    assert len(PLACES) > 40


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_number_has_a_lower_and_an_upper_bound(place: Place) -> None:
    for value in (-(2**63), 2**63, 10**400, 1e308, -1e308, math.inf, math.nan):
        with pytest.raises(InvalidJob) as refused:
            parse(with_numbers({place: [value, value] if place[-1] == "betas" else value}))
        assert any(mistake.field.startswith(".".join(place)) for mistake in refused.value.mistakes)


@settings(deadline=2000, max_examples=300)
@given(place=st.sampled_from(PLACES), value=ANY)
def test_an_extreme_number_is_refused_or_accepted_at_a_bounded_cost(place: Place, value: object) -> None:
    try:
        spec = parse(with_numbers({place: value}))
        choices.check(spec)
    except InvalidJob as refused:
        check_refusal(refused, place)
    else:
        check_cost(spec)


@settings(deadline=2000, max_examples=150)
@given(st.dictionaries(st.sampled_from(PLACES), ANY, min_size=2, max_size=5))
def test_several_at_once(values: dict[Place, object]) -> None:
    try:
        check_cost(parse(with_numbers(values)))
    except InvalidJob as refused:
        assert all(mistake.field and mistake.fix for mistake in refused.mistakes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_numbers_of_a_backend_s_options_have_bounds(backend: str) -> None:
    model = BACKENDS[backend].options
    for *above, name in numbers(model):
        for value in (-1, 2**63, 10**400, 1e308, -1e308, math.inf, math.nan, "8", True):
            given_options: dict[str, Any] = {name: value}
            for part in reversed(above):
                given_options = {part: given_options}
            with pytest.raises(InvalidJob, match=rf"trainer\.backend_options\.{'.'.join((*above, name))}: "):
                options(model, given_options, "trainer.backend_options")


@pytest.mark.parametrize("kind", AlgorithmKind)
def test_the_numbers_of_an_algorithm_s_options_have_bounds(kind: AlgorithmKind) -> None:
    numeric = {name for name, annotation in TYPES.items() if {int, float} & set(kinds(annotation))}
    for name in catalogue.names(kind):
        entry = catalogue.find(kind, name)
        for option in entry.options:
            if option.annotation.partition(" |")[0] not in numeric:
                continue
            for value in (2**63, 10**400, 1e308, -1e308, math.inf, math.nan):
                with pytest.raises(InvalidJob, match=rf"algorithm\.x\.{option.name}"):
                    entry.check({option.name: [value, value] if option.annotation[-1] == "s" else value}, "algorithm.x")


@pytest.mark.parametrize("field", ["engine_options", "reward.options", "chat_template_options"])
def test_free_options_hold_numbers_that_json_and_64_bits_hold(field: str) -> None:
    place = {
        "engine_options": ("rollout", "engine_options"),
        "reward.options": ("reward", "options"),
        "chat_template_options": ("data", "chat_template_options"),
    }[field]
    for value in (2**63, -(2**64), 10**5000, math.inf, math.nan):
        with pytest.raises(InvalidJob, match=r"holds a number that .*Fix: give finite numbers"):
            parse(with_numbers({place: {"a": [{"b": value}]}}))
