"""Which etcd can hold a run: the one in PATH, if its version can be trusted.

etcd from 3.5.0 to 3.5.5, and before 3.4.20, is refused: those lose or corrupt what they hold.
"""

import re
import subprocess
from shutil import which

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.stores.encryption import has_certificates


def own_etcd_lack(path: str) -> str | None:
    """Why nodes had better not run an etcd by themselves; None: they can, and protect it.

    Args:
        path: where programs are looked for.
    """
    program = which("etcd", path=path)
    if program is None:
        return "there is no etcd in PATH"
    try:
        check_version(etcd_version(program))
    except ConfigError as error:
        return error.message
    return None if has_certificates() else "its protection needs the extra rankwise[tls]"


def etcd_version(program: str = "etcd") -> str:
    """The version of the etcd in PATH, or of another one.

    Raises:
        ConfigError: there is none.
    """
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--rdzv-own-etcd needs the program etcd: {error.strerror}",
            hint="install etcd 3.4.20 or later, or 3.5.6 or later, on the first three nodes",
        ) from error
    found = re.search(r"etcd Version: (\S+)", done.stdout)
    return found[1] if found else "unknown"


def check_version(version: str) -> None:
    """Refuse an etcd that cannot be trusted with what it holds.

    Raises:
        ConfigError: it is one of those.
    """
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if (3, 4, 20) <= numbers < (3, 5) or numbers >= (3, 5, 6):
        return
    raise ConfigError(
        f"the etcd in PATH is {version}, which may corrupt what it holds",
        hint="--rdzv-own-etcd needs 3.4.20 or later, or 3.5.6 or later",
    )
