"""A rank with a child in a session of its own; both write down their pids and live on."""

import os
import signal
import subprocess
import sys

directory, rank = sys.argv[1], os.environ["RANK"]
child = subprocess.Popen(
    [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
)
with open(f"{directory}/{rank}.tmp", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(f"{directory}/{rank}.tmp", f"{directory}/{rank}")
while True:
    signal.pause()
