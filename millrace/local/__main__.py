"""`python -m millrace.local watchdog|supervise <options as JSON>`: how the stack's own processes start each other."""

import sys

from millrace.errors import MillraceError
from millrace.local.child_processes import watchdog
from millrace.local.options import StackOptions, of_this_host
from millrace.local.service_log import say


def main(role: str, text: str) -> int:
    if role == "watchdog":
        return watchdog((sys.executable, "-m", "millrace.local", "supervise", text))
    from millrace.local.supervisor import supervise  # imports the client, which a watchdog does without

    options = StackOptions.from_json(text)
    try:
        return supervise(options, of_this_host(options))
    except MillraceError as error:
        say("millrace", str(error))
        return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
