"""What an etcd client makes of a bad day: dead and silent members, compaction, users, TLS."""

import http.client
import json
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from etcd_servers import EtcdCluster, EtcdMember, etcd_cluster, free_ports, needs_etcd

from rankwise.base.errors import Compacted, LeaseLost, StoreRefused, StoreUnavailable
from rankwise.base.keys import Change, Committed, Put, Revision, Transaction
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.drivers.real.stores.etcd import EtcdStore, EtcdWatch
from rankwise.drivers.real.stores.etcd_members import EtcdConfig

pytestmark = [pytest.mark.system, needs_etcd]

PATIENCE = Duration(60 * SECOND)
SHORT = Duration(300 * MILLISECOND)


def store_of(cluster: EtcdCluster, timeout: Duration = PATIENCE, /, **config: Any) -> EtcdStore:
    return EtcdStore(EtcdConfig(endpoints=cluster.endpoints, request_timeout=timeout, **config))


def put(store: EtcdStore, key: str, value: bytes = b"") -> Revision:
    """Write a key for certain: once more if nobody knows whether it was written."""
    for _ in range(20):
        try:
            result = store.commit(Transaction(puts=(Put(key, value),)))
        except StoreUnavailable:
            continue
        assert isinstance(result, Committed)
        return result.revision
    raise AssertionError(f"{key} could not be written")


def told_until(watch: EtcdWatch, key: str) -> list[Change]:
    """What a watch tells until that key is among it."""
    told: list[Change] = []
    while key not in [change.key for change in told]:
        changes = watch.next(PATIENCE)
        assert changes, f"the watch told nothing of {key}"
        told += changes
    return told


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("three"), 3) as cluster:
        yield cluster


@pytest.fixture
def three_to_kill(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path, 3) as cluster:
        yield cluster


def member_in_use(store: EtcdStore, cluster: EtcdCluster) -> EtcdMember:
    port = store._members.current.port
    (member,) = [one for one in cluster.members if one.client_port == port]
    return member


def test_a_watch_and_requests_survive_a_restart_of_the_server(cluster: EtcdCluster) -> None:
    (member,) = cluster.members
    with store_of(cluster) as store:
        lease = store.grant_lease(PATIENCE)
        revision = put(store, "a")
        watch = store.watch("", revision)
        put(store, "b")
        told_until(watch, "b")

        member.kill()
        with ThreadPoolExecutor(1) as pool:
            telling = pool.submit(told_until, watch, "c")
            cluster.heal()
            put(store, "c", b"after")
            told = telling.result()

        assert [(change.key, change.value) for change in told][-1] == ("c", b"after")
        assert [change.key for change in told if change.key == "b"] == []
        assert [entry.key for entry in store.read("").entries] == ["a", "b", "c"]
        store.renew_lease(lease)


def test_a_dead_server_is_named_with_the_time_it_was_tried_for(cluster: EtcdCluster) -> None:
    (member,) = cluster.members
    with store_of(cluster, SHORT) as store:
        watch = store.watch("", put(store, "a"))
        member.kill()

        with pytest.raises(
            StoreUnavailable, match=rf"0\.3 s from etcd at 127\.0\.0\.1:{member.client_port}"
        ):
            store.read("")
        with pytest.raises(StoreUnavailable, match="Connection refused"):
            watch.next(PATIENCE)
        cluster.heal()

    with store_of(cluster) as store:
        assert len(store.read("").entries) == 1


def test_a_server_that_was_never_there_is_unavailable() -> None:
    (port,) = free_ports(1)
    config = EtcdConfig(endpoints=(("127.0.0.1", port),), request_timeout=SHORT)

    with EtcdStore(config) as store, pytest.raises(StoreUnavailable) as unavailable:
        store.commit(Transaction())

    assert unavailable.value.hint is not None
    assert "--rdzv-endpoint" in unavailable.value.hint


def test_a_silent_server_is_unavailable_and_serves_again_when_it_wakes(
    cluster: EtcdCluster,
) -> None:
    (member,) = cluster.members
    with store_of(cluster) as store, store_of(cluster, SHORT) as hasty:
        watch = store.watch("", put(store, "a"))
        member.stop()
        try:
            with pytest.raises(StoreUnavailable, match="timed out"):
                hasty.read("")
            with pytest.raises(StoreUnavailable, match="may have taken place"):
                hasty.commit(Transaction(puts=(Put("lost", b""),)))
        finally:
            member.go_on()
        put(store, "b")

        told_until(watch, "b")


def test_requests_and_watches_leave_a_member_that_has_stopped(three: EtcdCluster) -> None:
    """Its kernel goes on acknowledging, so nothing breaks by itself."""
    with store_of(three, Duration(6 * SECOND)) as store:
        watch = store.watch("2/", put(store, "2/before"))
        watch.next(Duration(1))
        stopped = member_in_use(store, three)
        stopped.stop()
        try:
            with ThreadPoolExecutor(1) as pool:
                telling = pool.submit(told_until, watch, "2/after")
                put(store, "2/after")
                telling.result()
            assert member_in_use(store, three) is not stopped
        finally:
            stopped.go_on()


def test_a_lone_watch_notices_that_its_member_has_stopped(
    three: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody makes requests on its client: it asks for itself."""
    monkeypatch.setattr("rankwise.drivers.real.stores.etcd.PROBE_AFTER_S", 0.2)
    # Not the leader, for whose silence etcd itself takes seconds to make up.
    follower = next(one for one in three.members if not _leads(one))
    with store_of(three, Duration(3 * SECOND)) as watching:
        watching._members._current = three.members.index(follower)
        watch = watching.watch("3/", watching.read("").revision)
        watch.next(Duration(1))
        stopped = member_in_use(watching, three)
        others = tuple(one.endpoint for one in three.members if one is not stopped)
        stopped.stop()
        try:
            config = EtcdConfig(endpoints=others, request_timeout=PATIENCE)
            with EtcdStore(config) as writing:
                put(writing, "3/after")
                told_until(watch, "3/after")
        finally:
            stopped.go_on()


def test_the_leader_may_be_killed_under_requests_and_watches(three_to_kill: EtcdCluster) -> None:
    leader = next(one for one in three_to_kill.members if _leads(one))
    with store_of(three_to_kill) as store:
        store._members._current = three_to_kill.members.index(leader)
        lease = store.grant_lease(PATIENCE)
        watch = store.watch("", put(store, "before"))
        watch.next(Duration(1))
        leader.kill()

        put(store, "after")
        told_until(watch, "after")
        store.renew_lease(lease)
        assert member_in_use(store, three_to_kill) is not leader
        three_to_kill.heal()
        assert len(store.read("").entries) == 2


def _leads(member: EtcdMember) -> bool:
    status = _post(member, "/v3/maintenance/status", {})
    return bool(status["header"]["member_id"] == status["leader"])


def test_without_a_majority_nobody_serves_and_nothing_is_lost(three_to_kill: EtcdCluster) -> None:
    with store_of(three_to_kill) as store:
        revision = put(store, "5/before")
        watch = store.watch("5/", revision)
        first, second, _ = three_to_kill.members
        first.kill()
        second.kill()

        with store_of(three_to_kill, Duration(SECOND)) as hasty, pytest.raises(StoreUnavailable):
            hasty.read("")
        three_to_kill.heal()
        put(store, "5/after")

        assert told_until(watch, "5/after")[-1].key == "5/after"


def test_a_watch_that_lags_behind_a_compaction_is_told_so(cluster: EtcdCluster) -> None:
    (member,) = cluster.members
    with store_of(cluster) as store:
        first = put(store, "a")
        watch = store.watch("", first)
        put(store, "a")
        last = put(store, "b")
        _post(member, "/v3/kv/compaction", {"revision": last})

        with pytest.raises(Compacted) as compacted:
            watch.next(PATIENCE)

        assert compacted.value.revision == last
        fresh = store.watch("", store.read("").revision)
        put(store, "c")
        assert [change.key for change in told_until(fresh, "c")] == ["c"]


def test_a_compaction_under_a_watch_that_keeps_up_is_not_noticed(cluster: EtcdCluster) -> None:
    (member,) = cluster.members
    with store_of(cluster) as store:
        watch = store.watch("", put(store, "a"))
        last = put(store, "b")
        told_until(watch, "b")
        _post(member, "/v3/kv/compaction", {"revision": last})
        # A new connection begins where the watch is, which is just what is left.
        store._members.suspect(store._members.current)
        put(store, "c")

        assert [change.key for change in told_until(watch, "c")] == ["c"]


def test_a_lease_outlives_an_outage_that_is_longer_than_it(cluster: EtcdCluster) -> None:
    """etcd counts it anew when it comes back: nobody could have renewed it."""
    (member,) = cluster.members
    with store_of(cluster) as store:
        lease = store.grant_lease(Duration(5 * SECOND))
        store.commit(Transaction(puts=(Put("node", b"", lease),)))
        watch = store.watch("node", Revision(store.read("").revision))
        member.kill()
        # Waits for longer than the lease, and for nothing: the server is dead.
        assert not threading.Event().wait(5.5)
        cluster.heal()

        try:
            store.renew_lease(lease)
        except LeaseLost:
            pytest.fail("the lease ended while nobody could renew it")
        assert len(store.read("node").entries) == 1
        watch.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A server that asks for users; tokens live for a second."""
    with etcd_cluster(
        tmp_path_factory.mktemp("guarded"), extra=("--auth-token-ttl", "1")
    ) as cluster:
        (member,) = cluster.members
        _post(member, "/v3/auth/user/add", {"name": "root", "password": "secret"})
        _post(member, "/v3/auth/role/add", {"name": "root"})
        _post(member, "/v3/auth/user/grant", {"user": "root", "role": "root"})
        _post(member, "/v3/auth/user/add", {"name": "reader", "password": "plain"})
        _post(member, "/v3/auth/role/add", {"name": "reader"})
        permission = {
            "permType": "READ",
            "key": b64encode(b"public/").decode(),
            "range_end": b64encode(b"public0").decode(),
        }
        _post(member, "/v3/auth/role/grant", {"name": "reader", "perm": permission})
        _post(member, "/v3/auth/user/grant", {"user": "reader", "role": "reader"})
        _post(member, "/v3/auth/enable", {})
        yield cluster


def test_user_and_password_let_in_also_after_the_token_has_expired(guarded: EtcdCluster) -> None:
    with store_of(guarded, user="root", password="secret") as store:
        watch = store.watch("", put(store, "a"))
        put(store, "b")
        told_until(watch, "b")
        store._members._token = "no.1"  # as good as one that has expired

        put(store, "c")
        told_until(watch, "c")
        store._members._token = "no.1"
        with closing(store.watch("", Revision(1))) as fresh:
            told_until(fresh, "c")


def test_a_token_that_has_really_expired_is_renewed(guarded: EtcdCluster) -> None:
    with store_of(guarded, user="root", password="secret") as store:
        put(store, "expired/a")
        # Nothing uses the token meanwhile, which would prolong it.
        assert not threading.Event().wait(2.5)

        put(store, "expired/b")

        assert len(store.read("expired/").entries) == 2


@pytest.mark.parametrize("user", [{"user": "root", "password": "wrong"}, {"user": "nobody"}])
def test_a_wrong_password_is_refused_at_once(guarded: EtcdCluster, user: dict[str, str]) -> None:
    with store_of(guarded, **user) as store:
        with pytest.raises(StoreRefused, match=f"refuses user '{user['user']}'"):
            store.read("")
        with (
            closing(store.watch("", Revision(0))) as watch,
            pytest.raises(StoreRefused, match="authentication failed"),
        ):
            watch.next(PATIENCE)


def test_a_server_that_asks_for_a_user_says_so(guarded: EtcdCluster) -> None:
    with store_of(guarded) as store, pytest.raises(StoreRefused, match="asks for a user"):
        store.read("")
    with store_of(guarded) as store, pytest.raises(StoreRefused, match="asks for a user"):
        store.follow("")


def test_what_a_user_may_not_do_is_refused(guarded: EtcdCluster) -> None:
    with store_of(guarded, user="reader", password="plain") as store:
        assert store.read("public/").entries == ()
        with pytest.raises(StoreRefused, match="permission denied"):
            put(store, "public/a")
        with pytest.raises(StoreRefused, match="permission denied"):
            store.read("private/")
        with (
            closing(store.watch("private/", Revision(0))) as watch,
            pytest.raises(StoreRefused, match="does not let user 'reader' watch 'private/'"),
        ):
            watch.next(PATIENCE)


def test_a_user_where_etcd_asks_for_none_does_no_harm(cluster: EtcdCluster) -> None:
    with store_of(cluster, user="root", password="secret") as store:
        put(store, "a")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's and a client's certificate by it, and another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("ca", "other-ca"):
        _openssl(
            folder,
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN={authority}"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", f"{authority}.key", "-out", f"{authority}.pem"),
        )
    # Python 3.13 and later demand what RFC 5280 does: an authority's usage, and whose key signed.
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n"
    )
    for name in ("server", "client"):
        _openssl(
            folder,
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        _openssl(
            folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
    return folder


@pytest.fixture(scope="module")
def encrypted(
    tmp_path_factory: pytest.TempPathFactory, certificates: Path
) -> Iterator[EtcdCluster]:
    """A server that speaks TLS, and wants a certificate of its clients."""
    arguments = [
        *("--cert-file", str(certificates / "server.pem")),
        *("--key-file", str(certificates / "server.key")),
        *("--trusted-ca-file", str(certificates / "ca.pem"), "--client-cert-auth"),
    ]
    with etcd_cluster(tmp_path_factory.mktemp("tls"), tls_arguments=arguments) as cluster:
        yield cluster


def test_tls_with_certificates_on_both_sides(encrypted: EtcdCluster, certificates: Path) -> None:
    trusted = {name: str(certificates / f"{name}.pem") for name in ("ca", "client", "other-ca")}
    client = {"cert": trusted["client"], "key": str(certificates / "client.key")}

    with store_of(encrypted, cacert=trusted["ca"], **client) as store:
        watch = store.watch("", put(store, "a"))
        put(store, "b", b"x" * 1_000_000)
        told_until(watch, "b")
    with (
        store_of(encrypted, cacert=trusted["other-ca"], **client) as store,
        pytest.raises(StoreRefused, match=r"certificate of 127\.0\.0\.1:.* is not good"),
    ):
        store.read("")
    # As the etcd of a run's own is asked, whose members and clients have one certificate.
    with (
        store_of(encrypted, cacert=trusted["client"], **client) as store,
        pytest.raises(
            StoreRefused, match="not an etcd of this or another run: the certificate that"
        ),
    ):
        store.read("")
    with store_of(encrypted, cacert=trusted["ca"]) as store:
        with pytest.raises(StoreRefused, match="refuses TLS") as refused:
            store.read("")
        assert "cert and key" in str(refused.value)
    with store_of(encrypted, SHORT) as store, pytest.raises(StoreUnavailable) as unavailable:
        store.read("")
    assert "accepts TLS only, give protocol=https" in str(unavailable.value)


def test_a_watch_over_tls_is_woken_by_closing(encrypted: EtcdCluster, certificates: Path) -> None:
    config = {
        "cacert": str(certificates / "ca.pem"),
        "cert": str(certificates / "client.pem"),
        "key": str(certificates / "client.key"),
    }
    store = store_of(encrypted, **config)
    watch = store.watch("", store.read("").revision)
    watch.next(Duration(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(watch.next, Duration(10 * PATIENCE))
        store.close()

        assert waiting.result(PATIENCE / SECOND) == ()


def test_tls_to_a_server_that_speaks_none_ends_with_a_hint(cluster: EtcdCluster) -> None:
    store = store_of(cluster, Duration(2 * SECOND), use_tls=True)
    with store, pytest.raises(StoreUnavailable) as error:
        store.read("")

    assert "it hangs up" in str(error.value)
    assert "leave out protocol=https" in str(error.value)


def test_tls_to_another_kind_of_server_ends_with_a_hint() -> None:
    class Plain(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            self.rfile.read()

    with ThreadingTCPServer(("127.0.0.1", 0), Plain) as server:
        threading.Thread(target=server.serve_forever).start()
        port = server.socket.getsockname()[1]
        config = EtcdConfig(endpoints=(("127.0.0.1", port),), use_tls=True)
        try:
            with (
                pytest.raises(StoreRefused, match="refuses TLS") as refused,
                EtcdStore(config) as store,
            ):
                store.read("")
        finally:
            server.shutdown()

    assert "leave out protocol=https" in str(refused.value)


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def _post(member: EtcdMember, path: str, body: dict[str, Any]) -> Any:
    host, port = member.endpoint
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE / SECOND)
    with closing(connection):
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return json.loads(answer)


def test_a_cluster_whose_quota_is_spent_is_named_with_what_to_do(tmp_path: Path) -> None:
    def fill(member: EtcdMember) -> None:
        value = b64encode(bytes(20_000)).decode()
        for number in range(200):
            key = b64encode(f"fill/{number}".encode()).decode()
            _post(member, "/v3/kv/put", {"key": key, "value": value})

    quota = ("--quota-backend-bytes", "1000000")
    with etcd_cluster(tmp_path, extra=quota) as cluster:
        (member,) = cluster.members
        with pytest.raises(AssertionError, match="database space exceeded"):
            fill(member)
        with store_of(cluster, Duration(2 * SECOND)) as store:
            with pytest.raises(StoreUnavailable, match="database space exceeded"):
                store.commit(Transaction(puts=(Put("a", b""),)))
            with pytest.raises(StoreUnavailable, match="database space exceeded") as raised:
                store.grant_lease(PATIENCE)

    assert "alarm disarm" in (raised.value.hint or "")
