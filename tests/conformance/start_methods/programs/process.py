"""What a program sees of its process: names of variables, arguments, paths, descriptors."""

import os
import resource
import signal
import sys
import threading

import numpy as np

rank = os.environ["RANK"]
print(rank, sys.argv, sys.orig_argv, sys.path, sys.flags)
print(rank, sorted(os.environ), os.getcwd(), __file__, __spec__, sorted(globals()))
with open("/proc/self/cmdline", "rb") as file:
    print(rank, file.read().split(b"\0"))
links = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)}
print(rank, links[0], len([fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2]))
handlers = {number: signal.getsignal(number) for number in range(1, 65)}
print(rank, {k: v for k, v in handlers.items() if v not in (signal.SIG_DFL, None)})
print(rank, signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getsid(0) == os.getpid())
print(
    rank,
    [
        (each.name, each.daemon, each.ident == threading.get_ident())
        for each in threading.enumerate()
    ],
)
print(
    rank,
    threading.main_thread() is threading.current_thread(),
    threading.get_native_id() == os.getpid(),
)
print(rank, [resource.getrlimit(each) for each in range(10)], os.nice(0), os.umask(0o22))
print(rank, sys.stdin.isatty(), sys.stdout.isatty(), sys.stdout.line_buffering, sys.stdout.encoding)
print(rank, sorted(k for k in os.environ if k.startswith("OPENBLAS")), np.arange(3).tolist())
print(rank, sys.getrecursionlimit(), sys.getswitchinterval(), sys.excepthook, sys.gettrace())
print(rank, sys.warnoptions, sys.getfilesystemencoding(), sys.exec_prefix, "torch" in sys.modules)
