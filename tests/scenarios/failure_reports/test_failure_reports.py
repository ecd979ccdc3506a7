"""Transcripts: what users see of each kind of failure, word by word."""

import datetime as dt
import re
from pathlib import Path
from typing import Any

import pytest

from rankwise.base.failure import (
    ErrorRecord,
    ExitStatus,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
)
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.launch.telling.failure_report.composing import compose_report
from rankwise.launch.telling.failure_report.model import ReportContext
from rankwise.launch.telling.failure_report.rendering import TerminalStyle, boxed_text, plain_text

START_WALL_NS = 1_795_228_455_926_535_897
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ada/train.py", line 31, in <module>
    main()
  File "/home/ada/train.py", line 27, in main
    loss = step(batch)
           ^^^^^^^^^^^
  File "/home/ada/model/very_long_directory_name/rotary_embedding.py", line 118, in step
    raise ValueError("bad shape")
ValueError: bad shape
"""
BOOTED = """\
Traceback (most recent call last):
  File "/venv/site-packages/rankwise/drivers/real/worker/boot.py", line 12, in <module>
    run_script(path)
  File "<frozen runpy>", line 291, in run_path
  File "<frozen runpy>", line 88, in _run_code
"""
STACKS = """\
Fatal Python error: Segmentation fault

Thread 0x00007f2b3c5fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/ada/loader.py", line 44 in fetch

Current thread 0x00007f2b4f0b1740 (most recent call first):
  File "/home/ada/kernels.py", line 9 in scale
  File "/home/ada/train.py", line 27 in main
  File "/home/ada/train.py", line 31 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 291 in run_path
  File "/venv/site-packages/rankwise/drivers/real/worker/boot.py", line 12 in <module>

Extension modules: numpy.core._multiarray_umath, numpy.linalg (total: 2)
"""
CONTEXT = ReportContext(
    program="train.py",
    nprocs=4,
    run_id="calm-otter",
    duration=Duration(3200 * MILLISECOND),
    timezone=dt.timezone(dt.timedelta(hours=1)),
)


def hang_stack(function: str, line: int) -> str:
    return f"""\
Thread 0x00007f2b3c5fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f2b4f0b1740 (most recent call first):
  File "/venv/rankwise/collectives/waiting.py", line 52 in wait_for
  File "/home/ada/train.py", line {line} in {function}
  File "/home/ada/train.py", line 31 in <module>
  File "/venv/rankwise/drivers/real/worker/boot.py", line 12 in <module>
"""


def error(type_name: str, message: str, traceback: str = TRACEBACK) -> ErrorRecord:
    return ErrorRecord(
        type=type_name,
        message=message,
        traceback=traceback,
        raised_at=Instant(0),
        wall_ns=START_WALL_NS,
    )


def failure(rank: int, cause: FailureCause, code: int | None = 1, **more: Any) -> Failure:
    after = more.pop("after_ms", 0) * MILLISECOND
    return Failure(
        **{
            "local_rank": rank,
            "rank": rank,
            "attempt": 0,
            "cause": cause,
            "at": Instant(10 * SECOND + after),
            "exit": None if code is None else ExitStatus(code),
            "pid": 71200 + rank,
            "host": "gpu-07",
            "role": "default",
            "wall_ns": START_WALL_NS + after,
            **more,
        }
    )


def raised(rank: int, **more: Any) -> Failure:
    return failure(rank, FailureCause.RAISED, **{"error": error("ValueError", "bad shape"), **more})


def told_to_stop(rank: int, code: int = -15) -> Failure:
    detail = "it did not end within 30 s of the request to stop" if code == -9 else ""
    return failure(rank, FailureCause.STOPPED, code, after_ms=40, ended_by_us=True, detail=detail)


def failed(*failures: Failure, attempts: int = 1) -> Outcome:
    return Outcome(status=OutcomeStatus.FAILED, attempts=attempts, failures=failures)


CASES: dict[str, tuple[Outcome, ReportContext]] = {
    "exception with log files and siblings told to stop": (
        failed(
            raised(
                2,
                error_file="/tmp/rankwise/calm-otter/attempt_0/2/error.json",
                log_paths=(
                    "/tmp/rankwise/calm-otter/attempt_0/2/stdout.log",
                    "/tmp/rankwise/calm-otter/attempt_0/2/stderr.log",
                ),
                stderr_tail=("epoch 3: loss 0.31", *TRACEBACK.splitlines()),
            ),
            told_to_stop(0),
            told_to_stop(1),
            told_to_stop(3),
        ),
        CONTEXT,
    ),
    "same exception on several ranks in a later attempt": (
        failed(
            *(
                raised(rank, attempt=2, local_rank=rank - 8, after_ms=rank, role="trainer")
                for rank in (10, 8, 11, 12, 13, 14, 9)
            ),
            failure(
                15,
                FailureCause.RAISED,
                after_ms=131,
                error=error(
                    "RuntimeError",
                    "[../third_party/gloo/pair.cc:553] Connection closed by peer [10.0.0.7]:41022",
                    "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n",
                ),
            ),
            attempts=3,
        ),
        ReportContext(
            program="train.py",
            nprocs=8,
            run_id="calm-otter",
            attempts_max=3,
            timezone=dt.timezone(dt.timedelta(hours=-3, minutes=-30)),
        ),
    ),
    "segmentation fault with the stacks of all threads": (
        failed(
            failure(
                1,
                FailureCause.SIGNALED,
                -11,
                stacks=STACKS,
                stderr_tail=("loading kernels", "warning: unaligned access"),
            ),
            told_to_stop(0),
            told_to_stop(2, -9),
            told_to_stop(3, 0),
        ),
        CONTEXT,
    ),
    "killed by the OOM killer": (
        failed(
            failure(
                3,
                FailureCause.SIGNALED,
                -9,
                out_of_memory=True,
                detail="memory.events of /user.slice/job-41: oom_kill 0 -> 1, limit 2 GiB",
            ),
            told_to_stop(0),
        ),
        CONTEXT,
    ),
    "killed by somebody": (
        failed(
            failure(
                0,
                FailureCause.SIGNALED,
                -9,
                out_of_memory=False,
                detail="memory.events of /user.slice/job-41: oom_kill still 0",
            )
        ),
        CONTEXT,
    ),
    "exit code of a shell script": (
        failed(
            failure(
                0,
                FailureCause.EXITED,
                127,
                stderr_tail=("./start.sh: line 3: pyhton: command not found",),
                log_paths=("/var/log/calm-otter/attempt_0/0/stderr.log",),
            )
        ),
        CONTEXT,
    ),
    "hang with ranks at two places": (
        failed(
            *(
                failure(
                    rank,
                    FailureCause.HUNG,
                    -15,
                    detail="no progress for 60 s",
                    stacks=hang_stack("evaluate", 77) if rank == 2 else hang_stack("train", 31),
                )
                for rank in range(3)
            ),
            failure(3, FailureCause.HUNG, -9, detail="no progress for 60 s"),
        ),
        CONTEXT,
    ),
    "frames of the boot code and words that a terminal would obey": (
        failed(
            raised(
                0,
                error=error(
                    "__main__.Odd",
                    "\x1b]0;owned\x07\x1b[31mred\x1b[0m \x07 bell\nsecond line",
                    BOOTED + TRACEBACK.partition("\n")[2],
                ),
                stderr_tail=(
                    " 10%|#         |\r 50%|#####     |\r100%|##########|",
                    "caf\udce9 \x1b[2Jcleared\x9b31m",
                ),
            )
        ),
        CONTEXT,
    ),
    "address in use": (
        failed(
            raised(
                0,
                error=error(
                    "OSError",
                    "[Errno 98] Address already in use",
                    'Traceback (most recent call last):\n  File "serve.py", line 3, in <module>\n'
                    "    sock.bind(address)\nOSError: [Errno 98] Address already in use\n",
                ),
            )
        ),
        CONTEXT,
    ),
    "many different failures": (
        failed(
            *(
                raised(
                    rank,
                    after_ms=rank * 3,
                    error=error("KeyError", f"'layer{rank}'", f"KeyError: 'layer{rank}'\n"),
                )
                for rank in range(64)
            )
        ),
        ReportContext(program="train.py", nprocs=64, timezone=dt.UTC),
    ),
    "could not be started": (
        failed(
            failure(
                0,
                FailureCause.NOT_STARTED,
                None,
                pid=None,
                detail="cannot execute ./a.out: Permission denied",
            )
        ),
        CONTEXT,
    ),
    "guardian lost": (
        failed(
            *(
                failure(
                    rank,
                    FailureCause.GUARDIAN_LOST,
                    None,
                    detail="the guardian has died",
                )
                for rank in range(4)
            )
        ),
        CONTEXT,
    ),
    "stopped by Ctrl-C": (
        Outcome(
            status=OutcomeStatus.STOPPED,
            attempts=1,
            failures=(told_to_stop(0, -2), told_to_stop(1, -9)),
            stop_signal=2,
            survivors=(71201,),
        ),
        CONTEXT,
    ),
}

LOOKS = {
    "box, 80 columns": TerminalStyle(width=80),
    "box, 40 columns, ASCII": TerminalStyle(width=40, unicode=False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_report_reads_as_its_transcript_says(name: str, *, rewrite: bool) -> None:
    outcome, context = CASES[name]
    report = compose_report(outcome, context)

    parts = {"plain": plain_text(report) + "\n"}
    parts |= {title: boxed_text(report, look) for title, look in LOOKS.items()}
    printed = "\n".join(f"[{title}]\n{text}" for title, text in parts.items())

    transcript = Path(__file__).parent / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.txt"
    if rewrite:
        transcript.write_text(printed, encoding="utf-8")
    assert printed == transcript.read_text(encoding="utf-8")


def test_every_transcript_belongs_to_a_case() -> None:
    transcripts = {path.stem for path in Path(__file__).parent.glob("*.txt")}

    assert transcripts == {re.sub(r"[^a-z0-9]+", "-", name.lower()) for name in CASES}
