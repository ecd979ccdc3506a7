"""Writes the reference pages of settings and of exit codes from the tables in the package.

    python tools/settings_reference.py settings > docs/settings.md
    python tools/settings_reference.py exit-codes > docs/exit-codes.md

A test compares the pages with what this writes.
"""

import sys
from collections.abc import Iterable, Mapping

import msgspec

from rankwise.base.units import SECOND
from rankwise.cli.exit_codes import EXIT_CODES_OF_OTHERS, EXIT_CODES_OF_RUN
from rankwise.cli.variables import VARIABLES, VARIABLES_OF_OTHERS
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.drivers.real.stores.c10d import C10dConfig
from rankwise.drivers.real.stores.embedded import EmbeddedConfig
from rankwise.drivers.real.stores.etcd_members import EtcdConfig
from rankwise.drivers.real.stores.store_settings import (
    C10D_SETTINGS,
    EMBEDDED_SETTINGS,
    ETCD_SETTINGS,
    StoreSetting,
)
from rankwise.launch.cluster.settings import RUN_TTL, TIMING_SETTINGS
from rankwise.launch.run.environment import MEANINGS_OF_VARIABLES

SETTINGS = """\
# Settings

<!-- Written by `python tools/settings_reference.py settings`; change the package instead. -->

An option on the command line wins over its variable, and a variable over the default:

```python
# file: train.py
import rankwise

print("ranks", rankwise.world_size())
```

```console
$ PET_NPROC_PER_NODE=3 rankwise run train.py
[default0]:ranks 3
$ PET_NPROC_PER_NODE=3 rankwise run --nproc-per-node 2 train.py
[default1]:ranks 2
```

Each option of `rankwise run` has the variable `PET_` and its name in capitals; the
[command line](cli.md) lists the options and the second names of some variables. There is no
configuration file.

## Variables of rankwise

{variables}
Do not set other variables that begin with `RANKWISE_`: rankwise sets them for its own
[workers](development/architecture.md#what-a-worker-finds).

## Variables of other tools

{others}
## Variables of a rank

{ranks}
## Rendezvous

`--rdzv-conf key=value,key=value`. [Stores](stores.md) compares the backends. An unknown key is an
error that names the nearest known one. Durations are in seconds.

### Times, for every backend

{timing}
### `etcd` (also `etcd-v2`: both speak version 3)

{etcd}
A run leaves two small keys for `run_ttl` after its end, or until the next run of that id. Leases
have whole seconds, at least 1.5 times etcd's election timeout, rounded up (2 s by default). A role
for the key range `rankwise/` is enough.

### `embedded` and `static`

{embedded}
A run id separates runs; it is not a secret. On a network with strangers, give a random token. Both
sides prove that they know the token without sending it, and every message is authenticated with it.

Traffic of agents is encrypted with TLS 1.3 ([why](adr/0022-encryption-with-the-runs-token.md)):
from Python 3.13 with the token as pre-shared key, before that with the extra `rankwise[tls]`.
Without the extra, a notice warns that the traffic is readable. The two ways refuse each other; use
one of them on all nodes, or `encrypts=false`.

### `c10d`

{c10d}
torch's stores have no transactions, watches or leases; agents keep an ordered log in them.
`import torch` costs the agent one or two seconds; no other backend imports it.
"""
EXIT_CODES = """\
# Exit codes

<!-- Written by `python tools/settings_reference.py exit-codes`; change the package instead. -->

Exit codes of `rankwise run`, on each node of the run:

{run}
```python
# file: fail.py
import os
import signal
import sys
import time

match sys.argv[1]:
    case "exit":
        sys.exit(7)
    case "raise":
        raise ValueError("bad shape")
    case "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    case "hang":
        time.sleep(600)
```

```console
$ for how in succeed exit raise kill hang; do
$   rankwise run --quiet --hang-timeout 3s --shutdown-timeout 1 fail.py $how; echo "$how: $?"
$ done
$ rankwise run --quiet missing.py; echo "missing: $?"
succeed: 0
exit: 7
raise: 1
kill: 137
hang: 124
missing: 2
```

A full disk behind stdout or stderr, or a reader that has ended, changes none of these. torchrun
exits with 1 after every failure. See also [signals](signals.md).

## Other commands

{others}"""


def settings() -> str:
    """The page of variables and of `--rdzv-conf`."""
    return SETTINGS.format(
        variables=_table(
            ("variable", "meaning", "default"),
            ((_code(name), each.meaning, each.default) for name, each in VARIABLES.items()),
        ),
        others=_named("variable", VARIABLES_OF_OTHERS),
        ranks=_named(
            "variable",
            {
                **MEANINGS_OF_VARIABLES,
                "TORCHELASTIC_ERROR_FILE": "path of its [error file](files.md#error-file)",
            },
        ),
        timing=_table(
            ("key", "torch's spelling", "meaning", "default"),
            (
                (_code(key), each.torch_spelling, each.meaning, _default_time(each.field))
                for key, each in TIMING_SETTINGS.items()
            ),
        ),
        etcd=_store_table(ETCD_SETTINGS, EtcdConfig),
        embedded=_store_table(EMBEDDED_SETTINGS, EmbeddedConfig),
        c10d=_store_table(C10D_SETTINGS, C10dConfig),
    )


def exit_codes() -> str:
    """The page of exit codes."""
    return EXIT_CODES.format(
        run=_table(("exit code", "what happened"), EXIT_CODES_OF_RUN.items()),
        others=_table(("command", "exit codes"), EXIT_CODES_OF_OTHERS.items()),
    )


def _default_time(field: str) -> str:
    return f"{RUN_TTL / SECOND:g}" if field == "run_ttl" else _default(RendezvousConfig, field)


def _default(configuration: type[msgspec.Struct], field: str) -> str:
    """The default of a duration, in seconds."""
    (found,) = (each for each in msgspec.structs.fields(configuration) if each.name == field)
    return f"{found.default / SECOND:g}"


def _store_table(settings: Mapping[str, StoreSetting], configuration: type[msgspec.Struct]) -> str:
    has_spellings = any(each.torch_spelling for each in settings.values())
    head = ("key", *(("torch's spelling",) if has_spellings else ()), "meaning", "default")
    rows = []
    for key, each in settings.items():
        spelling = _code(each.torch_spelling) if each.torch_spelling else ""
        default = each.default or _default(configuration, key)
        cells = (_code(key), *((spelling,) if has_spellings else ()), each.meaning, default)
        rows.append(cells)
    return _table(head, rows)


def _named(head: str, meanings: Mapping[str, str]) -> str:
    return _table((head, "meaning"), ((_code(name), text) for name, text in meanings.items()))


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    pages = {"settings": settings, "exit-codes": exit_codes}
    print(pages[sys.argv[1]](), end="")
