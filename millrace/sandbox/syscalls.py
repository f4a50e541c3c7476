"""The few system calls of a sandbox that Python's `os` does not have, and the filter that forbids some of them. Each
raises OSError with the call's name.

The numbers of calls since Linux 5.0 are the same for every processor. See namespaces(7), mount_setattr(2),
pivot_root(2), capabilities(7), seccomp(2).
"""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 0x20, 0x1000, 0x4000, 0x80000
READ_ONLY, NO_SETUID, NO_DEVICES = 0x1, 0x2, 0x4
"""Attributes of a mount, for `restrict`."""

_SIOCSIFFLAGS = 0x8914
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MNT_DETACH = 2
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions: load a word of the call, three conditional jumps, return."""
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Where the words of a call are."""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
CLONE3 = 435
FOREIGN = 0x40000000
"""Numbers from here on are those of x32 programs."""
MACHINES = {"x86_64": (0xC000003E, 56, 272, 308), "aarch64": (0xC00000B7, 220, 97, 268)}
"""The machine's own mark, and the numbers of clone, unshare and setns."""


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def _done(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _done("unshare", _libc.unshare(flags))


def mount(kind: str | None, target: str, flags: int, options: str = "") -> None:
    """Mounts a new file system of `kind`; None only changes flags of the mount at `target`."""
    source = kind.encode() if kind is not None else None
    _done(f"mount {target}", _libc.mount(source, target.encode(), source, ctypes.c_ulong(flags), options.encode()))


def make_read_only(target: str) -> None:
    """Makes the mount at `target` read-only, not those inside it."""
    mount(None, target, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def unmount(target: str) -> None:
    """Takes the mount out of the tree, with all that is mounted in it."""
    _done(f"umount {target}", _libc.umount2(target.encode(), _MNT_DETACH))


def copy_of_tree(path: str) -> int:
    """A descriptor of a copy of the tree of mounts at `path`, which is mounted nowhere yet."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _done(f"open_tree {path}", _libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags))


def restrict(tree: int, attributes: int) -> None:
    """Sets attributes of all mounts of the tree."""
    wanted = _MountAttributes(attributes, 0, 0, 0)
    flags, size = _AT_EMPTY_PATH | _AT_RECURSIVE, ctypes.sizeof(wanted)
    _done("mount_setattr", _libc.syscall(_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(wanted), size))


def attach(tree: int, target: str) -> None:
    """Mounts a tree of `copy_of_tree`."""
    result = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _done(f"move_mount {target}", result)


def make_root(folder: str) -> None:
    """Makes the mount at `folder` the root of this mount namespace; the old root is gone."""
    if (number := _PIVOT_ROOT.get(platform.machine())) is None:
        raise OSError(0, f"pivot_root: its number on {platform.machine()} is not known")
    os.chdir(folder)
    # The old root is stacked on the new one, so that no folder is needed for it.
    _done("pivot_root", _libc.syscall(number, b".", b"."))
    unmount(".")
    os.chdir("/")


def end_with_parent(number: int) -> None:
    """The kernel sends signal `number` to this process when the thread that started it ends. A change of the user, of
    capabilities or of the user namespace clears this."""
    _done("prctl", _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _done("prctl", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def stay_inspectable() -> None:
    """Lets a process with rights over this one read its memory counters, also after a change of the user."""
    _done("prctl", _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def gain_no_privileges() -> None:
    """Sets no_new_privs: no program that is executed later has more rights than this process."""
    _done("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def forgo_capabilities() -> None:
    """Empties the bounding set, if this process may: then no descendant can have a capability."""
    for capability in range(_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            return


def drop_capabilities() -> None:
    """Gives up all capabilities of this process."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _done("capset", _libc.capset(header, none))


def raise_loopback() -> None:
    """Makes the loopback of this network namespace usable. See netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def forbid_user_namespaces() -> bool:
    """Filters the system calls of this process and its descendants, so that they make no user namespace. In one of its
    own a process has capabilities: it can mount files whose memory nobody counts, and reaches parts of the kernel that
    are closed to others. The process can gain no privileges any more.

    Answers whether the filter is in place: no on a machine that is not in MACHINES, and if the kernel takes no filter.
    """
    if (machine := MACHINES.get(platform.machine())) is None:
        return False
    mark, clone, unshare, setns = machine
    # Jumps count from the next instruction. clone3 has its flags in memory, where no filter looks: the C library uses
    # clone instead if it does not exist.
    rules = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 0, 9, mark),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 7, 0, FOREIGN),
        (EQUAL, 6, 0, CLONE3),
        (EQUAL, 6, 0, setns),
        (EQUAL, 1, 0, clone),
        (EQUAL, 0, 2, unshare),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 2, 0, CLONE_NEWUSER),
        (ANSWER, 0, 0, ALLOW),
        (ANSWER, 0, 0, REFUSE | errno.ENOSYS),
        (ANSWER, 0, 0, REFUSE | errno.EPERM),
    ]
    instructions = (_Instruction * len(rules))(*(_Instruction(*rule) for rule in rules))
    program = _Program(len(rules), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0) == 0)
