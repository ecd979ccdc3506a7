"""What makes processes for a gang: a guardian, and beneath it perhaps a fork server.

A `Hosting` may serve one gang after another, which is how a fork server stays warm: its imports are
paid for once. It serves one gang at a time, since a sweep leaves no process alive.

- The guardian dies: whatever carries its mark is killed, then the gang is told.
- The fork server dies: the guardian says so and is asked to kill what is left, then the gang is
  told. Its socket may end earlier; that alone says nothing, not even whether it still lives.
- The fork server is stopped and makes no workers: it is taken for dead. So is a guardian.
- The fork server dies of imports that rankwise has guessed: another one is started, which imports
  nothing. A server reads no order before it is ready, and its end of the socket is kept here until
  then, so the second finds all orders that the first was given.
- An automatic fork server finds that its forks would differ from interpreters: the same, and the
  other one forks nothing but starts an interpreter for each order.
"""

import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from rankwise.base.errors import LocalProtocolError, SpawnFailed
from rankwise.base.failure import ExitStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.drivers.real.hosting.connection import (
    GUARDIAN_PATIENCE,
    MARK_VARIABLE,
    Connection,
    GuardianConnection,
    HostingListener,
    kill_marked,
)
from rankwise.drivers.real.hosting.wire import program_arguments
from rankwise.drivers.real.reactor import Reactor

_SERVER_FD = "RANKWISE_SERVER_FD"
"""The variable that tells the fork server its end of the socket."""
SERVER_NUMBER = 0
"""The fork server's own number at its guardian; workers count from 1."""
SIGKILL = 9
_CODES_OF_OTHERS = (-1, -2, -SIGKILL, -15)
"""Exit codes that say nothing about imports: others have killed the fork server."""
LOSS_TOKEN = 0
"""The sweep after the loss of the fork server; the tokens of gangs are other numbers."""
LOSS_PATIENCE = Duration(1 * SECOND)
"""How long the workers of a guardian that has died may take to die."""
ANSWER_PATIENCE = Duration(6 * SECOND)
"""How long a fork server that has made its imports may take to carry out orders that are no longer
wanted, before it is replaced."""


class Hosting:
    """A guardian, with or without a fork server.

    Args:
        mark: what finds stray processes of this hosting in the environments of all.
        preload: modules for a fork server to import; None makes no fork server.
        is_guess: whether rankwise chose these modules itself, so that nothing may fail of them.
        watched: of an automatic fork server, the variables that its imports must not read: those
            that workers have and it has not. Its orders name a command line and a program.
        environment: the fork server's, which its workers' imports have seen.
        python: the fork server's interpreter.
    """

    def __init__(
        self,
        mark: str,
        *,
        preload: Sequence[str] | None = None,
        is_guess: bool = False,
        watched: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str = "",
    ) -> None:
        self._program = (python or sys.executable, *program_arguments("forkserver", _SERVER_FD))
        # Its forks keep what /proc shows of this environment, whatever theirs is later.
        self._environment = {**(os.environ if environment is None else environment)}
        self._environment[MARK_VARIABLE] = mark
        self._preload = tuple(preload or ())
        self._is_automatic = bool(watched)
        mode = f"--automatic={','.join(watched)}" if watched else "--guessed" if is_guess else ""
        self._modules = (mode, *self._preload) if mode else self._preload
        self._is_guess = is_guess
        self.on_unfit: Callable[[str, bool], None] = lambda _, _is_lasting: None
        """Is told why ranks are not forked by an automatic fork server, and whether the next run
        would find the same."""
        self._is_abandoned = False
        self._reactor: Reactor | None = None
        self._spare_end: socket.socket | None = None
        self.server_number = SERVER_NUMBER
        """The present fork server's; those that take its place count downwards."""
        with ExitStack() as stack:
            self.guardian: GuardianConnection = stack.enter_context(GuardianConnection(mark))
            self.server: Connection | None = None
            if preload is not None:
                ours, theirs = socket.socketpair()
                self.server = Connection("fork server", ours)
                stack.callback(self.server.close)
                self._spare_end = theirs
                stack.callback(self._close_spare_end)
                self._start_server(*self._modules)
                if not is_guess:
                    self._close_spare_end()
            self._exit = stack.pop_all()
        self._gang: HostingListener | None = None
        self._is_server_ready = False
        self._server_pid = 0
        self._awaited_sweep: int | None = None
        self._loss = ""
        self.guardian.listener = _Listener(self, lambda _: None, self._on_guardian_lost)
        if self.server is not None:
            self.server.listener = _Listener(self, self._on_server_ready, self._ignore_server)
            self.server.on_silent = self.lose_server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def spawner(self) -> Connection:
        """The process that workers are asked of."""
        return self.guardian if self.server is None else self.server

    def attach(self, reactor: Reactor, gang: HostingListener) -> None:
        """Serve a gang: watch the connections and tell `gang`.

        Raises:
            LocalProtocolError: it is serving another gang.
            SpawnFailed: the guardian or the fork server has died since.
        """
        if self._gang is not None:
            raise LocalProtocolError(
                "this fork server is running another gang",
                hint="wait for it, or use a second rankwise.ForkServer",
            )
        loss = self.guardian.loss if self._is_abandoned else self.loss
        if loss:
            raise SpawnFailed(
                f"this fork server cannot be used any more: {loss}",
                hint="make another rankwise.ForkServer",
            )
        self._gang = gang
        self._reactor = reactor
        for connection in self._connections:
            connection.workers = gang
            if not connection.loss:
                connection.watch(reactor)

    def detach(self) -> None:
        """Stop serving the gang, whose workers are all dead, or will be."""
        self._unwatch()
        self._gang = None
        for connection in self._connections:
            connection.workers = None

    def detach_broken(self) -> None:
        """Stop serving a gang that something has broken, and wait until its workers are dead.

        The next gang may be attached at once, and a sweep that comes late would kill its workers.
        """
        self.detach()
        self.abandon_spawns()
        self._awaited_sweep = token = self.guardian.next_number()
        self.guardian.sweep(token)
        self.guardian.wait_until(lambda: self._awaited_sweep != token, GUARDIAN_PATIENCE)

    def note_sweep(self, token: int) -> None:
        """The guardian has swept."""
        if token == self._awaited_sweep:
            self._awaited_sweep = None

    @property
    def gang(self) -> HostingListener | None:
        """The gang that it serves."""
        return self._gang

    @property
    def loss(self) -> str:
        """Why it can make no more processes; empty while it can."""
        return self._loss or self.guardian.loss or (self.server.loss if self.server else "")

    def _ignore_server(self, _reason: str) -> None:
        """How it ended, the guardian will tell; a socket that has ended is always readable."""
        if self.server is not None:
            self.server.unwatch()

    @property
    def importing(self) -> str:
        """The module that the fork server imports, of those that it was told; empty for none."""
        is_importing = self.server is not None and not self._is_server_ready
        return self.server.importing if self.server is not None and is_importing else ""

    @property
    def starting_server(self) -> int | None:
        """The fork server's process until it can make workers, 0 before it exists; else None."""
        is_starting = self.server is not None and not self._is_server_ready
        return self._server_pid if is_starting else None

    def note_server(self, pid: int) -> None:
        """The fork server's process exists."""
        self._server_pid = pid

    def abandon_spawns(self) -> None:
        """See to it that a sweep from now on comes after every worker that was ordered.

        The guardian carries orders out one after another. A fork server does too once it has made
        its imports, and is waited for. One that imports, or does not answer, is killed, and this
        hosting makes no more workers until `replace_server`.
        """
        server = self.server
        if server is None or self.loss:
            return
        server.on_readable()  # it may have been ready for long, without a listener
        if self._is_server_ready:
            server.wait_until(lambda: not server.unanswered, ANSWER_PATIENCE)
        if server.unanswered:
            self._is_abandoned = True
            server.close()
            # The orders lie in the socket with the workers' ends of all pipes: these end with it.
            self._close_spare_end()
            self.guardian.signal(self.server_number, SIGKILL, group=False)

    def replace_server(self) -> None:
        """Start another fork server if the last one was abandoned: workers are wanted again."""
        if not self._is_abandoned or self.guardian.loss:
            return
        assert self.server is not None, "only fork servers are abandoned"
        assert self._reactor is not None, "a gang asks for it"
        ours, self._spare_end = socket.socketpair()
        self._is_abandoned = self._is_server_ready = False
        self.server_number -= 1
        self._server_pid = 0
        self.server.reopen(ours)
        self.server.watch(self._reactor)
        self._start_server(*self._modules)
        if not self._is_guess:
            self._close_spare_end()

    def _on_server_ready(self, details: Mapping[str, Any]) -> None:
        """It has imported what it can: its end of the socket is its own."""
        self._is_server_ready = True
        self._close_spare_end()
        if self.gang is not None:
            self.gang.on_ready(details)

    def _on_guardian_lost(self, reason: str) -> None:
        # The kernel kills the workers; what they have started cannot be looked for without files.
        with suppress(OSError):
            kill_marked(self.guardian.mark, LOSS_PATIENCE)
        self.conclude_loss(reason)

    def on_server_ended(self, code: int) -> None:
        """The fork server has ended: start another if it died of a guess, else tell of the loss."""
        reason = f"the fork server has ended with {ExitStatus(code)}"
        if self.server is not None:
            # The guardian's message can overtake the server's last ones, which say what it imported
            # and whether it was ready and had taken orders.
            self.server.on_readable()
        if self._spare_end is not None and not self.loss:
            if self._is_automatic and self.server is not None:
                module = f" while it imported {self.importing}" if self.importing else ""
                unfit = self.server.unfit
                is_lasting = bool(unfit) or code not in _CODES_OF_OTHERS
                self.on_unfit(unfit or f"failed: {reason}{module}", is_lasting)
            self._preload = ()
            self._modules = ("--exec",) if self._is_automatic else ()
            self._start_server(*self._modules)
            self._close_spare_end()
            return
        if self.importing:
            reason += f" while it imported {self.importing}"
        self.lose_server(reason)

    def lose_server(self, reason: str) -> None:
        """The fork server is gone: have the guardian kill what it has left, then tell the gang."""
        if not self._loss and not self._is_abandoned:
            self._loss = reason
            self.guardian.sweep(LOSS_TOKEN)

    def conclude_loss(self, reason: str) -> None:
        """Nothing is left: tell the gang, once."""
        self._loss = self._loss or reason
        self._unwatch()
        if self._gang is not None:
            self._gang.on_lost(self._loss)

    @property
    def _connections(self) -> tuple[Connection, ...]:
        return (self.guardian,) if self.server is None else (self.guardian, self.server)

    def _unwatch(self) -> None:
        """Stop listening to both."""
        for connection in self._connections:
            connection.unwatch()

    def close(self) -> None:
        """End the fork server and the guardian, and everything beneath them."""
        self._exit.close()

    def _start_server(self, *modules: str) -> None:
        assert self._spare_end is not None, "it is kept until no other server will be started"
        order: dict[str, Any] = {
            "argv": [*self._program, *modules],
            "env": self._environment,
            "cwd": os.getcwd(),
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
            "fds": [_SERVER_FD],
            "keep": True,
        }
        self.guardian.spawn(self.server_number, order, [self._spare_end.fileno()])

    def _close_spare_end(self) -> None:
        if self._spare_end is not None:
            self._spare_end.close()
            self._spare_end = None


class _Listener:
    """Follows the fork server and sweeps; workers are the gang's affair.

    Args:
        hosting: whose gang is told.
        on_ready: is told that the other side has started.
        on_lost: is told that it is gone.
    """

    def __init__(
        self,
        hosting: Hosting,
        on_ready: Callable[[Mapping[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._hosting = hosting
        self.on_ready = on_ready
        self.on_lost = on_lost

    def on_spawned(self, worker: int, pid: int) -> None:
        if worker == self._hosting.server_number:
            self._hosting.note_server(pid)

    def on_refused(self, worker: int, reason: str) -> None:
        if worker == self._hosting.server_number:
            self._hosting.lose_server(f"the fork server cannot be started: {reason}")

    def on_exited(self, worker: int, code: int, at: Instant) -> None:
        del at
        if worker == self._hosting.server_number:
            self._hosting.on_server_ended(code)

    def on_swept(self, token: int, survivors: tuple[int, ...], killed: Mapping[int, str]) -> None:
        self._hosting.note_sweep(token)
        if token == LOSS_TOKEN:
            self._hosting.conclude_loss("the fork server has ended")
        elif self._hosting.gang is not None:
            self._hosting.gang.on_swept(token, survivors, killed)
