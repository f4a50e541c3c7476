"""Sections of a report that are tables: ledger, evaluations, publications, checkpoints, fleet, events, spec."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import InvalidJob
from millrace.events import CheckpointSaved, Event, EventKind, PublicationDone
from millrace.report.markup import Element, Part, details, element, section, table
from millrace.report.scales import written
from millrace.rest import FleetView, LedgerView, MemberView, StepMetrics
from millrace.telemetry.metrics.catalogue import find
from millrace.telemetry.metrics.step.evaluation import EVALUATION_RESULTS
from millrace.validation.kinds import leaves

MOST_EVENTS = 500
MOST_PUBLICATIONS = 50
ROUTINE = (EventKind.STEP_DONE, EventKind.PUBLICATION_DONE)
"""Kinds of events that other sections show."""
PLACES = ("queued", "leased", "generated", "trained", "dropped")
"""The states of a prompt, in the order in which it passes them."""


def clock(time_s: float) -> str:
    """`2026-11-23 12:30:05 UTC` of a Unix time."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def ledger_section(ledger: LedgerView) -> Element:
    counts = table([">issued", *(f">{place}" for place in PLACES)], [_counts(ledger)])
    reasons = sorted(ledger.reasons.items(), key=lambda one: -one[1])
    dropped = table(["dropped because of", ">prompts"], [[str(reason), f"{count:,}"] for reason, count in reasons])
    return section("Prompts", counts, *([dropped] if reasons else []))


def _counts(ledger: LedgerView) -> list[str]:
    return [f"{ledger.issued:,}", *(f"{getattr(ledger, place):,}" for place in PLACES)]


def evaluations_section(rows: Sequence[StepMetrics]) -> Element | None:
    """The results on held-out prompts, a row for each evaluation; None where there was none."""
    found = [(row.step, {k: v for k, v in row.values.items() if find(k) in EVALUATION_RESULTS}) for row in rows]
    found = [(step, values) for step, values in found if values]
    if not found:
        return None
    names = sorted({name for _, values in found for name in values})
    cells = [[str(step), *(written(v[name]) if name in v else "–" for name in names)] for step, v in found]
    return section("Held-out prompts", table([">step", *(f">{name}" for name in names)], cells))


def publications_section(events: Sequence[Event]) -> Element | None:
    done = [event.data for event in events if isinstance(event.data, PublicationDone) and event.data.members]
    if not done:
        return None
    phases = list(dict.fromkeys(phase for one in done for phase in one.phases))
    columns = [">version", "content", "from", ">receivers", ">seconds", *(f">{phase} s" for phase in phases)]
    columns += [">MB", ">GB/s on the wire", ">pause s", ">failed before"]
    rows = [_publication(one, phases) for one in done[-MOST_PUBLICATIONS:][::-1]]
    more = f"The newest {len(rows)} of {len(done)}, the newest first." if len(done) > len(rows) else ""
    return section("Publications of weights", element("p", more), table(columns, rows))


def _publication(one: PublicationDone, phases: Sequence[str]) -> list[str]:
    size, wire_s = one.members[0].bytes, max(member.wire_s for member in one.members)
    speed = f"{size / wire_s / 1e9:.2f}" if wire_s > 0 else "–"
    pause = max((member.pause_s for member in one.members[1:]), default=0.0)
    seconds = [f"{one.phases[phase]:.3f}" if phase in one.phases else "–" for phase in phases]
    head = [str(one.version), one.content, one.source, str(one.receivers), f"{one.seconds:.3f}"]
    return [*head, *seconds, f"{size / 1e6:,.1f}", speed, f"{pause:.3f}", str(one.failures)]


def checkpoints_section(events: Sequence[Event]) -> Element | None:
    saved = [(event.time_s, event.data) for event in events if isinstance(event.data, CheckpointSaved)]
    if not saved:
        return None
    rows = [
        [str(one.step), clock(at), _size(one.bytes), f"{one.seconds:.1f}" if one.seconds is not None else "–", one.path]
        for at, one in reversed(saved)
    ]
    return section("Checkpoints", table([">step", "time", ">MB", ">seconds", "folder"], rows))


def _size(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:,.1f}"


def fleet_section(fleet: FleetView) -> Element | None:
    members = (*fleet.trainers, *fleet.replicas)
    if not members:
        return None
    columns = ["member", "kind", "state", ">version", ">running", ">waiting", ">leases", ">tokens/s", "engine", "host"]
    rows = [_member(member) for member in members]
    return section(
        "Fleet", element("p", "All members of the coordinator, at the time of this report."), table(columns, rows)
    )


def _member(m: MemberView) -> list[str]:
    counts = (m.version, m.running, m.waiting, m.leases)
    engine, place = f"{m.engine} {m.engine_release} ×{m.world_size}", f"{m.host} {m.device}"
    return [m.id, m.kind, m.state, *map(str, counts), f"{m.tokens_per_s:,.0f}", engine, place]


def events_section(events: Sequence[Event]) -> Element | None:
    if not events:
        return None
    kinds = Counter(str(event.kind) for event in events)
    counted = table(["kind", ">events"], [[kind, f"{count:,}"] for kind, count in kinds.most_common()])
    told = [event for event in events if event.kind not in ROUTINE][-MOST_EVENTS:][::-1]
    log = table(["time", "kind", "what happened"], [[clock(e.time_s), str(e.kind), e.message] for e in told])
    listed = details(f"{len(told)} events, the newest first, without steps and publications", log)
    return section("Events", counted, listed)


def spec_section(spec: Mapping[str, Any]) -> Element:
    """The fields that the job gives, apart from those with their default values."""
    given, defaults = fields_by_origin(spec)
    parts: list[Part] = [table(["field", "value"], _fields(given))]
    if defaults:
        parts.append(
            details(f"{len(defaults)} fields with their defaults", table(["field", "value"], _fields(defaults)))
        )
    return section("Job spec", *parts)


def fields_by_origin(spec: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields whose values differ from the defaults of this release, and the others. Where this release does not
    know the spec, all fields are in the first part."""
    from millrace.spec import parse

    every = dict(leaves(spec))
    try:
        given = set(dict(leaves(parse(spec).model_dump(mode="json", exclude_defaults=True))))
    except InvalidJob:
        return every, {}
    differing = {name: value for name, value in every.items() if name in given}
    return differing, {name: value for name, value in every.items() if name not in given}


def _fields(values: Mapping[str, Any]) -> list[list[Part]]:
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in values.items()}
    return [[name, element("code", text)] for name, text in sorted(texts.items())]
