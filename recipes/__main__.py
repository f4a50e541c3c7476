import sys

from millrace.cli.output import print_error
from millrace.errors import MillraceError
from recipes.run import app

try:
    app(prog_name="python -m recipes")
except MillraceError as error:
    print_error(error)
    sys.exit(1)
