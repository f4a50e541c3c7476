"""`python -m demo` in a clone: the demo, which is `millrace/demo/`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("millrace.demo", run_name="__main__")
