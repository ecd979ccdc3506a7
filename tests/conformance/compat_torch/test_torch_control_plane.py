"""`worker_main`: torch's server of workers and ours, asked over the same Unix socket."""

import http.client
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from elastic_sides import RANKWISE, Load, load_from

Ask = Callable[[str, str], tuple[int, str]]


@pytest.fixture
def control_plane(load: Load) -> ModuleType:
    return load("control_plane")


@pytest.fixture
def socket_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path that is short enough for a socket, wherever temporary files are."""
    with tempfile.TemporaryDirectory(prefix="rwt-", dir="/tmp") as folder:
        path = Path(folder, "worker.sock")
        monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", str(path))
        yield path


@pytest.fixture
def ask(socket_path: Path) -> Ask:
    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(str(socket_path))

    def ask(method: str, path: str) -> tuple[int, str]:
        connection = Connection("localhost", timeout=30)
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    return ask


def test_a_worker_answers_while_it_works(control_plane: ModuleType, ask: Ask) -> None:
    with control_plane.worker_main():
        welcome = ask("GET", "/")
        names = ask("GET", "/handler/")
        pong = ask("POST", "/handler/ping")
        unknown = ask("POST", "/handler/nobody")

    assert welcome[0] == names[0] == pong[0] == 200
    assert 'href="/handler/"' in welcome[1]
    assert {"ping", "dump_traceback"} <= set(json.loads(names[1]))
    assert pong[1] == "pong"
    assert unknown[0] == 404
    assert "Handler nobody not found:" in unknown[1]


def test_a_decorated_function_is_served_too(control_plane: ModuleType, ask: Ask) -> None:
    @control_plane.worker_main()
    def main() -> str:
        return ask("POST", "/handler/ping")[1]

    assert main() == "pong"


def test_without_the_variable_nobody_listens(
    control_plane: ModuleType, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_WORKER_SERVER_SOCKET")

    with control_plane.worker_main():
        assert not socket_path.exists()


def test_the_stacks_name_threads_and_lines(ask: Ask, socket_path: Path) -> None:
    control_plane = load_from(RANKWISE, "control_plane")

    with control_plane.worker_main():
        assert socket_path.stat().st_mode & 0o777 == 0o600
        status, stacks = ask("POST", "/handler/dump_traceback")
        missing = ask("GET", "/nowhere")

    assert status == 200
    assert "(MainThread)" in stacks
    assert "test_the_stacks_name_threads_and_lines" in stacks
    assert missing[0] == 404
    assert not socket_path.exists()


def test_what_a_worker_dies_of_is_recorded(
    control_plane: ModuleType, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    @control_plane.worker_main()
    def main() -> float:
        return ask("POST", "/handler/ping")[0] / 0

    with pytest.raises(ZeroDivisionError):
        main()
