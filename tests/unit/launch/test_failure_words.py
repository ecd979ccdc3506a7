"""How signals, exit codes, ranks and failures are said; foreign text made printable; hints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.base.wording import ranks_in_words
from rankwise.launch.telling.failure_report.hints import hint_for
from rankwise.launch.telling.failure_report.sentences import (
    describe_signal,
    exit_in_words,
    one_line,
)
from rankwise.launch.telling.failure_report.text import (
    as_on_terminal,
    first_line,
    printable,
    printable_lines,
    shorten,
    shorten_lines,
)

CHAINED = """\
Traceback (most recent call last):
  File "load.py", line 3, in read
    raise OSError("corrupt record 17\\nmore")
OSError: corrupt record 17
more

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
    raise RuntimeError("cannot load") from error
{}
"""
OUT_OF_PROCESSES = "[Errno 11] Resource temporarily unavailable"


def error(type_name: str, message: str, traceback: str = "") -> ErrorRecord:
    return ErrorRecord(
        type=type_name, message=message, traceback=traceback, raised_at=Instant(0), wall_ns=0
    )


def failure(
    cause: FailureCause,
    code: int | None = None,
    *,
    raised: ErrorRecord | None = None,
    detail: str = "",
    out_of_memory: bool | None = None,
    stderr_tail: tuple[str, ...] = (),
    rank: int = 2,
    pid: int | None = None,
    cpu_seconds_max: int | None = None,
    signal_sender: str = "",
) -> Failure:
    return Failure(
        local_rank=1,
        rank=rank,
        attempt=0,
        cause=cause,
        at=Instant(0),
        exit=None if code is None else ExitStatus(code),
        pid=pid,
        error=raised,
        detail=detail,
        out_of_memory=out_of_memory,
        stderr_tail=stderr_tail,
        cpu_seconds_max=cpu_seconds_max,
        signal_sender=signal_sender,
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (11, "SIGSEGV (segmentation fault)"),
        (9, "SIGKILL"),
        (10, "SIGUSR1"),
        (34, "SIGRTMIN+0"),
        (40, "SIGRTMIN+6"),
        (64, "SIGRTMIN+30"),
        (99, "signal 99"),
    ],
)
def test_signals_are_named_and_explained(number: int, words: str) -> None:
    assert describe_signal(number) == words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (120, "exit code 120 (Python could not flush stdout or stderr at the end)"),
        (126, "exit code 126 (the command was found, but cannot be executed)"),
        (127, "exit code 127 (command not found)"),
        (128, "exit code 128"),
        (134, "exit code 134 (128 + 6: a child process probably died of SIGABRT)"),
        (137, "exit code 137 (128 + 9: a child process probably died of SIGKILL)"),
        (139, "exit code 139 (128 + 11: a child process probably died of SIGSEGV)"),
        (143, "exit code 143 (128 + 15: a child process probably died of SIGTERM)"),
        (255, "exit code 255"),
        (-11, "signal 11: SIGSEGV (segmentation fault)"),
        (-40, "signal 40: SIGRTMIN+6"),
    ],
)
def test_exits_are_put_into_words(code: int, words: str) -> None:
    assert exit_in_words(ExitStatus(code)) == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1, 3], "ranks 0-1, 3"),
        ([6, 5, 4, 3, 0, 3], "ranks 0, 3-6"),
        (range(64), "ranks 0-63"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"),
    ],
)
def test_ranks_are_listed_in_ranges(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            failure(FailureCause.RAISED, 1, raised=error("ValueError", "bad shape")),
            "rank 2 failed (ValueError: bad shape)",
        ),
        (
            failure(
                FailureCause.RAISED,
                1,
                raised=error("RuntimeError", "cannot load", CHAINED.format("RuntimeError: …")),
            ),
            "rank 2 failed (RuntimeError: cannot load (because of OSError: corrupt record 17 ...))",
        ),
        (
            failure(
                FailureCause.RAISED,
                1,
                raised=error("RuntimeError", "it is killed by signal: Killed."),
                out_of_memory=True,
                detail="a limit of 4 GiB",
            ),
            (
                "rank 2 failed (RuntimeError: it is killed by signal: Killed.): the kernel's OOM "
                "killer did it (a limit of 4 GiB)"
            ),
        ),
        (
            failure(FailureCause.RAISED, 1, raised=error("__main__.Odd", " \n")),
            "rank 2 failed (Odd)",
        ),
        (
            failure(FailureCause.RAISED, 1, raised=error("E", "\nfirst\nsecond")),
            "rank 2 failed (E: first ...)",
        ),
        (
            failure(
                FailureCause.RAISED,
                1,
                raised=error(
                    "RuntimeError",
                    "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
                    "[::1]:40593. This is typically caused by a remote worker crashing. GLHF!",
                ),
            ),
            "rank 2 failed (RuntimeError: Connection closed by peer [::1]:40593 ...)",
        ),
        (
            failure(
                FailureCause.RAISED,
                1,
                raised=error("RuntimeError", "[a/b.cc:78] Timed out waiting 5000ms for recv"),
            ),
            "rank 2 failed (RuntimeError: Timed out waiting 5000ms for recv)",
        ),
        (failure(FailureCause.RAISED, 1), "rank 2 failed"),
        (failure(FailureCause.EXITED, 3), "rank 2 exited with code 3"),
        (failure(FailureCause.EXITED, 127), "rank 2 exited with code 127 (command not found)"),
        (failure(FailureCause.EXITED, -15), "rank 2 was killed by SIGTERM (request to terminate)"),
        (failure(FailureCause.EXITED), "rank 2 ended"),
        (
            failure(FailureCause.SIGNALED, -11),
            "rank 2 was killed by SIGSEGV (segmentation fault)",
        ),
        (
            failure(FailureCause.SIGNALED, -9, out_of_memory=True, detail="oom_kill 0 -> 1"),
            "rank 2 was killed by SIGKILL: the kernel's OOM killer did it (oom_kill 0 -> 1)",
        ),
        (
            failure(FailureCause.SIGNALED, -9, out_of_memory=False),
            "rank 2 was killed by SIGKILL, not by the OOM killer: another process sent it",
        ),
        (
            failure(FailureCause.SIGNALED, -9, out_of_memory=False, cpu_seconds_max=60),
            "rank 2 was killed by SIGKILL, perhaps at its limit of 60 s of CPU time",
        ),
        (
            failure(FailureCause.SIGNALED, -9),
            "rank 2 was killed by SIGKILL; whether by the OOM killer is unknown",
        ),
        (
            failure(FailureCause.SIGNALED, -9, signal_sender="a fault (--faults)"),
            "rank 2 was killed by SIGKILL, sent by a fault (--faults)",
        ),
        (failure(FailureCause.SIGNALED), "rank 2 was killed"),
        (
            failure(FailureCause.STOPPED, -15),
            "rank 2 ended after the request to stop (signal 15: SIGTERM (request to terminate))",
        ),
        (failure(FailureCause.STOPPED), "rank 2 ended after the request to stop"),
        (
            failure(FailureCause.HUNG, -9, detail="no progress for 60 s"),
            "the gang hung: no progress for 60 s",
        ),
        (failure(FailureCause.HUNG), "the gang hung: no progress"),
        (
            failure(FailureCause.NOT_STARTED, detail="no such file: ./a"),
            "rank 2 could not be started: no such file: ./a",
        ),
        (
            failure(FailureCause.GUARDIAN_LOST, pid=7),
            "the guardian has died; its ranks ended with it",
        ),
        (
            failure(
                FailureCause.GUARDIAN_LOST,
                detail="the fork server has ended with exit code 3",
            ),
            "the fork server has ended with exit code 3; the rank had not started",
        ),
    ],
)
def test_a_failure_is_told_in_one_line(told: Failure, words: str) -> None:
    assert one_line(told) == words


def test_the_local_rank_stands_in_for_a_rank_that_nobody_has_filled_in() -> None:
    assert one_line(failure(FailureCause.EXITED, 3, rank=-1)) == "rank 1 exited with code 3"


def test_of_an_error_in_a_data_loader_the_headline_has_what_was_raised_there() -> None:
    message = (
        "Caught FileNotFoundError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        '  File "train.py", line 13, in __getitem__\n    open("part-7.bin")\n'
        "FileNotFoundError: [Errno 2] No such file or directory: 'part-7.bin'\n"
    )

    line = one_line(failure(FailureCause.RAISED, raised=error("FileNotFoundError", message)))

    assert "in DataLoader worker process 1." in line
    assert line.endswith("[Errno 2] No such file or directory: 'part-7.bin')")


def test_a_message_of_a_megabyte_still_makes_one_short_line() -> None:
    line = one_line(failure(FailureCause.RAISED, raised=error("ValueError", "x" * 1_000_000)))

    assert line.startswith("rank 2 failed (ValueError: xxx")
    assert "characters left out" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\y", "xy"),
        ("\x1bPq#0\x1b\\picture \x1b(Bset \x1b7saved", "picture set saved"),
        ("\x1b[2", "\\x1b[2"),
        ("\x1b]never ended", "\\x1b]never ended"),
        ("a\tb", "a       b"),
        ("bell\x07 nul\x00 del\x7f csi\x9b", "bell\\x07 nul\\x00 del\\x7f csi\\x9b"),
        ("caf\udce9 \ud800", "caf\\xe9 \\ud800"),
        ("right\u202eleft\u2028", "right\\u202eleft\\u2028"),
        ("ümläut 漢字 \U0001f600", "ümläut 漢字 \U0001f600"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_or_taken_out(line: str, shown: str) -> None:
    assert printable(line) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_no_text_leaves_anything_for_a_terminal_to_obey(text: str) -> None:
    for line in [printable(text), as_on_terminal(text), first_line(text), *printable_lines(text)]:
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line)
        line.encode("utf-8")


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert as_on_terminal(" 10%\r 50%\r100% done\r\n") == "100% done"
    assert as_on_terminal("\r\r ") == ""


def test_lines_are_separated_by_newlines_only_and_the_last_empty_ones_go() -> None:
    assert printable_lines("a\x0bb\x85c\r\n\n  d\n \n") == ["a\\x0bb\\x85c", "", "  d"]


def test_the_middle_of_long_text_is_left_out_and_counted() -> None:
    assert shorten("abcdefgh" * 5, 40) == "abcdefgh" * 5
    assert shorten("a" * 50 + "b" * 50, 8) == "aaaaaa ... (92 characters left out) ... bb"


def test_the_middle_of_many_lines_is_left_out_and_can_be_found() -> None:
    lines = [str(number) for number in range(1_500)]

    assert shorten_lines(lines, 2, 1, "/tmp/error.json") == [
        "0",
        "1",
        "  ... (1,497 lines left out; all of them: /tmp/error.json) ...",
        "1499",
    ]
    assert shorten_lines(lines[:4], 2, 1) == lines[:4]


@pytest.mark.parametrize(
    ("told", "advice"),
    [
        (failure(FailureCause.SIGNALED, -9, out_of_memory=True), "smaller batch"),
        (failure(FailureCause.SIGNALED, -9, out_of_memory=False), "watchdog"),
        (failure(FailureCause.SIGNALED, -9), "dmesg"),
        (failure(FailureCause.SIGNALED, -9, out_of_memory=False, cpu_seconds_max=60), "ulimit -t"),
        (failure(FailureCause.SIGNALED, -9, out_of_memory=True, cpu_seconds_max=60), "smaller"),
        (failure(FailureCause.SIGNALED, -24), "ulimit -t"),
        (failure(FailureCause.SIGNALED, -15), "did not send this SIGTERM"),
        (failure(FailureCause.SIGNALED, -7), "/dev/shm"),
        (failure(FailureCause.SIGNALED, -4), "another CPU"),
        (
            failure(
                FailureCause.RAISED,
                raised=error("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate"),
            ),
            "nvidia-smi",
        ),
        (failure(FailureCause.RAISED, raised=error("MemoryError", "")), "memory is short"),
        (
            failure(
                FailureCause.RAISED, raised=error("OSError", "[Errno 98] Address already in use")
            ),
            "ss -ltnp",
        ),
        (
            failure(
                FailureCause.RAISED, raised=error("OSError", "[Errno 28] No space left on device")
            ),
            "df -h",
        ),
        (
            failure(FailureCause.RAISED, raised=error("OSError", "[Errno 24] Too many open files")),
            "ulimit -n",
        ),
        (
            failure(FailureCause.RAISED, raised=error("RuntimeError", "can't start new thread")),
            "ulimit -u",
        ),
        (
            failure(
                FailureCause.RAISED,
                raised=error("BlockingIOError", OUT_OF_PROCESSES, "line 9, in _execute_child"),
            ),
            "ulimit -u",
        ),
        (failure(FailureCause.NOT_STARTED, detail=f"fork: {OUT_OF_PROCESSES}"), "ulimit -u"),
        (failure(FailureCause.NOT_STARTED, detail=OUT_OF_PROCESSES.partition("] ")[2]), "ulimit"),
        (
            failure(
                FailureCause.EXITED,
                1,
                stderr_tail=("Traceback", "ModuleNotFoundError: No module named 'x'"),
            ),
            "PYTHONPATH",
        ),
        (failure(FailureCause.EXITED, 127), "PATH"),
        (failure(FailureCause.EXITED, 126), "chmod +x"),
        (
            failure(
                FailureCause.RAISED, raised=error("RuntimeError", "Connection closed by peer [::1]")
            ),
            "lost another rank",
        ),
    ],
)
def test_common_causes_come_with_what_to_do_next(told: Failure, advice: str) -> None:
    assert advice in hint_for(told)


@pytest.mark.parametrize(
    ("type_name", "message", "advice"),
    [
        ("OSError", "[Errno 98] Address in use", "ss -ltnp"),  # musl's words, in place of glibc's
        ("OSError", "[Errno 24] No file descriptors available", "ulimit -n"),
        ("OSError", "[Errno 12] Out of memory", "memory is short"),
        ("OSError", "[Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar", "df -h"),
        ("ConnectionRefusedError", "[Errno 111] Verbindungsaufbau abgelehnt", "another rank"),
        ("BrokenPipeError", "[Errno 32] Datenübergabe unterbrochen (broken)", "another rank"),
    ],
)
def test_errors_of_the_system_are_known_in_any_language(
    type_name: str, message: str, advice: str
) -> None:
    assert advice in hint_for(failure(FailureCause.RAISED, raised=error(type_name, message)))


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("AssertionError", "Torch not compiled with CUDA enabled"),
        ("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'"),
        ("RuntimeError", "Found no NVIDIA driver on your system. Please check"),
        ("RuntimeError", "No CUDA GPUs are available"),
        ("RuntimeError", "Distributed package doesn't have NCCL built in"),
    ],
)
def test_a_script_for_cuda_without_a_gpu_is_told_how_to_run(type_name: str, message: str) -> None:
    hint = hint_for(failure(FailureCause.RAISED, raised=error(type_name, message)))

    assert "--on sim --device cuda" in hint


def test_a_process_that_is_refused_is_known_in_any_language() -> None:
    detail = "fork: [Errno 11] Die Ressource ist zur Zeit nicht verfügbar"

    assert "ulimit -u" in hint_for(failure(FailureCause.NOT_STARTED, detail=detail))


@pytest.mark.parametrize(
    "told",
    [
        failure(FailureCause.RAISED, raised=error("ValueError", "bad shape")),
        failure(
            FailureCause.RAISED,
            raised=error("BlockingIOError", OUT_OF_PROCESSES, "line 9, in read_socket"),
        ),
        failure(FailureCause.EXITED, 3),
        failure(FailureCause.SIGNALED, -11),
        failure(FailureCause.SIGNALED, -9, signal_sender="a fault"),
        failure(FailureCause.HUNG, -9),
        failure(FailureCause.STOPPED, -15),
        failure(FailureCause.GUARDIAN_LOST, -9),
    ],
)
def test_where_there_is_nothing_to_say_nothing_is_said(told: Failure) -> None:
    assert hint_for(told) == ""


def test_rank_that_is_out_of_step_since_it_was_stopped_is_said_to_be() -> None:
    detail = "rank 2 has not come to all_reduce #2, in which rank 0 waits"
    told = replace(failure(FailureCause.OUT_OF_STEP, -15, detail=detail), was_stopped=True)

    assert one_line(told) == f"{detail}; rank 2 is stopped by a signal (SIGSTOP) or a debugger"
    assert "kill -CONT" in hint_for(told)
    assert "same collectives" not in hint_for(told)
