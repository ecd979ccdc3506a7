"""Runs a job on a Ray cluster, from the process in which the command was given.

    this process      the placement group, the store in which nodes meet (unless there is another),
                      the console, signals
    one actor each    `node_agent`: an agent in each bundle, on a node of its own (STRICT_SPREAD)

Nothing is polled. One thread waits for the placement group, then one per bundle follows its actor;
they and the signal handlers put what happens into one queue, which the main thread reads.

If one dies:

- an agent: its code is what the run came to on that node;
- an actor or its node: Ray says so. The other agents notice by themselves and go on if they are
  enough; the bundle gets another agent when Ray has a node for it (`actor_placement`);
- this process: Ray ends the actors, and the kernel the agents with them. The store is gone too, so
  for a job that must outlive its driver name an etcd;
- the cluster's head: the same.
"""

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.launch.on_ray.actor_placement import ActorPlacement
from rankwise.launch.on_ray.job import (
    RayJob,
    RayRendezvous,
    agent_environment,
    agent_words,
    token_for_agents,
)
from rankwise.launch.on_ray.node_agent import NodeAgent

CONNECT_PATIENCE_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Placed(NamedTuple):
    """Every bundle has a node."""


class Unplaced(NamedTuple):
    """The cluster has not given the nodes in time."""

    why: str


class SignalCame(NamedTuple):
    """This process has got a signal."""

    number: int


class ActorMessage(NamedTuple):
    """An actor has told something; see `node_agent`."""

    bundle: int
    kind: str
    value: Any


class LostActor(NamedTuple):
    """An actor has died, perhaps with its node."""

    bundle: int
    why: str


Stimulus = Placed | Unplaced | SignalCame | ActorMessage | LostActor


def run_on_ray(job: RayJob, environ: Mapping[str, str]) -> int:
    """Run the job to its end; returns its exit code.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
        RankwiseError: the cluster has not given enough nodes in time.
    """
    with ExitStack() as stack:
        ray = stack.enter_context(_connected(environ))
        stimuli: SimpleQueue[Stimulus] = SimpleQueue()
        stack.enter_context(_signals_put_into(stimuli))
        return _MainThread(ray, job, environ, stimuli, stack).run()


class _MainThread:
    """The main thread's part."""

    def __init__(
        self,
        ray: Any,
        job: RayJob,
        environ: Mapping[str, str],
        stimuli: SimpleQueue[Stimulus],
        stack: ExitStack,
    ) -> None:
        self._ray = ray
        self._job = job
        self._stimuli = stimuli
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._bundle = _bundle(job, nodes)
        fitting = sum(_fits(self._bundle, resources) for resources in nodes)
        self._placement = ActorPlacement(min(job.nodes_max, max(job.nodes_min, fitting)))
        self._actors: dict[int, Any] = {}
        count = len(self._placement.states)
        place = None if count == 1 == job.nodes_max else _rendezvous_place(ray, job, environ, stack)
        self._words = agent_words(job, count, place)
        self._environment = agent_environment(environ, place)

    def run(self) -> int:
        """Turn until the job is over."""
        from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415  # the extra

        count = len(self._placement.states)
        group = placement_group([self._bundle] * count, strategy="STRICT_SPREAD")
        try:
            self._in_thread(lambda: self._wait_placed(group))
            while not self._placement.is_over:
                self._handle(self._stimuli.get(), group)
            self._write_what_is_left()
            return self._placement.code
        finally:
            for actor in self._actors.values():
                self._ray.kill(actor)
            remove_placement_group(group)

    def _handle(self, stimulus: Stimulus, group: Any) -> None:
        match stimulus:
            case Placed():
                for bundle in range(len(self._placement.states)):
                    self._fill(bundle, group)
            case Unplaced(why):
                raise RankwiseError(why, hint="`ray status` shows which resources are free")
            case SignalCame(number):
                for bundle in self._placement.stop(number):
                    self._actors[bundle].signal.remote(number)
            case ActorMessage(bundle, "began", host):
                self._begin(bundle, host)
            case ActorMessage(bundle, "ended", code):
                self._placement.end(bundle, code)
            case ActorMessage(_, stream, data):
                _write(stream, data)
            case LostActor(bundle, why):
                again = self._placement.lose(bundle)
                later = "; another agent starts when Ray has a node for it" if again else ""
                _say(f"node {bundle} is lost: {why}{later}")
                if again:
                    self._fill(bundle, group)

    def _begin(self, bundle: int, host: str) -> None:
        self._placement.begin(bundle)
        if not self._job.is_quiet:
            _say(f"agent {bundle} of {len(self._placement.states)} begins on {host}")
        if self._placement.stop_signal is not None:  # it came while Ray was starting the actor
            self._actors[bundle].signal.remote(self._placement.stop_signal)

    def _fill(self, bundle: int, group: Any) -> None:
        """Start an agent in a bundle, and follow it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415  # the extra

        named = {"CPU": "num_cpus", "GPU": "num_gpus"}
        others = {name: amount for name, amount in self._bundle.items() if name not in named}
        actor_class = self._ray.remote(NodeAgent).options(
            **{named[name]: self._bundle.get(name, 0) for name in named},
            resources=others,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        )
        actor = self._actors[bundle] = actor_class.remote()
        self._in_thread(lambda: self._follow(bundle, actor))

    def _follow(self, bundle: int, actor: Any) -> None:
        """In a thread: put what an actor tells into the queue."""
        stream = actor.run.options(num_returns="streaming").remote(
            self._words, self._environment, os.getcwd()
        )
        try:
            for item in stream:
                kind, value = self._ray.get(item)
                self._stimuli.put(ActorMessage(bundle, kind, value))
        except self._ray.exceptions.RayError as error:
            self._stimuli.put(LostActor(bundle, _reason(error)))

    def _wait_placed(self, group: Any) -> None:
        """In a thread: wait until every bundle has a node."""
        if group.wait(timeout_seconds=self._job.patience / SECOND):
            self._stimuli.put(Placed())
            return
        wanted = ", ".join(f"{name}: {amount:g}" for name, amount in self._bundle.items())
        why = (
            f"Ray has not found {len(self._placement.states)} nodes with {wanted} each within "
            f"{self._job.patience / SECOND:g} s"
        )
        self._stimuli.put(Unplaced(why))

    def _write_what_is_left(self) -> None:
        """What came after the last agent's end, from another's stream."""
        while True:
            try:
                stimulus = self._stimuli.get_nowait()
            except Empty:
                return
            if isinstance(stimulus, ActorMessage) and stimulus.kind in ("stdout", "stderr"):
                _write(stimulus.kind, stimulus.value)

    @staticmethod
    def _in_thread(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="rankwise-ray", daemon=True).start()


@contextmanager
def _connected(environ: Mapping[str, str]) -> Iterator[Any]:
    """The package `ray`, with a connection to a cluster that runs already."""
    address = environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}, a client's, and the nodes must reach this process",
            hint="run it on a node of the cluster, or with `ray job submit`",
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray  # noqa: PLC0415  # the extra
    except ImportError as error:
        raise ConfigError(
            f"--on ray needs the package ray, which cannot be imported here: {error}",
            hint="pip install 'rankwise[ray]'",
        ) from error
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="CRITICAL")
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"--on ray finds no cluster at {address!r}: {said[0].partition('. ')[0]}",
            hint="start one with `ray start --head`, or name one in RAY_ADDRESS",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try again for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # `auto`, or something that Ray will complain about
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_PATIENCE_S).close()
    except OSError as error:
        raise ConfigError(
            f"--on ray finds no cluster at {address!r}: {error.strerror or error}",
            hint="start one with `ray start --head`, or name one in RAY_ADDRESS",
        ) from error


@contextmanager
def _signals_put_into(stimuli: SimpleQueue[Stimulus]) -> Iterator[None]:
    """Signals as stimuli; ray.init has set handlers of its own."""

    def on_signal(number: int, _frame: object) -> None:
        stimuli.put(SignalCame(number))

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rendezvous_place(
    ray: Any, job: RayJob, environ: Mapping[str, str], stack: ExitStack
) -> RayRendezvous:
    """Where the agents meet: as the user says, or in a store in this process."""
    if job.endpoint is not None:
        assert job.backend is not None, "an endpoint comes with its backend"
        return RayRendezvous(
            backend=job.backend,
            endpoint=job.endpoint,
            settings=job.settings,
            token=token_for_agents(environ),
        )
    from rankwise.drivers.real.stores.embedded import EmbeddedConfig, open_embedded  # noqa: PLC0415  # only for several nodes

    address = ray.util.get_node_ip_address()
    token = secrets.token_hex(16)
    config = EmbeddedConfig(
        host=address, port=0, token=token.encode(), is_host=True, linger=Duration(SECOND)
    )
    store = open_embedded(config, SystemClock())
    stack.callback(store.close)
    assert store.server is not None, "this process was told to serve"
    _, port = store.server.address
    host = f"[{address}]" if ":" in address else address
    settings = ",".join(filter(str.strip, (job.settings, "is_host=false")))
    return RayRendezvous(
        backend="embedded", endpoint=f"{host}:{port}", settings=settings, token=token
    )


def _bundle(job: RayJob, nodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What each agent takes of its node."""
    bundle = {name: amount for name, amount in job.resources.items() if amount is not None}
    if "GPU" in job.resources and "GPU" not in bundle:
        # All of a node's, and of the smallest one's where they differ.
        counts = [resources["GPU"] for resources in nodes if resources.get("GPU")]
        if counts:
            bundle["GPU"] = min(counts)
    return bundle


def _fits(bundle: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())


def _reason(error: Exception) -> str:
    """The first line of Ray's many that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _say(text: str) -> None:
    _write("stderr", f"rankwise: {text}\n".encode())


def _write(stream: str, data: bytes) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    try:
        out.buffer.write(data)
        out.flush()
    except OSError:  # the reader has gone; the job goes on and its code is returned
        pass
