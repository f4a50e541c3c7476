"""After the filter no user namespace is made, and everything else works."""

import errno
import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, subprocess, sys, threading
from millrace.sandbox import syscalls
from millrace.sandbox.syscalls import forbid_user_namespaces

syscalls.gain_no_privileges()
assert forbid_user_namespaces()
libc = ctypes.CDLL(None, use_errno=True)
tries = {
    "unshare": lambda: libc.unshare(syscalls.CLONE_NEWUSER),
    "unshare with others": lambda: libc.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS),
    "clone": lambda: libc.syscall(CLONE, syscalls.CLONE_NEWUSER | 17, 0, 0, 0, 0),
    "clone3": lambda: libc.syscall(435, 0, 0),
    "setns": lambda: libc.setns(os.open("/proc/self/ns/user", os.O_RDONLY), syscalls.CLONE_NEWUSER),
}
for name, work in tries.items():
    print(name, work(), ctypes.get_errno())
thread = threading.Thread(target=print, args=("thread", 0, 0))
thread.start()
thread.join()
if (pid := os.fork()) == 0:
    os._exit(0)
print("fork", os.waitpid(pid, 0)[1], 0)
print(subprocess.run(["unshare", "--user", "true"], stderr=subprocess.DEVNULL).returncode != 0, 0, 0)
"""
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())


@pytest.mark.skipif(CLONE is None, reason="no filter for this machine")
def test_no_user_namespace_is_made() -> None:
    program = PROGRAM.replace("CLONE,", f"{CLONE},", 1)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert ran.returncode == 0, ran.stderr
    told = {
        name: (int(answer), int(code)) for name, answer, code in (x.rsplit(" ", 2) for x in ran.stdout.splitlines())
    }
    for name in ("unshare", "unshare with others", "clone", "setns"):
        assert told[name] == (-1, errno.EPERM), name
    assert told["clone3"] == (-1, errno.ENOSYS)
    assert told["thread"] == told["fork"] == told["True"] == (0, 0)
