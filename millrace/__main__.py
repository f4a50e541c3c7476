"""`millrace` and `python -m millrace`. The benchmarks need fewer packages than the other commands."""

import sys

from millrace.interrupt import importing


def main() -> None:
    if sys.argv[1:2] == ["bench"]:
        with importing():
            from millrace.bench import app as benches

        benches(sys.argv[2:], prog_name="millrace bench")
    else:
        with importing():
            from millrace.cli import app

        app(prog_name="millrace")


if __name__ == "__main__":
    main()
