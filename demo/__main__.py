import sys

from demo.run import app
from millrace.cli.output import tell
from millrace.errors import MillraceError

try:
    app(prog_name="python -m demo")
except MillraceError as error:
    tell(error)
    sys.exit(1)
