"""A pod makes its JobSet the owner of the etcd that came with it: what it asks of an API server."""

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from running import run

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.launch.manifests.ownership import ApiServer, OwnedObject, own

pytestmark = pytest.mark.system

UID = "c5a9d1a0-0000-4000-8000-000000000001"
TOKEN = "token-of-the-pod"  # of this test
ETCD = OwnedObject("apps", "v1", "statefulsets", "t-etcd")
SECRET = OwnedObject("", "v1", "secrets", "t-token")
PATHS = {
    ETCD: "/apis/apps/v1/namespaces/research/statefulsets/t-etcd",
    SECRET: "/api/v1/namespaces/research/secrets/t-token",
}


class Cluster:
    """Answers as an API server does, and notes what it was asked."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.patches: dict[str, Any] = {}

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        if headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        if path == self.refused:
            return 403, {"message": f'cannot patch "{path.rpartition("/")[2]}"'}
        if method == "GET":
            assert path == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/research/jobsets/t"
            return 200, {"metadata": {"name": "t", "uid": UID}}
        assert headers["Content-Type"] == "application/merge-patch+json"
        self.patches[path] = json.loads(body)
        return 200, {}


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a service account; the certificate of the server is its own authority."""
    folder = tmp_path_factory.mktemp("account")
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", "2", "-subj", "/CN=cluster"),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
        *("-addext", "keyUsage=critical,keyCertSign,digitalSignature"),
        *("-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt")),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "token").write_text(TOKEN)
    (folder / "namespace").write_text("research\n")
    return folder


@contextmanager
def serving(cluster: Cluster, account: Path) -> Iterator[ApiServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, told = cluster.answer(self.command, self.path, self.headers, body)
            answer = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PATCH = do_GET  # noqa: N815  # the standard library's name

        def log_message(self, *_: object) -> None:
            """Not to stderr."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "ca.crt", account / "ca.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        api = ApiServer("127.0.0.1", server.server_address[1], account)
        try:
            yield api
        finally:
            api.close()
            server.shutdown()
            thread.join()


def test_each_object_gets_the_job_set_as_its_owner(account: Path) -> None:
    cluster = Cluster()

    with serving(cluster, account) as api:
        own(api, "t", [ETCD, SECRET])

    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "t", "uid": UID}
    change = {"metadata": {"ownerReferences": [owner]}}
    assert cluster.patches == dict.fromkeys(PATHS.values(), change)


def test_refusal_names_the_object_and_the_reason(account: Path) -> None:
    with (
        serving(Cluster(refused=PATHS[ETCD]), account) as api,
        pytest.raises(
            RankwiseError, match=r'refuses PATCH .*statefulsets/t-etcd: cannot patch "t-'
        ),
    ):
        own(api, "t", [ETCD])


def test_pod_without_service_account_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(RankwiseError, match="the pod has no service account") as raised:
        ApiServer("127.0.0.1", 1, tmp_path)

    assert raised.value.hint == "leave automountServiceAccountToken on"


def test_objects_are_words_and_back() -> None:
    assert [OwnedObject.parsed(each.text) for each in (ETCD, SECRET)] == [ETCD, SECRET]
    with pytest.raises(ConfigError, match="object is 'statefulsets/x', expected"):
        OwnedObject.parsed("statefulsets/x")


def test_run_goes_on_where_the_server_cannot_be_asked() -> None:
    outside = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}

    done = run("manifest", "own", "t", ETCD.text, environment=outside)

    assert done.code == 0
    assert done.stderr.startswith(
        "rankwise: JobSet t does not own its etcd: the pod has no service"
    )
    assert done.stderr.count("\n") == 1
