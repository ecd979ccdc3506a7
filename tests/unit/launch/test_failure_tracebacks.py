"""Tracebacks and stacks: shortened, freed of boot frames, compared with each other."""

import sys
import traceback

import pytest

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.launch.telling.failure_report.stacks import (
    fatal_lines,
    frames_of_rank,
    innermost_frames,
    read_stacks,
)
from rankwise.launch.telling.failure_report.tracebacks import (
    error_of_thread,
    traceback_lines,
    what_is_the_same,
    without_boot_frames,
    without_traceback,
)

BOOT = "/venv/rankwise/drivers/real/worker/boot.py"
HEADER = "Traceback (most recent call last):"


def raised(rank: int, text: str, message: str = "") -> Failure:
    return Failure(
        local_rank=rank,
        attempt=0,
        cause=FailureCause.RAISED,
        at=Instant(0),
        pid=100 + rank,
        error=ErrorRecord(
            type="E", message=message, traceback=text, raised_at=Instant(0), wall_ns=0
        ),
    )


def traceback_of(code: str) -> str:
    try:
        exec(compile(code, "/home/ada/train.py", "exec"), {})
    except BaseException as error:  # noqa: BLE001  # whatever the code raises is the point
        return "".join(traceback.format_exception(error))
    raise AssertionError("the code was meant to raise")


def test_frames_of_the_boot_code_are_taken_out_with_their_source_lines() -> None:
    lines = [
        HEADER,
        f'  File "{BOOT}", line 3, in <module>',
        "    run(path)",
        "    ^^^^^^^^^",
        '  File "<frozen runpy>", line 88, in _run_code',
        '  File "a.py", line 1, in <module>',
        "    f()",
        "E: x",
    ]

    assert without_boot_frames(lines) == [HEADER, *lines[5:]]


def test_runpy_is_left_alone_where_the_program_itself_uses_it() -> None:
    lines = [HEADER, '  File "<frozen runpy>", line 88, in _run_code', "E: x"]

    assert without_boot_frames(lines) == lines


def test_a_traceback_of_boot_frames_only_is_left_alone() -> None:
    lines = [HEADER, f'  File "{BOOT}", line 3, in <module>', "    run(path)", "E: x"]

    assert without_boot_frames(lines) == lines


def test_a_syntax_error_in_the_program_keeps_the_place_where_it_is() -> None:
    lines = [
        HEADER,
        f'  File "{BOOT}", line 3, in <module>',
        "    run(path)",
        '  File "a.py", line 7',
        "    def f(:",
        "          ^",
        "SyntaxError: invalid syntax",
    ]

    assert without_boot_frames(lines) == [HEADER, *lines[3:]]


def test_every_traceback_of_a_chain_is_freed_of_boot_frames() -> None:
    one = [HEADER, f'  File "{BOOT}", line 3, in f', '  File "a.py", line 1, in g', "E: x"]
    between = ["", "During handling of the above exception, another exception occurred:", ""]

    shown = without_boot_frames([*one, *between, *one])

    assert BOOT not in "".join(shown)
    assert shown.count('  File "a.py", line 1, in g') == 2


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "try:\n 1/0\nexcept ZeroDivisionError as e:\n raise ValueError('y') from e",
            ["ZeroDivisionError: division by zero", "ValueError: y"],
        ),
        (
            "e = ValueError('x')\ne.add_note('a note\\nof two lines')\nraise e",
            ["ValueError: x", "a note", "of two lines"],
        ),
        (
            "raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])",
            ["  | ExceptionGroup: many (2 sub-exceptions)", "    | ValueError: a"],
        ),
        ("eval('1 +')", ["    1 +", "SyntaxError: invalid syntax"]),
        ("raise AssertionError", ["AssertionError"]),
    ],
)
def test_what_python_writes_is_shown_as_python_wrote_it(code: str, expected: list[str]) -> None:
    text = traceback_of(code)

    lines = traceback_lines(text)

    assert lines == text.rstrip("\n").split("\n")
    assert [line for line in lines if line in expected] == expected


def test_a_traceback_of_ten_thousand_lines_loses_its_middle() -> None:
    text = "\n".join([HEADER, *(f'  File "a.py", line {n}, in f' for n in range(9_998)), "E: x"])

    lines = traceback_lines(text, "/tmp/e.json")

    assert len(lines) == 121
    assert lines[0] == HEADER
    assert lines[40] == "  ... (9,880 lines left out; all of them: /tmp/e.json) ..."
    assert lines[-1] == "E: x"


def test_a_real_recursion_error_is_short_enough_to_read() -> None:
    depth = sys.getrecursionlimit()

    lines = traceback_lines(traceback_of("def f(n): g(n)\ndef g(n): f(n)\nf(0)"))

    assert depth > len(lines)
    assert lines[-1].startswith("RecursionError")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("at 0x7f00aa", "at 0x55bb"),
        ("E: rank 3 failed", "E: rank 12 failed"),
        ("[rank0]: local_rank=1", "[rank7]: local_rank=0"),
        ("on cuda:0, pid 100", "on cuda:3, pid 103"),
        ("port 29500", "port 29501"),
    ],
)
def test_what_differs_from_rank_to_rank_without_meaning_does_not_tell_failures_apart(
    one: str, other: str
) -> None:
    assert what_is_the_same(raised(0, one)) == what_is_the_same(raised(1, other))
    assert what_is_the_same(raised(0, "", one)) == what_is_the_same(raised(1, "", other))


@pytest.mark.parametrize(
    ("one", "other"),
    [("E: shape 3", "E: shape 4"), ('File "a", line 3', 'File "a", line 4'), ("a", "b")],
)
def test_other_numbers_do_tell_them_apart(one: str, other: str) -> None:
    assert what_is_the_same(raised(0, one)) != what_is_the_same(raised(1, other))


def test_a_traceback_in_stderr_is_not_shown_twice() -> None:
    text = f'{HEADER}\n  File "a.py", line 1, in f\nE: x\n'
    tail = ["before", *text.splitlines(), "after"]

    assert without_traceback(tail, text) == ["before", "after"]
    assert without_traceback(tail[2:], text) == ["after"]


def test_a_traceback_printed_without_the_boot_frames_is_recognised() -> None:
    reported = f'{HEADER}\n  File "{BOOT}", line 3, in m\n  File "a.py", line 1, in f\nE: x\n'
    printed = [HEADER, '  File "a.py", line 1, in f', "E: x"]

    assert without_traceback(["before", *printed], reported) == ["before"]


def test_a_traceback_to_which_torch_has_put_the_rank_is_recognised() -> None:
    reported = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nE: x\n'
    printed = [f"[rank3]: {line}" for line in reported.splitlines()]

    assert without_traceback(["before", *printed, "after"], reported) == ["before", "after"]


@pytest.mark.parametrize(
    "suggestion", [". Did you mean: 'len'?", ". Did you forget to import 're'?"]
)
@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_of_a_traceback_that_python_has_printed_with_a_suggestion_that_alone_stays(
    suggestion: str, prefix: str
) -> None:
    reported = f"{HEADER}\n  File \"a.py\", line 1, in f\nNameError: name 'lenn' is not defined\n"
    printed = [prefix + line for line in (reported.rstrip() + suggestion).splitlines()]

    assert without_traceback(["before", *printed, "after"], reported) == [
        "before",
        printed[-1],
        "after",
    ]
    assert without_traceback(printed, reported.rstrip() + suggestion + "\n") == []


def test_lines_that_only_look_like_a_part_of_the_traceback_stay() -> None:
    text = f'{HEADER}\n  File "a.py", line 1, in f\nE: x\n'

    assert without_traceback(["hello", "E: x"], text) == ["hello", "E: x"]
    assert without_traceback(["hello"], "") == ["hello"]


STACK = f"""\
Thread 0x00007f01 [loader] (most recent call first):
  File "queue.py", line 171 in get

Current thread 0x00007f02 [python] (most recent call first):
  <no Python frame>
  File "train.py", line 1 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "{BOOT}", line 3 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/lib/libc.so.6", at +0x3c050

Extension modules: numpy (total: 1)
"""


def test_threads_are_read_with_the_titles_of_every_python() -> None:
    stacks = read_stacks("Fatal Python error: Aborted\n\n" + STACK)

    assert stacks.preamble[0] == "Fatal Python error: Aborted"
    assert [len(thread.frames) for thread in stacks.threads] == [1, 2, 1]
    assert stacks.main is stacks.threads[1]


def test_the_frames_of_c_stay_and_the_list_of_modules_goes() -> None:
    lines = fatal_lines("Fatal Python error: Aborted\n\n" + STACK)

    assert '  Binary file "/usr/lib/libc.so.6", at +0x3c050' in lines
    assert not any("Extension modules" in line for line in lines)
    assert not any(BOOT in line for line in lines)


def test_the_thread_that_crashed_comes_first_and_a_thread_of_ours_is_folded() -> None:
    of_ours = f'Thread 0x03 (most recent call first):\n  File "{BOOT}", line 133 in _answer\n\n'

    lines = fatal_lines(f"Fatal Python error: Segmentation fault\n\n{of_ours}{STACK}")

    assert lines == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f02 [python] (most recent call first):",
        "  <no Python frame>",
        '  File "train.py", line 1 in <module>',
        "Current thread's C stack trace (most recent call first):",
        '  Binary file "/usr/lib/libc.so.6", at +0x3c050',
        "Thread 0x00007f01 [loader] (most recent call first):",
        '  File "queue.py", line 171 in get',
        "... (1 thread of rankwise)",
    ]
    assert f'  File "{BOOT}", line 133 in _answer' in fatal_lines(of_ours)  # it has crashed itself


def test_a_stack_of_boot_frames_only_is_left_alone() -> None:
    text = f'Thread 0x01 (most recent call first):\n  File "{BOOT}", line 3 in <module>\n'

    assert innermost_frames(text) == (f'  File "{BOOT}", line 3 in <module>',)


def test_a_deep_stack_shows_where_it_stands_and_how_deep_it_is() -> None:
    frames = "".join(f'  File "a.py", line {n} in f\n' for n in range(20))

    shown = innermost_frames(f"Thread 0x01 (most recent call first):\n{frames}")

    assert shown[0] == '  File "a.py", line 0 in f'
    assert shown[8] == "  ... (12 more frames)"
    assert len(shown) == 9


def test_a_stack_deep_in_an_import_shows_the_line_of_the_program_too() -> None:
    frames = "".join(
        f'  File "<frozen importlib._bootstrap>", line {n} in _load\n'
        f'  File "/x/site-packages/scipy/a.py", line {n} in <module>\n'
        for n in range(20)
    )
    program = '  File "/home/me/train.py", line 7 in <module>'
    outer = '  File "/x/site-packages/runner.py", line 1 in call'

    shown = innermost_frames(f"Thread 0x01 (most recent call first):\n{frames}{program}\n{outer}\n")

    assert not any("importlib" in frame for frame in shown)
    assert shown[8:] == ("  ... (12 more frames)", program, "  ... (1 more frames)")


def test_frames_of_torch_and_rankwise_are_folded_and_the_programs_own_are_not() -> None:
    def frame(path: str) -> str:
        return f'  File "{path}", line 7 in f'

    text = "\n".join(
        (
            "Thread 0x01 (most recent call first):",
            frame("/x/site-packages/torch/distributed/distributed_c10d.py"),
            frame("/x/site-packages/torch/distributed/c10d_logger.py"),
            frame("/x/src/rankwise/collectives/barrier.py"),
            frame("/home/me/torch/loader.py"),
            frame("/x/site-packages/torch/nn/modules/module.py"),
            frame("/home/me/train.py"),
        )
    )

    assert innermost_frames(f"{text}\n") == (
        "  ... (2 frames of torch)",
        "  ... (1 frame of rankwise)",
        frame("/home/me/torch/loader.py"),
        "  ... (1 frame of torch)",
        frame("/home/me/train.py"),
    )


def test_other_threads_are_told_by_their_part_of_the_program_or_in_a_line() -> None:
    title = "Thread 0x0{} (most recent call first):"
    library = ['  File "/usr/lib/python3.11/threading.py", line 327 in wait']
    start = ['  File "/usr/lib/python3.11/threading.py", line 982 in run']
    own = '  File "/home/me/train.py", line {} in {}'
    text = "\n".join(
        [
            *[title.format(3), *library, *start],
            *[title.format(4), *library, *start],
            *[title.format(5), "  <no Python frame>"],
            *[title.format(6), f'  File "{BOOT}", line 131 in _answer', *start],
            *[title.format(2), *library, own.format(7, "load"), *start],
            "Current thread 0x01 (most recent call first):",
            *["  Garbage-collecting", own.format(9, "<module>")],
        ]
    )

    assert frames_of_rank(text) == (
        own.format(9, "<module>"),
        "  another thread:",
        f"  {library[0]}",
        f"  {own.format(7, 'load')}",
        "  ... (2 other threads at threading.py:327, in wait)",
    )


def test_a_rank_at_its_end_has_no_frames() -> None:
    at_end = (
        "Current thread 0x01 (most recent call first):\n  Garbage-collecting\n  <no Python frame>"
    )

    assert innermost_frames(at_end) == frames_of_rank(at_end) == ()


def test_text_that_is_no_stack_has_no_frames() -> None:
    assert innermost_frames("") == ()
    assert innermost_frames("something else\n") == ()
    assert fatal_lines("something else\n") == ["something else"]


DEEP = (
    "Traceback (most recent call last):\n"
    '  File "/home/me/train.py", line 1, in <module>\n'
    "    f(20)\n"
    + '  File "/home/me/train.py", line 2, in f\n    f(n - 1)\n    ^^^^^^^^\n'
    * 20
    + '  File "/v/site-packages/torch/nn/modules/module.py", line 1789, in _call_impl\n'
    "    return forward_call(*args, **kwargs)\n"
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
    '  File "/v/site-packages/torch/nn/modules/linear.py", line 134, in forward\n'
    "    return F.linear(input, self.weight, self.bias)\n"
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied\n"
)


def test_frames_of_torch_in_a_traceback_are_folded_to_a_line() -> None:
    assert traceback_lines(DEEP)[-5:] == [
        '  File "/home/me/train.py", line 2, in f',
        "    f(n - 1)",
        "    ^^^^^^^^",
        "  ... (2 frames of torch)",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ]


def test_traceback_of_nothing_but_torch_keeps_its_frames() -> None:
    text = DEEP.splitlines()
    only = [text[0], *text[-6:]]

    assert traceback_lines("\n".join(only)) == only


def test_of_a_long_traceback_that_was_printed_whole_frames_of_both_ends_are_shown() -> None:
    lines = traceback_lines(DEEP, is_shown_above=True)

    assert len(lines) <= 20
    assert lines[3:8] == [
        '  File "/home/me/train.py", line 2, in f',
        "    f(n - 1)",
        "    ^^^^^^^^",
        "  ... (48 lines left out; printed above) ...",
        '  File "/home/me/train.py", line 2, in f',
    ]
    assert lines[-2:] == traceback_lines(DEEP)[-2:]


def test_a_short_traceback_that_was_printed_is_shown_again() -> None:
    short = [*DEEP.splitlines()[:6], "ValueError: no"]

    assert traceback_lines("\n".join(short), is_shown_above=True) == short


THREAD_ERROR = [
    "Exception in thread loader:",
    "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner',
    "    self.run()",
    '  File "/home/me/train.py", line 3, in work',
    '    raise KeyError("in thread")',
    "KeyError: 'in thread'",
]


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_exception_of_a_thread_is_found_among_what_a_rank_has_printed(prefix: str) -> None:
    printed = ["step 1", *(prefix + line for line in THREAD_ERROR), "step 2", "  step 3"]

    assert error_of_thread(printed) == "\n".join(THREAD_ERROR)


def test_chained_exceptions_of_a_thread_are_one_error() -> None:
    chained = [
        *THREAD_ERROR,
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *THREAD_ERROR[1:],
    ]

    assert error_of_thread([*chained, "step 2"]) == "\n".join(chained)


def test_without_an_exception_of_a_thread_there_is_none() -> None:
    assert error_of_thread(["Exception in thread", "step 1"]) == ""


def test_frames_that_begin_a_thread_are_taken_out() -> None:
    assert traceback_lines("\n".join(THREAD_ERROR)) == [*THREAD_ERROR[:2], *THREAD_ERROR[4:]]
