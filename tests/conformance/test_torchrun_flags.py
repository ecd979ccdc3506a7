"""Differential tests: our reading of a command line against that of torchrun's own parser.

torch's parser is asked in this process, on command lines that hypothesis makes up: every flag of
torch's, in either spelling, abbreviated, glued, by environment, in any order, with script words
that look like flags.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import SECOND
from rankwise.cli.run import parse
from rankwise.launch.options import OPTIONS

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

NEW_DEFAULTS = {"start_method": "auto"}
"""Where a default differs from torch's on purpose."""


@contextlib.contextmanager
def only_these_variables(environ: dict[str, str]) -> Iterator[None]:
    """torch's parser reads the process's environment."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PET_")}
    os.environ.update(environ)
    try:
        yield
    finally:
        for name in environ:
            del os.environ[name]
        os.environ.update(hidden)


def torch_parser(environ: dict[str, str]) -> Any:
    from torch.distributed.run import get_args_parser  # noqa: PLC0415  # torch may be absent

    with only_these_variables(environ):
        return get_args_parser()


def torch_reads(words: list[str], environ: dict[str, str]) -> dict[str, Any] | None:
    """torch's values by name; None when torch refuses."""
    parser = torch_parser(environ)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return dict(vars(parser.parse_args(words)))
    except SystemExit:
        return None


def we_read(words: list[str], environ: dict[str, str]) -> dict[str, Any] | None:
    try:
        options = parse(words, environ)
    except click.UsageError:
        return None
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    values["training_script_args"] = list(options.training_script_args)
    if options.shutdown_timeout is not None:
        values["shutdown_timeout"] = options.shutdown_timeout // SECOND
    return values


def torch_actions() -> list[Any]:
    return [action for action in torch_parser({})._actions if action.dest != "help"]


def long_names() -> list[str]:
    return [name for action in torch_actions() for name in action.option_strings]


def value_for(action: Any) -> st.SearchStrategy[str]:
    if action.choices:
        return st.sampled_from(list(action.choices))
    if action.type is int:
        return st.integers(0, 99999).map(str)
    if action.type is float:
        return st.floats(0, 1e6).map(str)
    return st.text(st.sampled_from("ab1:,=. /_{"), min_size=1, max_size=8)


@st.composite
def one_flag(draw: st.DrawFn) -> list[str]:
    """A flag of torch's with its value, in one of the ways to write it."""
    action = draw(st.sampled_from([action for action in torch_actions() if action.option_strings]))
    name = draw(st.sampled_from(action.option_strings))
    if action.nargs == 0:
        return [name]
    value = draw(value_for(action))
    glue = draw(st.sampled_from(["", " ", "="]))
    if glue == " ":
        return [name, value]
    if glue == "=" or name.startswith("--") or value.startswith("="):
        return [f"{name}={value}"]
    return [name + value]


@st.composite
def one_variable(draw: st.DrawFn) -> tuple[str, str]:
    """A PET variable that torch reads, with a value that it accepts."""
    without = {"logs_specs", "numa_binding"}
    actions = [a for a in torch_actions() if a.option_strings and a.dest not in without]
    action = draw(st.sampled_from(actions))
    is_flag = action.nargs == 0
    value = draw(st.sampled_from(["0", "1", "2", "-1"]) if is_flag else value_for(action))
    return f"PET_{action.dest.upper()}", value


script_words = st.lists(
    st.one_of(
        st.sampled_from(["--help", "-h", "-m", "-x", "--log-dir", "--log_dir=x", "-1", "-", "a b"]),
        # torch tries to read these words as its own flags too, and stumbles over some.
        st.text(st.sampled_from("ab-="), max_size=5).filter(lambda word: word[:2] != "--"),
    ),
    max_size=5,
)


@given(
    st.lists(one_flag(), max_size=6),
    st.lists(one_variable(), max_size=3),
    st.sampled_from(["train.py", "a b", "pkg.mod"]),
    script_words,
)
def test_every_torchrun_flag_is_read_as_torchrun_reads_it(
    flags: list[list[str]], variables: list[tuple[str, str]], script: str, rest: list[str]
) -> None:
    words = [*(word for flag in flags for word in flag), script, *rest]
    environ = dict(variables)

    expected = torch_reads(words, environ)

    assert expected is not None
    read = we_read(words, environ)
    assert read is not None
    for name, default in NEW_DEFAULTS.items():
        if read[name] == default:
            expected.pop(name)
    assert {name: read[name] for name in expected} == expected


@given(st.data())
def test_whatever_torchrun_takes_as_an_abbreviation_we_take_for_the_same(
    data: st.DataObject,
) -> None:
    whole = data.draw(st.sampled_from([name for name in long_names() if name.startswith("--")]))
    prefix = whole[: data.draw(st.integers(3, len(whole)))]

    for words in ([prefix, "train.py"], [f"{prefix}=7", "train.py"]):
        if (expected := torch_reads(words, {})) is not None:
            expected |= NEW_DEFAULTS
            read = we_read(words, {})
            assert read is not None
            assert {name: read[name] for name in expected} == expected


@given(st.lists(st.sampled_from([*long_names(), "--qq", "-q", "-rr", "-m=1", "3"]), max_size=4))
def test_what_torchrun_refuses_we_refuse_unless_it_only_is_ambiguous_by_spelling(
    words: list[str],
) -> None:
    if torch_reads(words, {}) is None:
        assert we_read(words, {}) is None


def test_we_have_all_flags_of_torchrun_and_know_which_those_are() -> None:
    theirs = {action.dest for action in torch_actions() if action.option_strings}

    assert {option.name for option in OPTIONS if option.torchrun is not None} == theirs


def test_defaults_are_torchruns_except_where_said() -> None:
    read = we_read(["train.py"], {})
    expected = torch_reads(["train.py"], {})

    assert read is not None
    assert expected is not None
    assert {name: read[name] for name in expected} == {**expected, **NEW_DEFAULTS}
