import sys

from millrace.errors import MillraceError
from millrace.terminal.output import print_error
from recipes.run import app

try:
    app(prog_name="python -m recipes")
except MillraceError as error:
    print_error(error)
    sys.exit(1)
