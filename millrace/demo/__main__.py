import sys

from millrace.interrupt import importing

with importing():
    from millrace.demo.run import app
    from millrace.errors import MillraceError
    from millrace.terminal.output import print_error

try:
    app(prog_name="python -m millrace.demo")
except MillraceError as error:
    print_error(error)
    sys.exit(1)
