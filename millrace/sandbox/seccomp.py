"""A filter of system calls, after which a process and its descendants make no user namespace. See seccomp(2).

In a user namespace of its own a process has capabilities: it can mount files whose memory nobody counts, and reaches
parts of the kernel that are closed to others.
"""

import ctypes
import errno
import platform

from millrace.sandbox.syscalls import CLONE_NEWUSER

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


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def forbid_user_namespaces() -> bool:
    """Answers whether the filter is in place: no for another machine, and where the kernel takes no filter. The process
    can gain no privileges any more."""
    if (machine := MACHINES.get(platform.machine())) is None:
        return False
    mark, clone, unshare, setns = machine
    # Jumps count from the next instruction. clone3 has its flags in memory, where no filter looks: the C library uses
    # clone instead where it does not exist.
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
