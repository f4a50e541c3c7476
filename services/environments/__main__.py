"""`python -m services.environments serve CONFIG` and `python -m services.environments tasks CONFIG`.

CONFIG is a JSON file with the `env` block of verifiers. Run it with the interpreter of a virtual environment that has
verifiers and the environment's packages, and this checkout on PYTHONPATH. With another `--host` than this machine's own
the variable ENVIRONMENT_TOKEN has to hold a secret, which replicas send.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from millrace.wire.reach import is_loopback


def main() -> None:
    asked = _arguments()
    secret = os.environ.get("ENVIRONMENT_TOKEN", "")
    if asked.command == "serve" and not secret and not asked.insecure and not is_loopback(asked.host):
        sys.exit(
            f"--host: {asked.host}: other hosts can reach it, and ENVIRONMENT_TOKEN is not set. "
            "Fix: set it to a secret here and on the replicas, or give --insecure."
        )
    from services.environments.runs import Environment

    environment = Environment(asked.config)
    if asked.command == "tasks":
        for row in environment.rows(asked.first, asked.count):
            print(json.dumps(row, ensure_ascii=False))
        return
    import uvicorn

    from services.environments.server import application

    served = application(environment, asked.at_once, secret)
    uvicorn.run(served, host=asked.host, port=asked.port, log_level="warning", timeout_graceful_shutdown=5)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.environments", description="A host of environments.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="runs episodes that replicas ask for")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=7790, help="port to listen on (default: %(default)s)")
    serve.add_argument("--at-once", type=int, default=64, help="episodes at the same time (default: %(default)s)")
    serve.add_argument("--insecure", action="store_true", help="serve other hosts without a token")
    tasks = commands.add_parser("tasks", help="writes the tasks as rows for the `data.files` of a job")
    tasks.add_argument("--first", type=int, default=0, help="number of the first task (default: %(default)s)")
    tasks.add_argument("--count", type=int, default=1000, help="tasks, at most (default: %(default)s)")
    for command in (serve, tasks):
        command.add_argument("config", type=Path, help="JSON file with verifiers' env block")
    return parser.parse_args()


if __name__ == "__main__":
    main()
