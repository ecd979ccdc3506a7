"""What etcd says when it cannot, in each of the shapes that its gateway gives it."""

import pytest

from rankwise.drivers.real.stores.etcd_messages import Fault, decoded
from rankwise.drivers.real.stores.patience import describe


@pytest.mark.parametrize(
    "body",
    [
        b'{"message": "etcdserver: no leader", "code": 14}',
        b'{"error": "etcdserver: no leader", "code": 14}',
        b'{"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}}',
    ],
    ids=["a message", "an error", "an error of a stream"],
)
def test_a_fault_is_read_in_each_of_its_shapes(body: bytes) -> None:
    assert decoded(body, Fault).text == "etcdserver: no leader"


def test_where_in_pythons_source_tls_gave_up_is_not_told() -> None:
    error = TimeoutError("_ssl.c:989: The handshake operation timed out")

    assert describe(error) == "The handshake operation timed out"
