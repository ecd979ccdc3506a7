"""Exceptions of the etcd client are python-etcd's, too, where that package is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

PYTHON_ETCD = """
class EtcdException(Exception):
    def __init__(self, message=None, payload=None):
        super().__init__(message)
        self.payload = payload
class EtcdValueError(EtcdException, ValueError): pass
class EtcdCompareFailed(EtcdValueError): pass
class EtcdKeyError(EtcdException): pass
class EtcdKeyNotFound(EtcdKeyError): pass
class EtcdAlreadyExist(EtcdKeyError): pass
"""
"""The exceptions of python-etcd 0.4.5, with what they inherit from."""

CHECK = """
import pickle, etcd
from rankwise.compat.torch.elastic.rendezvous import etcd_client
for name in ("EtcdException", "EtcdKeyNotFound", "EtcdAlreadyExist", "EtcdCompareFailed"):
    try:
        raise getattr(etcd_client, name)(f"says {name}", hint="look")
    except getattr(etcd, name) as error:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error), again
        assert isinstance(error, etcd_client.EtcdException)
        print(again)
"""


@pytest.mark.system
def test_exceptions_are_caught_by_their_names_in_python_etcd(tmp_path: Path) -> None:
    (tmp_path / "etcd.py").write_text(PYTHON_ETCD)

    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.stdout.splitlines() == [
        f"says {name} (look)"
        for name in ("EtcdException", "EtcdKeyNotFound", "EtcdAlreadyExist", "EtcdCompareFailed")
    ], done.stderr


@pytest.mark.system
@pytest.mark.parametrize("broken", ["1 / 0", "import gone_module", "raise AttributeError"])
def test_broken_package_of_that_name_breaks_nothing(broken: str, tmp_path: Path) -> None:
    (tmp_path / "etcd.py").write_text(broken)
    check = "from rankwise.compat.torch.elastic.rendezvous import etcd_client"

    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert (done.returncode, done.stderr) == (0, "")
