"""`python -m millrace`. The benchmarks need fewer packages than the other commands."""

import sys


def main() -> None:
    if sys.argv[1:2] == ["bench"]:
        from millrace.bench import app

        app(sys.argv[2:], prog_name="millrace bench")
    else:
        from millrace.cli import app

        app(prog_name="millrace")


if __name__ == "__main__":
    main()
