"""Answers that are programs which attack what runs them. Each prints what it got, `[]` where it got nothing.

`prey` says where things are."""

ATTACKS = {
    "network": """
import socket
got = []
for family, address in ((socket.AF_INET, ("127.0.0.1", prey["port"])), (socket.AF_UNIX, "\\0" + prey["abstract"])):
    with socket.socket(family) as connection:
        connection.settimeout(2)
        try:
            connection.connect(address)
            got.append(address)
        except OSError:
            pass
""",
    "files": """
import os
got = []
for path in (*prey["private"], "/tmp/of_scorer", "/proc/1/environ", "/proc/1/mem"):
    try:
        got.append(len(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)) or path)
    except OSError:
        pass
for folder in ("/", "/usr", "/etc", "/dev", "/proc", "/var", "/sys", os.path.dirname(os.__file__)):
    try:
        open(f"{folder}/mark", "w")
        got.append(folder)
    except OSError:
        pass
""",
    "processes": """
import ctypes, os, signal
seen = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
got = [pid for pid in seen if pid not in (1, os.getpid())]
libc = ctypes.CDLL(None, use_errno=True)
got += [pid for pid in (1,) if libc.ptrace(16, pid, None, None) == 0]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP, signal.SIGKILL):
    for pid in (1, os.getppid()):
        try:
            os.kill(pid, number)
        except OSError:
            pass
""",
    "namespaces": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
flags = {"user": 0x10000000, "mounts": 0x20000, "user and mounts": 0x10020000, "network": 0x40000000}
got = [name for name, flag in flags.items() if libc.unshare(flag) == 0]
got += ["mount"] * (libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0)
""",
    "descriptors": """
import os
names = {number: os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if int(number) > 3
         and os.path.lexists(f"/proc/self/fd/{number}")}
got = list(names.values())
try:
    os.write(0, b"x")
    got.append("input")
except OSError:
    pass
""",
    "left_behind": """
import glob, os, time
got = glob.glob("/tmp/*.left") + [n for n in os.listdir("/proc") if n.isdigit() and int(n) not in (1, os.getpid())]
open("/tmp/this.left", "w").close()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
""",
    "zombies": """
import os
got = []
for _ in range(10):
    if os.fork() == 0:
        os._exit(0)
""",
}
"""Attacks after which the program ends well."""

SELF_DESTRUCTIVE = {
    "fork_bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "it ran for",
    ),
    "hog": ("held = [bytearray(b'x') * (32 << 20) for _ in range(1000)]", "it ended with status 1: MemoryError"),
    "hogs": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        held = bytearray(b'x') * (60 << 20)\n"
        "        time.sleep(1000)\ntime.sleep(1000)",
        "it took more than 128 MB",
    ),
    "nameless_files": (
        "import os\nfiles = [os.memfd_create('a') for _ in range(100)]\nfor file in files:\n"
        "    for _ in range(32):\n        os.write(file, bytes(1 << 20))\nimport time\ntime.sleep(1000)",
        "it took more than 128 MB",
    ),
    "full_disk": ("file = open('/tmp/a', 'wb')\nwhile True:\n    file.write(bytes(1 << 20))", "it ended with status 1"),
    "endless_output": ("while True:\n    print('x' * 1000)", "it printed more than 1048576 bytes"),
    "endless_errors": ("import os\nwhile True:\n    os.write(2, bytes(1 << 16))", "it ran for"),
    "sleeper": ("import time\ntime.sleep(1000)", "it ran for"),
    "busy": ("while True:\n    pass", "it ran for"),
    "deep": ("import sys\nsys.setrecursionlimit(10**8)\ndef f(): f()\nf()", "it "),
    "kills_itself": ("import os\nos.kill(os.getpid(), 9)", "it ended with signal 9"),
    "kills_all": ("import os\nos.kill(-1, 9)", "it ended with status 1: ProcessLookupError"),
}
"""Programs that pass a limit or end badly, and how the reason begins."""
