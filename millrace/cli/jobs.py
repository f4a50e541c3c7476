"""Commands that call the coordinator: submit, watch, jobs, events, pause, resume, cancel, fleet, drain."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from millrace.cli.names import JobName, MemberName, job_id, member_id
from millrace.cli.settings import Settings, SpecFile, Swept, changes_of, read, variants_of
from millrace.client import Client
from millrace.errors import InvalidState
from millrace.events import Event
from millrace.rest import FleetView, JobState, JobSummary, JobView, MemberState, WaitingFor
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.sandbox.boundaries import Missing, listed
from millrace.spec.pool import ROLLOUT
from millrace.terminal.output import (
    USAGE_HEADINGS,
    AsJson,
    FittedTable,
    Url,
    connect,
    duration,
    held_out,
    number,
    people,
    print_json,
    styled,
    usage_cells,
)
from millrace.terminal.watch import follow

LISTED = 50
"""Jobs that `millrace jobs` lists by default."""


def submit(
    spec: SpecFile,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the job live until it ends.")] = False,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: two submissions with the same key give one job.")
    ] = None,
    settings: Swept = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job, or one for each combination of values that --set gives.

    The fields of the spec, with the values of --set in place of the file's, are checked here first; then the
    coordinator checks them again with the files that they name.
    With --watch, Ctrl-C only detaches: the job continues. Status 1 if the watched job does not succeed.

    Each job of a sweep has its values in its name, and a folder with that name in `output`, unless `output` has {name}
    or {id} in it. All are checked before the first is submitted.
    """
    variants = variants_of(settings)
    if watch and len(variants) > 1:
        what = f"--watch: it shows one job, and these are {len(variants)}."
        raise InvalidState(what, "leave it out, and see them all with `millrace top`.")
    checked = [read(spec, variant) for variant in variants]
    submitted = []
    with Client(url) as client:
        for variant, (document, tree) in zip(variants, checked, strict=True):
            with document.lines():
                job = client.submit(tree, key and f"{key}.{variant.suffix}".rstrip("."))
            submitted.append(job)
            if as_json:
                continue
            for each in job.advice:
                people().print(str(each), style="yellow", markup=False)
            if not watch:
                name = f"  {escape(job.name)}" if variant.suffix else ""
                people().print(f"{job.id}{name}  {styled(job.status)}  watch it: millrace watch")
        if watch:
            raise typer.Exit(follow(client, submitted[0].id, as_json))
    if as_json:
        print_json(submitted if len(variants) > 1 else submitted[0])


def watch(job: JobName = "last", url: Url = None, as_json: AsJson = False) -> None:
    """Show a job live until it ends. Ctrl-C only detaches: the job continues. Status 1 if it does not succeed."""
    with Client(url) as client:
        raise typer.Exit(follow(client, job_id(client, job), as_json))


def jobs(
    every: Annotated[bool, typer.Option("--all", "-a", help="List all jobs; --limit does not count then.")] = False,
    state: Annotated[JobState | None, typer.Option(help="List only jobs in this state.")] = None,
    tag: Annotated[str | None, typer.Option(help="List only jobs with this tag.")] = None,
    limit: Annotated[int, typer.Option(help="How many jobs to list at most.", min=1)] = LISTED,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the newest jobs, newest first."""
    with connect(url) as client:
        found = client.jobs(state, None if every else limit + 1, tag=tag)
    more, found = not every and len(found) > limit, found if every else found[:limit]
    if as_json:
        return print_json(found)
    console = people()
    nothing = "There are no jobs. Submit one with `millrace submit job.yaml`."
    if state is not None or tag is not None:
        nothing = f"No job is {state or 'there'}{f' with the tag {tag}' if tag else ''}."
    console.print(jobs_rows(found) if found else nothing)
    if more:
        console.print(f"Only the newest {limit} are listed. List all of them with --all.", style="dim")
    for job in found:
        if job.waiting and job.waiting.reason is not WaitingFor.EARLIER_JOB:
            console.print(f"{job.id} waits: {job.waiting.message}", style="yellow", markup=False)


def jobs_rows(found: Sequence[JobSummary]) -> FittedTable:
    """The table of `millrace jobs`."""
    of_users = ["USER"] if any(job.user for job in found) else []
    apart = any(job.partition not in ("", DEFAULT_PARTITION) for job in found)
    partition = ["PARTITION"] if apart else []
    columns = ("STATE", ">STEP", ">REWARD", ">HELD-OUT", ">AGE", ">QUEUED", ">RAN", "WAITS FOR")
    spare = ("QUEUED", "RAN", "AGE", "WAITS FOR", "PARTITION", "USER", "HELD-OUT")
    rows = FittedTable("JOB", "NAME", *of_users, *partition, *columns, spare=spare)
    for job in found:
        age = duration(time.time() - job.created_s)
        queued, took = duration(job.queued_s), duration(job.ran_s) if job.ran_s else "–"
        step = f"{job.step}/{job.steps_shown}"
        waits = job.waiting.reason.replace("_", " ") if job.waiting else ""
        figures = (step, number(job.reward), held_out(job), age, queued, took)
        whose = [job.user] if of_users else []
        where = [job.partition] if apart else []
        rows.add_row(job.id, escape(job.name), *whose, *where, styled(job.status), *figures, waits)
    return rows


def note(
    job: JobName,
    text: Annotated[str | None, typer.Argument(help="New notes, in place of the old; without it they stay.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Adds a tag. Can be repeated.")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="Removes a tag. Can be repeated.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print or change notes and tags of a job. `millrace jobs --tag` lists the jobs with a tag."""
    with connect(url) as client:
        noted = client.job(job_id(client, job))
        if text is not None or tag or untag:
            tags = [each for each in dict.fromkeys([*noted.tags, *(tag or ())]) if each not in (untag or ())]
            noted = client.note(noted.id, tags=tags if tag or untag else None, notes=text)
    if as_json:
        return print_json(noted)
    console = people()
    console.print(f"{noted.id}  {escape(noted.name)}  tags: {', '.join(noted.tags) or 'none'}")
    if noted.notes:
        console.print(noted.notes, markup=False)


def events(
    job: JobName,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f/ ", help="Wait for new events.")] = False,
    after: Annotated[str, typer.Option(help="Only events after the one with this id.")] = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print the job's events: changes of state, steps, publications, members, expired leases."""
    console = people()
    try:
        with connect(url) as client:
            for event in client.events(job_id(client, job), after, follow):
                print_json(event) if as_json else console.print(event_line(event))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def event_line(event: Event) -> str:
    """`12:30:05 step.done          step 3 of 60: reward 0.43`, with rich's markup."""
    at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    return f"[dim]{at}[/] [bold]{event.kind:<18}[/] {escape(event.message)}"


def pause(job: JobName, url: Url = None, as_json: AsJson = False) -> None:
    """Pause a job after the step in progress. Nothing is lost."""
    with connect(url) as client:
        _print_state(client.pause(job_id(client, job)), as_json)


def resume(
    job: JobName,
    settings: Settings = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Continue a job that is paused, failed or was cancelled.

    A job that failed or was cancelled is queued again. It continues from its last checkpoint, or from the model if
    there is none, and may get new values for fields of its spec with --set.
    """
    with connect(url) as client:
        _print_state(client.resume(job_id(client, job), changes_of(settings)), as_json)


def cancel(job: JobName, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a job. What it has trained is kept, and it can be resumed."""
    with connect(url) as client:
        _print_state(client.cancel(job_id(client, job)), as_json)


def delete(
    job: JobName,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Delete its checkpoints too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a job that has ended: its events, metrics, samples and ledger. It cannot be resumed then."""
    with connect(url) as client:
        found = client.job(job_id(client, job))
        what = f"{found.name} ({found.id})" + (" and its checkpoints" if checkpoints else "")
        if not yes and not typer.confirm(f"Delete {what}?", err=True):
            raise typer.Exit(1)
        gone = client.delete(found.id, checkpoints=checkpoints)
    if as_json:
        return print_json(gone)
    people().print(f"{gone.id}  deleted", *gone.checkpoints, sep="\n", markup=False)


def _print_state(job: JobView, as_json: bool) -> None:
    print_json(job) if as_json else people().print(f"{job.id}  {styled(job.status)}")


def fleet(url: Url = None, as_json: AsJson = False) -> None:
    """List the members: trainers and replicas with their state, weight version and speed."""
    with connect(url) as client:
        view = client.fleet()
    if as_json:
        return print_json(view)
    console = people()
    console.print(f"epoch {view.epoch}")
    nobody = "No trainers or replicas are connected. Start a local fleet with `millrace up`."
    console.print(fleet_rows(view) if view.trainers or view.replicas else nobody)
    for member in view.replicas:
        if member.trouble:
            console.print(f"{member.id} could not be configured: {member.trouble}", style="red", markup=False)
        if member.gone and member.state is not MemberState.LEFT:
            console.print(f"{member.id}: {member.gone}", style="yellow", markup=False)
        if member.missing_boundaries:
            missing = listed([Missing(boundary, why) for boundary, why in member.missing_boundaries.items()])
            what = f"{member.id}: the sandbox of reward functions lacks {missing}. Fix: `millrace doctor` on its host."
            console.print(what, style="yellow", markup=False)


def fleet_rows(view: FleetView) -> FittedTable:
    """The table of `millrace fleet`."""
    everybody = (*view.trainers, *view.replicas)
    apart = any(member.partition not in ("", DEFAULT_PARTITION) for member in everybody)
    rows = FittedTable(
        *("MEMBER", "KIND", *(["PARTITION"] if apart else []), "STATE", ">VERSION", ">RUNNING", ">LEASES", ">TOKENS/S"),
        *USAGE_HEADINGS,
        *("ENGINE", "ADDRESS", "METRICS", "SESSIONS", "DEVICE"),
        spare=("SESSIONS", "METRICS", "ENGINE", "HOST GB", "GPU GB", "CACHE", "DEVICE", "GPU", "LEASES", "RUNNING"),
    )
    for member in everybody:
        engine = f"{member.engine} {member.engine_release} ×{member.world_size}"
        counts = (str(member.version), str(member.running), str(member.leases), f"{member.tokens_per_s:.0f}")
        ports = [address.rpartition(":")[2] for address in (member.metrics_address, member.sessions_address)]
        where = (member.address, *ports, member.device)
        kind = member.kind if member.pool in ("", ROLLOUT) else f"pool {member.pool}"
        named = (kind, member.partition) if apart else (kind,)
        rows.add_row(member.id, *named, styled(member.state), *counts, *usage_cells(member), engine, *where)
    return rows


def drain(member: MemberName, url: Url = None, as_json: AsJson = False) -> None:
    """Remove a member from the fleet: it gets no new work, finishes what it has and leaves."""
    with connect(url) as client:
        drained = client.drain(member_id(client, member))
    print_json(drained) if as_json else people().print(f"{drained.id}  {styled(drained.state)}")


webhooks = typer.Typer(no_args_is_help=True, help="Webhooks: messages about how jobs end.")


@webhooks.callback()
def of_webhooks() -> None:
    """Keeps `test` a command of its own."""


@webhooks.command("test")
def test_webhooks(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Test those of this job; by default the coordinator's own.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send a test message to webhooks, once. Status 1 if one was not delivered."""
    with connect(url) as client:
        found = client.test_webhooks(None if job is None else job_id(client, job))
    if as_json:
        print_json(found)
    else:
        for each in found:
            outcome = "delivered" if each.delivered else f"not delivered: {each.reason}"
            people().print(f"{each.field}: {outcome}", style="" if each.delivered else "red", markup=False)
    raise typer.Exit(0 if all(each.delivered for each in found) else 1)
