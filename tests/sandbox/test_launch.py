"""The process that passes a sandbox's output on."""

import os
import socket
import subprocess

import pytest

from millrace.sandbox import launch


def test_what_was_printed_before_the_end_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    output, written = os.pipe()
    ours, control = socket.socketpair()
    with subprocess.Popen(["sleep", "600"]) as running, ours, control:
        os.write(written, b"from a child\n")
        ours.close()  # the sandbox is told to end, before anybody has read the pipe
        launch._wait(running.pid, control.fileno(), output)
        running.kill()
    os.close(output)
    os.close(written)
    assert capfd.readouterr().err == "from a child\n"
