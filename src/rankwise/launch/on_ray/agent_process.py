"""`python -m rankwise.launch.on_ray.agent_process PARENT WORDS...`: `rankwise WORDS...` on a leash.

When the Ray actor that has started it dies, however it does, the kernel kills this agent, and its
guardian what it has started.

Ray may have been started in the background, where shells have SIGINT and SIGQUIT
ignored, or with nohup. That is not meant for agents, which are told what their driver is told.
"""

import runpy
import signal
import sys

from rankwise.drivers.real.hosting.prctl import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    del sys.argv[1]
    runpy.run_module("rankwise", run_name="__main__", alter_sys=True)
