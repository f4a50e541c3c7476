"""`python -m millrace`. Benches need less installed than the rest."""

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
