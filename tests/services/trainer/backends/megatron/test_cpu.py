"""Replaced calls of torch leave the rest of the process as it is."""

import subprocess
import sys

PROGRAM = """
from services.trainer.backends.megatron import cpu
cpu.install()
import torch
with torch.device("meta"):
    made = [torch.zeros(1), torch.ones(1), torch.empty(1), torch.tensor(1.0), torch.nn.Linear(2, 2).weight]
print([tensor.device.type for tensor in made])
"""


def test_a_device_context_holds_that_is_first_used_after_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(["meta"] * 5)
