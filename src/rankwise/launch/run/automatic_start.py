"""`--start-method auto`: whether ranks are forked from a process that has made their imports.

A script that begins with `import torch` starts in a fraction of the time and memory if one process
imports torch for all ranks. Here it is decided before anything is started, from the source alone;
the fork server then watches its imports (`drivers/real/hosting/import_watch.py`) and may refuse.
Either way the ranks get interpreters of their own, as with `--start-method subprocess`. The reason
of a refusal is remembered, so that only the first run of a script pays for imports in vain.

The imports for the ranks are the beginning of the script's own imports: modules of packages in
`fork_server.IMPORTABLE`, up to the first statement that does something else, and up to the first
import of another package, which might prepare something for the next one.

**The memory** is a folder of small files, one for each interpreter, set of packages and script, in
the user's cache. Each is written under another name and renamed, so two runs at once do no harm. A
folder that cannot be read or written remembers nothing. docs/adr/0074 has the whole decision.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from msgspec.structs import replace

from rankwise.drivers.real.hosting.environments import inherited_environment
from rankwise.drivers.real.hosting.preload import leading_imports
from rankwise.launch.fork_server import IMPORTABLE
from rankwise.launch.run.environment import VARIABLES_OF_RANKS
from rankwise.launch.run.job import Job
from rankwise.launch.run.search_path import search_path, sources

_COMPANIONS = frozenset({"einops", "packaging", "safetensors", "tqdm", "yaml"})
"""The same, but importing them takes no time: they may come before, and alone need no server."""
_WATCHED = tuple(
    sorted(
        {*VARIABLES_OF_RANKS, "RANKWISE_LOCAL_RANK", "RANKWISE_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    )
)
"""What a rank finds in its environment and the fork server does not."""
_SETTINGS_OF_INTERPRETERS = (
    "COVERAGE_PROCESS_CONFIG",
    "COVERAGE_PROCESS_START",
    "CUDA_INJECTION64_PATH",
    "PYTHONDUMPREFS",
    "PYTHONFAULTHANDLER",
    "PYTHONINSPECT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)
"""Variables that have an effect on each interpreter when it starts, or on all that it imports."""
_FOLDER = os.path.join("rankwise", "starts")
_REASONS_MAX = 256
_REASON_BYTES_MAX = 1000
_DAYS = 30
"""How long a reason is believed: what the imports depend on may have changed elsewhere."""


def decided(job: Job, environ: Mapping[str, str]) -> tuple[Job, str]:
    """The job with the modules that a fork server imports for it, and what to tell users of it.

    It has none if the ranks get interpreters of their own.
    """
    reason = _reason_of_job(job, environ)
    modules: tuple[str, ...] = ()
    if not reason:
        modules, reason = _modules_of(job)
    if modules:
        key = _key(job, modules)
        reason = recalled(key, environ)
    if modules and not reason:
        return (
            replace(job, preload=modules),
            f"ranks are forked from a process that has imported {', '.join(modules)}",
        )
    return job, interpreters_line(reason)


def interpreters_line(reason: str) -> str:
    """What users are told if there is no fork server."""
    return f"each rank starts an interpreter of its own: {reason}"


def server_settings(job: Job) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of a job's automatic fork server, and the variables it must not read.

    Modules that are not watched are there as the ranks have them.
    """
    environment = {**inherited_environment(), **job.environment}
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    for name in _WATCHED:
        environment.pop(name, None)
    environment["RANKWISE_SYS_PATH"] = os.pathsep.join(search_path(job.program, os.environ))
    return environment, _WATCHED


def remember(job: Job, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Keep the reason why the job's ranks could not be forked, for the next run."""
    folder = _memory(environ)
    if folder is None or job.preload is None:
        return
    path = os.path.join(folder, _key(job, job.preload))
    temporary = f"{path}.{os.getpid()}"
    with suppress(OSError):
        os.makedirs(folder, 0o700, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(reason.encode("utf-8", "replace")[:_REASON_BYTES_MAX])
            os.replace(temporary, path)
        except OSError:  # a full disk
            os.unlink(temporary)
            raise
        _forget_oldest(folder)


def recalled(key: str, environ: Mapping[str, str] = os.environ) -> str:
    """The reason that an earlier run has found; empty if there is none."""
    folder = _memory(environ)
    if folder is None:
        return ""
    with suppress(OSError), open(os.path.join(folder, key), "rb") as file:
        age_s = time.time() - os.fstat(file.fileno()).st_mtime
        if age_s < _DAYS * 24 * 3600:
            return file.read(_REASON_BYTES_MAX).decode("utf-8", "replace")
    return ""


def _reason_of_job(job: Job, environ: Mapping[str, str]) -> str:
    if job.gang.size == 1:
        return "there is one rank"
    if job.cpus_by_rank is not None:
        return "each is bound to CPUs of its own"
    if job.virtual_local_rank:
        return "--virtual-local-rank gives each a CUDA_VISIBLE_DEVICES of its own"
    if job.environment_by_rank:
        return "they have variables of their own"
    if job.python:
        return "PYTHON_EXEC names another Python"
    return "".join(f"{name} is set" for name in _SETTINGS_OF_INTERPRETERS if environ.get(name))


def _modules_of(job: Job) -> tuple[tuple[str, ...], str]:
    """The modules to import for the ranks; if there are none, why."""
    path = search_path(job.program, os.environ)
    modules: list[str] = []
    obstacle = ""
    for source in sources(job.program):
        found, obstacle = leading_imports(source, path, _COMPANIONS.union(IMPORTABLE))
        modules += found
        if obstacle:
            break
    if not any(module.partition(".")[0] in IMPORTABLE for module in modules):
        return (), f"{obstacle or 'it ends'}, before an import of torch, numpy and the like"
    return tuple(dict.fromkeys(modules)), ""


def _key(job: Job, modules: tuple[str, ...]) -> str:
    """The name under which a reason is remembered: interpreter, packages, script."""
    from hashlib import blake2b  # noqa: PLC0415  # only where a fork server is likely

    from rankwise import __version__  # noqa: PLC0415  # the same

    digest = blake2b(digest_size=16)
    places = [sys.executable, sys.version, __version__, *modules]
    for top in sorted({module.partition(".")[0] for module in modules}):
        places += _stamps(top)
    for place in places:
        digest.update(place.encode("utf-8", "replace") + b"\0")
    for source in sources(job.program):
        digest.update(source + b"\0")
    return digest.hexdigest()


def _stamps(package: str) -> Iterator[str]:
    """What another version of an installed package has otherwise."""
    for folder in sys.path:
        path = os.path.join(folder, package, "__init__.py")
        with suppress(OSError):
            status = os.stat(path)
            yield f"{path} {status.st_size} {status.st_mtime_ns}"
            return


def _memory(environ: Mapping[str, str]) -> str | None:
    """The folder of reasons; None where the user has no place for a cache."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return os.path.join(cache, _FOLDER)
    home = environ.get("HOME", "")
    return os.path.join(home, ".cache", _FOLDER) if os.path.isabs(home) else None


def _forget_oldest(folder: str) -> None:
    """Let the folder not grow for ever."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.stat().st_mtime_ns)
    for entry in entries[:-_REASONS_MAX]:
        with suppress(OSError):  # another run has forgotten it
            os.unlink(entry.path)
