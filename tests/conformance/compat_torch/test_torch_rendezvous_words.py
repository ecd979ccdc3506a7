"""Rendezvous parameters, endpoints and registries: torch's and ours through the same scenarios."""

import gc
import threading
import time
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import Load


@pytest.fixture
def api(load: Load) -> ModuleType:
    return load("rendezvous.api")


@pytest.fixture
def utils(load: Load) -> ModuleType:
    return load("rendezvous.utils")


def parameters(api: ModuleType, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "backend": "meadow",
        "endpoint": "host:1",
        "run_id": "r",
        "min_nodes": 1,
        "max_nodes": 2,
    }
    return api.RendezvousParameters(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": ""}, r"^The rendezvous backend name must be a non-empty string.$"),
        (
            {"min_nodes": 0},
            r"^The minimum number of rendezvous nodes \(0\) must be greater than zero.$",
        ),
        (
            {"min_nodes": 3},
            r"^The maximum number of rendezvous nodes \(2\) must be .* equal to .* \(3\).$",
        ),
    ],
)
def test_parameters_that_make_no_sense_are_refused(
    api: ModuleType, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parameters(api, **changes)


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        *((value, True) for value in ("1", "True", "tRue", "T", "t", "yEs", "Y", 1, True)),
        *((value, False) for value in ("0", "False", "f", "no", "N", 0, False)),
        (None, None),
    ],
)
def test_words_for_true_and_false(api: ModuleType, value: Any, meaning: bool | None) -> None:
    assert parameters(api, flag=value).get_as_bool("flag") is meaning


@pytest.mark.parametrize("value", ["01", "Flag", "2", 2, 1.5, "", "yess"])
def test_no_words_for_true_or_false(api: ModuleType, value: Any) -> None:
    with pytest.raises(ValueError, match="'flag' does not represent a valid boolean value"):
        parameters(api, flag=value).get_as_bool("flag")


@pytest.mark.parametrize(("value", "number"), [(0, 0), ("-3", -3), ("  4 ", 4), (None, None)])
def test_whole_numbers(api: ModuleType, value: Any, number: int | None) -> None:
    assert parameters(api, n=value).get_as_int("n") == number


def test_no_whole_number(api: ModuleType) -> None:
    with pytest.raises(ValueError, match="'n' does not represent a valid integer value"):
        parameters(api, n="a").get_as_int("n")


def test_a_registry_knows_each_backend_once(api: ModuleType) -> None:
    registry = api.RendezvousHandlerRegistry()

    def creator(_: Any) -> Any:
        return None

    registry.register("meadow", creator)
    registry.register("meadow", creator)

    with pytest.raises(ValueError, match="cannot be registered with"):
        registry.register("meadow", lambda _: None)
    with pytest.raises(ValueError, match="must be a non-empty string"):
        registry.register("", creator)
    with pytest.raises(ValueError, match=r"'forest' is not registered\. Did you forget"):
        registry.create_handler(parameters(api, backend="forest"))


def test_a_handler_that_belongs_to_another_backend_is_refused(api: ModuleType) -> None:
    class Other:
        def get_backend(self) -> str:
            return "other"

    registry = api.RendezvousHandlerRegistry()
    registry.register("meadow", lambda _: Other())

    with pytest.raises(RuntimeError, match="'other' does not match the requested backend 'meadow'"):
        registry.create_handler(parameters(api))


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        (None, ("localhost", 123)),
        ("", ("localhost", 123)),
        ("  ", ("localhost", 123)),
        ("dummy", ("dummy", 123)),
        ("dummy:0", ("dummy", 0)),
        ("dummy.com:65535", ("dummy.com", 65535)),
        ("1.2.3.4:2", ("1.2.3.4", 2)),
        ("[2001:db8::1]", ("2001:db8::1", 123)),
        ("[2001:db8::1]:8", ("2001:db8::1", 8)),
        ("dummy-1.x.com:90", ("dummy-1.x.com", 90)),
    ],
)
def test_endpoints(utils: ModuleType, endpoint: str | None, place: tuple[str, int]) -> None:
    assert utils.parse_rendezvous_endpoint(endpoint, default_port=123) == place


@pytest.mark.parametrize("endpoint", ["~", "dummy.com :123", "~:123", ":123", "dummy$.com"])
def test_endpoints_without_a_host(utils: ModuleType, endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be a dot-separated list of labels"):
        utils.parse_rendezvous_endpoint(endpoint, default_port=123)


@pytest.mark.parametrize(
    "endpoint", ["dummy:", "dummy:a", "dummy:-1", "dummy:70000", "dummy:123456"]
)
def test_endpoints_without_a_port(utils: ModuleType, endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be an integer between 0 and 65536"):
        utils.parse_rendezvous_endpoint(endpoint, default_port=123)


def test_settings(utils: ModuleType) -> None:
    assert utils._parse_rendezvous_config(" a = 1 ,b=x=y") == {"a": "1", "b": "x=y"}
    assert utils._parse_rendezvous_config("  ") == {}
    with pytest.raises(ValueError, match="must be in format <key1>=<value1>"):
        utils._parse_rendezvous_config("a=1,,b=2")
    with pytest.raises(ValueError, match="option 'a' must have a value specified"):
        utils._parse_rendezvous_config("a=")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_this_machine_is_recognised(utils: ModuleType, host: str) -> None:
    assert utils._matches_machine_hostname(host)


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_another_machine_is_not(utils: ModuleType, host: str) -> None:
    assert not utils._matches_machine_hostname(host)


@pytest.mark.torch
def test_rank_0_tells_where_it_listens(api: ModuleType) -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()

    first = api.RendezvousStoreInfo.build(0, store, local_addr="10.0.0.1", server_port=77)
    second = api.RendezvousStoreInfo.build(1, store, local_addr="10.0.0.2")

    assert (first.master_addr, first.master_port) == ("10.0.0.1", 77)
    assert second == first


def test_a_wait_lasts_as_long_as_it_is_told(utils: ModuleType) -> None:
    began_at = time.monotonic()

    utils._delay(seconds=(0.05, 0.06))
    utils._delay(0.001)

    assert time.monotonic() - began_at >= 0.05


def test_a_periodic_timer_calls_until_it_is_cancelled(utils: ModuleType) -> None:
    called = threading.Event()
    given: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs))
        called.set()

    timer = utils._PeriodicTimer(timedelta(milliseconds=5), note, 1, b=2)
    timer.set_name("a timer of this test")
    timer.start()
    assert called.wait(30)
    assert "a timer of this test" in thread_names()
    with pytest.raises(RuntimeError, match=r"^The timer has already started\.$"):
        timer.start()
    with pytest.raises(RuntimeError, match=r"^The timer has already started\.$"):
        timer.set_name("another")
    timer.cancel()
    timer.cancel()

    assert given[0] == ((1,), {"b": 2})
    assert timer.name == "a timer of this test"
    assert "a timer of this test" not in thread_names()


def test_a_periodic_timer_that_nobody_needs_stops(utils: ModuleType) -> None:
    timer = utils._PeriodicTimer(timedelta(hours=1), print)
    timer.set_name("a forgotten timer")
    timer.start()

    del timer
    gc.collect()

    assert "a forgotten timer" not in thread_names()


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
