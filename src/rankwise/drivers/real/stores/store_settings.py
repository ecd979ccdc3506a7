"""The settings of each store in `--rdzv-conf`: names, meanings and defaults.

docs/settings.md is generated from these tables, and `opening.py` refuses other names.
"""

from typing import NamedTuple


class StoreSetting(NamedTuple):
    """What users read about a setting."""

    meaning: str
    default: str = ""
    """In words; empty if the field of that name in the store's configuration has it."""
    torch_spelling: str = ""


_REQUEST_TIMEOUT = StoreSetting(
    "time limit of one request with its repetitions; keep it below `lease_ttl`, or a silent server"
    " costs the lease"
)
_READ_TIMEOUT = StoreSetting(
    "torch's name for `request_timeout`; can only shorten it, since torch's default is 60",
    "`request_timeout`",
)
_IS_HOST = StoreSetting(
    "whether this agent serves the store: [Endpoints](stores.md#endpoints)",
    "decided by the address",
)
_LINGER = StoreSetting(
    "after the run, how long the serving agent waits until the other nodes know how it ended"
)
ETCD_SETTINGS = {
    "protocol": StoreSetting(
        "`http` or `https`", "`http`; `https` with `cacert`, `cert` or an https endpoint"
    ),
    "cacert": StoreSetting(
        "PEM file of the authorities for the server's certificate", "the system's", "ca_cert"
    ),
    "cert": StoreSetting("this client's certificate, if etcd requires one", "none", "ssl_cert"),
    "key": StoreSetting("the key of `cert`", "none", "ssl_cert_key"),
    "user": StoreSetting("user name, if etcd requires one", "none", "username"),
    "password": StoreSetting(
        "password of `user`; the variable `RANKWISE_ETCD_PASSWORD` keeps it out of process lists",
        "none",
    ),
    "request_timeout": _REQUEST_TIMEOUT,
    "read_timeout": _READ_TIMEOUT,
}
EMBEDDED_SETTINGS = {
    "token": StoreSetting(
        "shared secret of the run's nodes", "`RANKWISE_STORE_TOKEN`, else the run id"
    ),
    "token_file": StoreSetting("file that contains the token", "none"),
    "encrypts": StoreSetting(
        "`true`: fail if encryption is unavailable; `false`: do not encrypt. Equal on all nodes",
        "encrypt if this Python can",
    ),
    "is_host": _IS_HOST,
    "linger": _LINGER,
    "request_timeout": _REQUEST_TIMEOUT,
    "read_timeout": _READ_TIMEOUT,
}
C10D_SETTINGS = {
    "store_type": StoreSetting(
        "`tcp`: torch's TCPStore; `file`: torch's FileStore, with a shared path as endpoint",
        "`tcp`",
    ),
    "is_host": _IS_HOST,
    "linger": _LINGER,
    "read_timeout": StoreSetting("how long to wait for the serving agent", "60"),
}
TORCH_SPELLINGS = {
    setting.torch_spelling: name
    for name, setting in ETCD_SETTINGS.items()
    if setting.torch_spelling
}
