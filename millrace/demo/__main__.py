import sys

from millrace.cli.output import print_error
from millrace.demo.run import app
from millrace.errors import MillraceError

try:
    app(prog_name="python -m millrace.demo")
except MillraceError as error:
    print_error(error)
    sys.exit(1)
