"""A `RendezvousBackend` in one key of an etcd v3, for launchers that make their own.

The backends `etcd` and `etcd-v2` of `rankwise run` do not use this: their nodes have keys of their
own, and are told of changes instead of polling.
"""

from base64 import b64encode

from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
)
from rankwise.compat.torch.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    decoded_state,
    failure_recorded,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_client import (
    Client,
    EtcdAlreadyExist,
    EtcdCompareFailed,
    EtcdException,
    EtcdKeyNotFound,
    EtcdResult,
    create_client,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_store import EtcdStore

__all__ = ["EtcdRendezvousBackend", "create_backend"]

TTL_S = 7200


class EtcdRendezvousBackend(RendezvousBackend):
    """Keeps the state under `key_prefix/run_id`, as base64.

    Args:
        client: from `etcd_client.Client` or `EtcdServer.get_client`.
        run_id: the run.
        key_prefix: where runs are kept.
        ttl: how many seconds etcd remembers a run without members; two hours.

    Raises:
        ValueError: the run id is empty.
    """

    def __init__(
        self, client: Client, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._client = client
        self._key = f"{key_prefix}/{run_id}" if key_prefix else run_id
        self._ttl = ttl if ttl and ttl > 0 else TTL_S

    @property
    def name(self) -> str:
        """`etcd-v2`."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state; its token is the revision that wrote it."""
        try:
            return _decoded(self._client.read(self._key))
        except EtcdKeyNotFound:
            return None
        except EtcdException as error:
            raise _not_answered() from error

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if it still has this revision."""
        try:
            value = b64encode(state).decode()
            if token:
                result = self._client.write(self._key, value, self._ttl, prevIndex=int(token))
            else:
                result = self._client.write(self._key, value, self._ttl, prevExist=False)
        except (ValueError, EtcdAlreadyExist, EtcdCompareFailed):  # ValueError: no token of ours
            there = self.get_state()
            return None if there is None else (*there, False)
        except EtcdException as error:
            raise _not_answered() from error
        return (*_decoded(result), True)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Connect to `endpoint`; settings are `create_client`'s.

    Returns:
        The backend and a store for agents.

    Raises:
        ValueError: a setting cannot be used.
        RendezvousConnectionError: etcd does not answer.
    """
    with failure_recorded(params.run_id):
        client = create_client(params)
        backend = EtcdRendezvousBackend(client, params.run_id, "/torch/elastic/rendezvous")
        backend.get_state()  # an etcd that cannot be reached is an error now, not later
    return backend, EtcdStore(client, "/torch/elastic/store")


def _not_answered() -> RendezvousConnectionError:
    return RendezvousConnectionError(
        "The connection to etcd has failed. See inner exception for details."
    )


def _decoded(result: EtcdResult) -> tuple[bytes, Token]:
    return decoded_state(result.value), result.modifiedIndex
