"""`python -m services.coordinator`: REST for people, gRPC for the fleet, everything it knows in Redis."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from millrace.errors import MillraceError
from millrace.telemetry import logs, tracing
from services.coordinator.fleet.fleet import Patience
from services.coordinator.process import Coordinator, Settings

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    http_host: Annotated[str, typer.Option(envvar="MILLRACE_HTTP_HOST", help="REST address")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(envvar="MILLRACE_HTTP_PORT", help="REST port")] = 7700,
    grpc_host: Annotated[str, typer.Option(envvar="MILLRACE_GRPC_HOST", help="gRPC address")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(envvar="MILLRACE_GRPC_PORT", help="gRPC port")] = 7600,
    state_dir: Annotated[Path, typer.Option(envvar="MILLRACE_STATE_DIR", help="folder of the embedded Redis")] = Path(
        "~/.millrace/coordinator"
    ),
    redis_url: Annotated[str, typer.Option(envvar="REDIS_URL", help="Redis to use; none: an embedded one")] = "",
    heartbeat_s: Annotated[float, typer.Option(envvar="MILLRACE_HEARTBEAT_S", help="members' heartbeat")] = 1.0,
    lost_after_s: Annotated[float, typer.Option(envvar="MILLRACE_LOST_AFTER_S", help="silence that is death")] = 5.0,
) -> None:
    """Starts the coordinator. SIGTERM and SIGINT stop it; jobs go on when it is started again."""
    settings = Settings(
        http_host,
        http_port,
        grpc_host,
        grpc_port,
        state_dir.expanduser(),
        redis_url,
        Patience(heartbeat_s, lost_after_s),
    )
    try:
        logs.configure("coordinator")
        tracing.configure("coordinator")
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_signalled(settings))
    except MillraceError as error:
        typer.echo(f"coordinator: {error}", err=True)
        raise typer.Exit(1) from None


async def _until_signalled(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Coordinator(settings).run(stop)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: about twice as fast on small calls."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    app()
