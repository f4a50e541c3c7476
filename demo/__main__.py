import sys

from demo.run import app
from millrace.cli.output import print_error
from millrace.errors import MillraceError

try:
    app(prog_name="python -m demo")
except MillraceError as error:
    print_error(error)
    sys.exit(1)
