"""`rankwise.ForkServer`: a warm fork server for several runs."""

import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Self

from rankwise.drivers.real.hosting.environments import server_environment
from rankwise.drivers.real.hosting.hosting import Hosting
from rankwise.drivers.real.interrupts import gate_here, without_handlers
from rankwise.drivers.real.proc import check_proc
from rankwise.drivers.real.this_process import mark
from rankwise.launch.arguments import modules_to_import
from rankwise.launch.limits import check_working_directory
from rankwise.launch.run.job import Executable, Function, Job, Module, Script, StartMethod
from rankwise.launch.run.search_path import search_path, sources

FUNCTION_MODULES = ("cloudpickle", "rankwise.launch.inside.rank_identity")
"""What nearly every function worker imports: paid for once in the server, not in each worker."""
IMPORTABLE = ("accelerate", "numpy", "pandas", "scipy", "sklearn", "torch", "transformers")
"""Packages for which an automatic fork server pays. Programs with them were tested to behave
equally either way (docs/development/automatic-start.md)."""
_IMPORT = re.compile(
    rb"^(?:import|from)[ \t][^#\n]*?\b(?:%b)\b" % "|".join(IMPORTABLE).encode(), re.MULTILINE
)
"""What a source file has in any case that imports one of them at its beginning."""


class ForkServer:
    """A process that has imported what workers need, and forks them on request.

    Imports are paid for once; after that a gang of 64 starts in some tens of milliseconds.

        with rankwise.ForkServer(preload=["torch"]) as server:
            for learning_rate in (0.1, 0.01):
                rankwise.run(train, args=(learning_rate,), nprocs=4, server=server)

    One gang at a time can use it. It sees the environment, the working directory and `sys.path` of
    the moment when it is made for its imports; workers get those of the moment when they start.

    Args:
        preload: names of modules to import. They must not start threads: a process with threads
            cannot be forked safely, and rankwise refuses to. One that cannot be imported is told
            on stderr when the first gang uses the server; its workers may import it, or fail to.

    Attributes:
        preload: those names.

    Raises:
        ConfigError: `preload` has something else than modules' names.
        SpawnFailed: the process cannot be started.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        check_working_directory()
        check_proc()
        self.preload = modules_to_import(preload)
        hosting: Hosting | None = None
        try:
            with gate_here().used():
                self.hosting = hosting = Hosting(
                    os.urandom(8).hex(),
                    preload=(*FUNCTION_MODULES, *self.preload),
                    environment=server_environment(),
                )
        except BaseException:
            if hosting is not None:  # an interrupt has waited until it was made
                hosting.close()
            raise
        # An interrupt may come before the first instruction of `close`.
        self._forgotten = weakref.finalize(self, _close_forgotten, hosting, mark())
        self._forgotten.atexit = False  # then it ends by itself

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Calling it twice is harmless."""
        with gate_here().used():
            self.hosting.close()
            self._forgotten.detach()


@without_handlers
def _close_forgotten(hosting: Hosting, owner: object) -> None:
    if mark() is owner:
        with gate_here().used():
            hosting.close()


def with_automatic_start(job: Job, environ: Mapping[str, str]) -> tuple[Job, str]:
    """The job with what `auto` means for it, and a line for users who want to know.

    Most scripts import nothing that takes long: these must not pay for a closer look.
    """
    if not job.verbose and not any(map(_IMPORT.search, sources(job.program))):
        return job, ""
    from rankwise.launch.run.automatic_start import decided  # noqa: PLC0415  # rarely so

    return decided(job, environ)


def hosting_for(job: Job) -> Hosting:
    """The guardian for one run, with a fork server if the job wants one.

    Raises:
        SpawnFailed: it cannot be started.
        ConfigError: there is no /proc, which it reads.
    """
    check_proc()
    mark = os.urandom(8).hex()
    if job.is_automatic:
        from rankwise.launch.run.automatic_start import server_settings  # noqa: PLC0415  # only then

        environment, watched = server_settings(job)
        return Hosting(
            mark, preload=job.preload, is_guess=True, watched=watched, environment=environment
        )
    if job.start_method is not StartMethod.FORKSERVER or isinstance(job.program, Executable):
        return Hosting(mark)
    return Hosting(
        mark,
        preload=_modules_to_preload(job),
        is_guess=job.preload is None,
        environment={
            **server_environment(search_path(job.program, os.environ)),
            **job.environment,
        },
        python=job.python or os.environ.get("PYTHON_EXEC", ""),
    )


def _modules_to_preload(job: Job) -> tuple[str, ...]:
    if job.preload is not None:
        return job.preload
    from rankwise.drivers.real.hosting.preload import modules_to_preload  # noqa: PLC0415  # ast

    match job.program:
        case Script(source=bytes(source)):
            return modules_to_preload(("source",), source)
        case Script(path=path):
            return modules_to_preload(("script", path))
        case Module(name=name):
            return modules_to_preload(("module", name))
        case Function(payload=payload):
            return modules_to_preload(("function",), payload)
        case Executable():
            return ()
