"""`millrace users`: who may use the coordinator, for admins."""

import time
from typing import Annotated

import typer
from rich.markup import escape

from millrace.rest.users import NewToken, Role
from millrace.terminal.output import AsJson, Url, connect, duration, people, print_json, table

app = typer.Typer(no_args_is_help=True, help="Users of the coordinator: tokens, roles, what was changed. For admins.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The user's name.", show_default=False)]


@app.command()
def add(
    name: Name,
    role: Annotated[Role, typer.Option(help="The most that a token of this user allows.")] = Role.SUBMIT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Add a user, and print its first token, which is shown only once."""
    with connect(url) as client:
        _tell(client.add_user(name, role), as_json)


@app.command()
def token(
    name: Name,
    role: Annotated[Role | None, typer.Option(help="What it allows; by default what the user may do.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="End the user's other tokens.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make another token of a user, and print it."""
    with connect(url) as client:
        _tell(client.new_token(name, role, replace=replace), as_json)


@app.command("list")
def list_users(url: Url = None, as_json: AsJson = False) -> None:
    """List the users and their tokens, by the ids that the audit log has too."""
    with connect(url) as client:
        found = client.users()
    if as_json:
        return print_json(found)
    rows = table("USER", "ROLE", ">AGE", "TOKENS")
    for user in found:
        tokens = ", ".join(f"{each.id} ({each.role})" for each in user.tokens)
        rows.add_row(escape(user.name), user.role, duration(time.time() - user.created_s), tokens or "none")
    people().print(rows if found else "There are no users. Add one with `millrace users add NAME`.")


@app.command()
def remove(name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Remove a user: its tokens end at once, its jobs go on."""
    with connect(url) as client:
        gone = client.remove_user(name)
    if as_json:
        return print_json(gone)
    people().print(f"{escape(gone.name)} is removed; its jobs go on, and admins see them.")


@app.command()
def audit(
    limit: Annotated[int, typer.Option(help="How many entries to list at most.", min=1, max=1000)] = 50,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the newest requests that changed something or were not allowed, the last one first."""
    with connect(url) as client:
        found = client.audit(limit)
    if as_json:
        return print_json(found)
    rows = table("TIME", "USER", "TOKEN", "FROM", "REQUEST", ">STATUS", "MADE")
    for entry in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s))
        request = f"{entry.method} {entry.path}"
        rows.add_row(when, entry.user, entry.token, entry.peer, escape(request), str(entry.status), entry.made)
    people().print(rows if found else "Nothing was changed yet.")


def _tell(made: NewToken, as_json: bool) -> None:
    if as_json:
        return print_json(made)
    people().print(f"Token {made.id} of {escape(made.user)} ({made.role}); it is not shown again:", style="dim")
    print(made.token)
    people().print("Whoever uses it sets MILLRACE_TOKEN to it.", style="dim")
