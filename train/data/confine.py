"""A script that runs untrusted Python code under limits: `python -I confine.py FOLDER SECONDS BYTES PYTHON_ARGUMENT...`

The script needs the standard library alone. It limits its own process, then becomes `python -I PYTHON_ARGUMENT...`,
which keeps all limits. On every system it limits processor time, memory, and the size of files. On Linux (x86-64 and
arm64; as any user, inside containers too) it forbids more:

- by seccomp: the network, signals, other processes' limits and memory, and new processes, so that no process outlives
  this one;
- by Landlock (from Linux 5.13, where it is switched on): all files but those in FOLDER and, for reading, the
  interpreter's and the system's libraries. So the code cannot read /proc, through which a user's processes see each
  other's environment and memory.

`missing` lists the things that the system cannot forbid.
"""

import ctypes
import os
import platform
import struct
import sys


# Numbers of system calls, by architecture (linux/include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls).
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, and the kernel's AUDIT_ARCH
CLONE, CLONE3 = (56, 220), (435, 435)
DENIED = {
    "socket": (41, 198), "io_uring_setup": (425, 425),  # io_uring would open sockets unseen
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "fork": (57, None), "vfork": (58, None),
}  # fmt: skip
LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Landlock's rights: to execute and to read files and folders; all rights of a file; all rights of Landlock's version 1.
READ, FILE, EVERYTHING = 0b1101, 0b111, 2**13 - 1


def missing() -> list[str]:
    """Lists, in words, the things that this system cannot forbid."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return ["the network", "signals to other processes", "the user's files"]
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp = libc.prctl(21, 0, 0, 0, 0) >= 0  # PR_GET_SECCOMP
    landlock = _landlock_version(libc) > 0
    return ["the network", "signals to other processes"] * (not seccomp) + ["the user's files"] * (not landlock)


def confine(folder: str) -> None:
    """Forbids this process, for good, all that the system can forbid.

    Raises:
        OSError: the system reports that it supports a limit, and refuses to set it.
    """
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: int | str, *arguments: object) -> int:
        found = libc.syscall(function, *arguments) if isinstance(function, int) else libc.prctl(*arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
        return found

    call("PR_SET_NO_NEW_PRIVS", 38, 1, 0, 0, 0)
    if version := _landlock_version(libc):
        # Version 2 added renaming between folders, version 3 truncation; later rights do not matter here.
        everything = EVERYTHING | (version > 1) << 13 | (version > 2) << 14
        rules = call(444, struct.pack("=Q", everything), 8, 0)
        readable = (*LIBRARIES, sys.prefix, sys.base_prefix, *sys.path)
        for path, rights in (*((p, READ) for p in readable), *((p, FILE) for p in DEVICES), (folder, everything)):
            if os.path.exists(path):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                call(445, rules, 1, struct.pack("=Qi", rights if os.path.isdir(path) else rights & FILE, place), 0)
                os.close(place)
        call(446, rules, 0)
        os.close(rules)
    if libc.prctl(21, 0, 0, 0, 0) >= 0:
        steps = _steps(*ARCHITECTURES[platform.machine()])
        program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
        call("PR_SET_SECCOMP", 22, 2, struct.pack("@HP", len(steps), ctypes.addressof(program)))


def _landlock_version(libc: ctypes.CDLL) -> int:
    return max(0, libc.syscall(444, None, 0, 1))


def _steps(column: int, architecture: int) -> list[tuple[int, int, int, int]]:
    """Returns the filter of system calls, as BPF instructions: (code, jump if true, jump if false, constant)."""
    load, equal, least, overlaps, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38  # 38, ENOSYS: the C library then uses clone instead
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, 0)]
    steps += [(least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # refuses all system calls of x32
    for number in (numbers[column] for numbers in DENIED.values()):
        if number is not None:
            steps += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    steps += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, unknown)]
    # Allows clone only with CLONE_THREAD.
    steps += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (overlaps, 1, 0, 0x10000), (give, 0, 0, refuse)]
    return [*steps, (give, 0, 0, allow)]


if __name__ == "__main__":
    import resource  # imported here, since Windows lacks it, and the other rewards work there

    for kind, most in (("CPU", int(sys.argv[2])), ("AS", int(sys.argv[3])), ("FSIZE", 2**20), ("CORE", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
    confine(sys.argv[1])
    os.execv(sys.executable, [sys.executable, "-I", *sys.argv[4:]])
