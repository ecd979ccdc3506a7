"""A store with the methods of torch's, in keys of an etcd v3.

A key is waited for with a watch. Keys and values are as they are: etcd v3 takes bytes, so nothing
is base64 here.
"""

from collections.abc import Sequence
from datetime import timedelta

from rankwise.compat.torch.elastic.rendezvous.etcd_client import Client
from rankwise.compat.torch.elastic.rendezvous.torch_store import DEFAULT_TIMEOUT, TorchStore
from rankwise.compat.torch.elastic.utils.store import StoreTimeout

__all__ = ["EtcdStore"]


class EtcdKeyMissing(StoreTimeout, LookupError):
    """A key was not set in time: a LookupError, as of torch's EtcdStore."""


class EtcdStore(TorchStore):
    """All keys that begin with a prefix.

    Args:
        etcd_client: from `etcd_client.Client` or `EtcdServer.get_client`.
        etcd_store_prefix: the prefix; a slash is added if it does not end with one.
        timeout: how long `get` and `wait` wait; 300 s.
    """

    def __init__(
        self,
        etcd_client: Client,
        etcd_store_prefix: str,
        timeout: timedelta | None = None,
    ) -> None:
        self.client = etcd_client
        self.prefix = etcd_store_prefix.rstrip("/") + "/"
        super().__init__(etcd_client.store, self.prefix, timeout or DEFAULT_TIMEOUT)

    def wait(self, keys: Sequence[str], override_timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            EtcdKeyMissing: one has had none for the whole timeout; it is a LookupError.
        """
        try:
            super().wait(keys, override_timeout)
        except StoreTimeout as error:
            raise EtcdKeyMissing(error.message, hint=error.hint) from error
