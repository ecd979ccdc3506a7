"""The table of a run's options, against every interface that is made from it."""

import ast
import dataclasses
import inspect
import pickle
import re
import runpy
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import pytest

import rankwise
from rankwise.base.errors import ConfigError
from rankwise.base.units import parse_duration
from rankwise.cli.main import invoke
from rankwise.cli.on_ray import ray_job
from rankwise.cli.on_sim import simulate
from rankwise.cli.run import parse
from rankwise.cli.run_job import RunOptions, job_from
from rankwise.cli.run_sweep import sweep
from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs
from rankwise.compat.torch.launcher.api import LaunchConfig
from rankwise.compat.torch.run import config_from_args, get_args_parser, parse_args
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.launch.launch_fields import LAUNCH_FIELDS, LaunchField, field_of
from rankwise.launch.options import (
    CHOICE,
    FLAG,
    INTEGER,
    MASTER_PORT,
    ONLY_IN_PYTHON,
    OPTIONS,
    PROCESSES,
    RAY,
    SIM,
    SWEEP,
    TIMING_ONLY,
    WORLDS,
    Option,
    default_of,
    option_named,
)
from rankwise.launch.run.function_job import function_job
from rankwise.launch.run.job import Job, Module
from rankwise.simranks.run.rehearsal import Rehearsal
from rankwise.simranks.run.simulation_options import SimulationOptions
from rankwise.simranks.world.modules import PACKAGES_OF_RANKS

EXAMPLES: tuple[str, ...] = runpy.run_path(
    str(Path(__file__).parents[3] / "tools" / "cli_examples.py")
)["EXAMPLES"]["run"]
SOURCE = Path(rankwise.__file__).parent
PLACES = {PROCESSES: [], SIM: ["--on=sim"], RAY: ["--on=ray"]}


def example(option: Option) -> list[str]:
    """The option with a value, as the reference shows it."""
    names = {option.flag, option.short}
    given = next(each for each in EXAMPLES if re.split(r"[ =]", each)[0] in names)
    return shlex.split(given)


def parsed(*words: str) -> RunOptions:
    return parse([*words, "train.py"], {})


def chosen(predicate: Any) -> Any:
    """Runs a test for each option of a kind."""
    options = [option for option in OPTIONS if predicate(option)]
    assert options
    return pytest.mark.parametrize("option", options, ids=lambda each: each.name)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda each: each.name)
def test_every_option_is_read_as_the_type_that_the_table_says(option: Option) -> None:
    options = parsed(*example(option))

    assert option.name in options.origins
    msgspec.convert(msgspec.structs.asdict(options), RunOptions)


@chosen(lambda option: SIM in option.worlds)
def test_an_option_of_simulated_ranks_is_not_refused_there(option: Option) -> None:
    options = parsed("--on=sim", *example(option))

    options.refuse_with(SIM)
    assert option.name in options.origins


@chosen(lambda option: SIM in option.refused)
def test_an_option_without_meaning_on_simulated_ranks_is_refused_with_its_reason(
    option: Option,
) -> None:
    options = parsed("--on=sim", *example(option))

    with pytest.raises(ConfigError) as refused:
        simulate(options, [], {})

    assert str(refused.value) == (
        f"{option.flag} has no meaning with --on sim: {option.refused[SIM]}"
    )


@chosen(lambda option: TIMING_ONLY in option.refused)
def test_an_option_without_meaning_for_timing_alone_is_refused_with_its_reason(
    option: Option,
) -> None:
    options = parsed("--timing-only", *example(option))

    with pytest.raises(ConfigError, match=f"{option.flag} has no .*{option.refused[TIMING_ONLY]}"):
        options.refuse_with(TIMING_ONLY)


@chosen(lambda option: SWEEP in option.refused)
def test_an_option_for_one_run_is_refused_for_a_sweep(option: Option) -> None:
    options = parsed("--on=sim:h100-sxm", "--sweep=size=1,2", *example(option))

    with pytest.raises(ConfigError, match=f"{option.flag} {option.refused[SWEEP]}, and --sweep"):
        sweep(options, [])


@chosen(lambda option: RAY in option.worlds and option.name not in {"on", "rdzv_backend"})
def test_an_option_of_agents_on_ray_is_passed_on_to_them_or_decides_there(option: Option) -> None:
    where = ["--rdzv-backend=etcd"] if option.name == "rdzv_endpoint" else []
    options = parsed("--on=ray", *where, *example(option))

    job = ray_job(options, [*example(option), "--", "train.py"])

    passed_on = example(option)[0] in job.words
    decided = {"nnodes", "rdzv_id", "rdzv_endpoint", "rdzv_conf", "ray_resources"}
    assert passed_on or option.name in decided


@chosen(lambda option: RAY in option.refused)
def test_an_option_without_meaning_on_ray_is_refused_with_its_reason(option: Option) -> None:
    options = parsed("--on=ray", *example(option))

    with pytest.raises(ConfigError) as refused:
        ray_job(options, ["--", "train.py"])

    assert str(refused.value).startswith(
        f"{option.flag} has no meaning with --on ray: {option.refused[RAY]}"
    )


@chosen(lambda option: option.only == SIM)
def test_an_option_for_simulated_ranks_alone_is_refused_elsewhere(
    option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    for world in (PROCESSES, RAY):
        assert invoke(["run", *PLACES[world], *example(option), "train.py"]) == 2
        assert f"{option.flag} is for simulated ranks" in capsys.readouterr().err


def test_the_table_refuses_nothing_without_a_reason_and_uses_every_world() -> None:
    assert all(why for option in OPTIONS for why in option.refused.values())
    assert {world for option in OPTIONS for world in option.worlds} == set(WORLDS)
    assert all(option.worlds for option in OPTIONS)


@chosen(lambda option: option.python is not None)
def test_an_argument_of_python_has_the_default_and_the_line_of_the_table(option: Option) -> None:
    assert option.python is not None
    name = option.python.name or option.name
    parameter = inspect.signature(rankwise.run).parameters[name]

    assert parameter.default == option.python.default
    assert f"{name}: {option.python.help}" in " ".join((inspect.getdoc(rankwise.run) or "").split())


def test_run_in_python_has_no_argument_besides_those_of_the_table() -> None:
    of_table = {each.python.name or each.name for each in OPTIONS if each.python is not None}
    of_python = {each.name for each in ONLY_IN_PYTHON}
    of_function = {"fn", "args", "nprocs", "kwargs", "_others"}

    assert set(inspect.signature(rankwise.run).parameters) == of_table | of_python | of_function


@chosen(lambda option: option.python is not None and option.only == SIM)
def test_an_argument_for_simulated_ranks_alone_is_refused_for_processes(option: Option) -> None:
    value: Any = {FLAG: True, INTEGER: 3, CHOICE: option.choices[-1:]}.get(option.kind, "given")

    with pytest.raises(ConfigError, match=f"{option.name} is .* only simulated ranks have one"):
        rankwise.run(int, **{option.name: value})


@chosen(lambda option: option.python is not None and TIMING_ONLY in option.refused)
def test_an_argument_without_meaning_for_timing_alone_is_refused_with_its_reason(
    option: Option,
) -> None:
    arguments: dict[str, Any] = {option.name: 1, "timing_only": True}

    with pytest.raises(ConfigError) as refused:
        rankwise.run(print, on="sim:h100-sxm", **arguments)

    why = option.refused[TIMING_ONLY]
    assert str(refused.value).startswith(
        f"{option.name} has no meaning with timing_only=True: {why}"
    )


@chosen(lambda option: option.torchrun is not None)
def test_an_option_of_torchrun_is_read_by_its_module_too(option: Option) -> None:
    given = parse_args([*example(option), "train.py"])

    assert getattr(given, option.name) != get_args_parser().get_default(option.name)


@pytest.mark.parametrize(
    "field", [each for each in LAUNCH_FIELDS if each.option], ids=lambda each: each.name
)
def test_an_option_of_torchrun_reaches_its_launch_config(field: LaunchField) -> None:
    option = next(each for each in OPTIONS if each.name == field.option)
    given = parse_args([*example(option), "train.py"])

    config, *_ = config_from_args(given)

    assert getattr(config, field.name) == getattr(given, option.name)


def test_the_launch_config_has_the_fields_of_the_table_and_their_help() -> None:
    assert [each.name for each in dataclasses.fields(LaunchConfig)] == [
        each.name for each in LAUNCH_FIELDS
    ]
    described = inspect.getdoc(LaunchConfig) or ""
    assert all(f"{each.name}: {each.help}" in described for each in LAUNCH_FIELDS)


@pytest.mark.parametrize("field", LAUNCH_FIELDS, ids=lambda each: each.name)
def test_a_field_of_an_option_has_the_help_of_its_row(field: LaunchField) -> None:
    if not field.option:
        return
    row = option_named(field.option)
    assert row.torchrun is not None

    assert field.help.startswith(row.torchrun.help or row.help)


def test_a_field_of_a_launch_config_without_a_default_is_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="field timeout needs a default"):
        LaunchField("timeout", help="Seconds.", type="int")
    with pytest.raises(TypeError, match="field timeout: torchrun has no option timeout"):
        field_of("timeout")
    with pytest.raises(TypeError, match="field roles: torchrun has no option roles"):
        field_of("roles")


def test_no_field_of_a_launch_config_has_a_placeholder_for_its_value() -> None:
    config = LaunchConfig(1, 1, 1)

    assert all(getattr(config, each.name) is not ... for each in dataclasses.fields(config))


def test_options_of_simulated_ranks_have_the_names_and_defaults_of_the_table() -> None:
    rows = [each for each in OPTIONS if each.only == SIM]

    assert list(SimulationOptions.__struct_fields__) == [each.name for each in rows]
    assert msgspec.structs.asdict(SimulationOptions()) == {each.name: each.initial for each in rows}
    assert set(inspect.signature(Rehearsal).parameters).isdisjoint(
        {each.name for each in rows} - {"schedule", "faults"}  # what these come to
    )


@chosen(lambda option: option.python is not None)
def test_a_job_of_a_function_has_the_defaults_of_the_table(option: Option) -> None:
    assert option.python is not None
    found = inspect.signature(function_job).parameters.get(option.python.name or option.name)

    if found is not None and found.default is not inspect.Parameter.empty:
        assert found.default == option.python.default


def test_defaults_that_the_table_tells_in_words_are_those_that_count() -> None:
    shown = {each.name: each.default_shown for each in OPTIONS}
    gang, job = GangSpec(size=1), Job(program=Module("m"), gang=GangSpec(size=1), run_id="r")

    assert parse_duration(shown["start_timeout"] or "") == gang.spawn_timeout
    assert parse_duration(shown["shutdown_timeout"] or "") == gang.grace
    assert parse_duration(shown["restart_backoff"] or "") == job.policy.backoff.initial
    assert shown["import_per_rank"] == ", ".join(sorted(PACKAGES_OF_RANKS))
    assert str(MASTER_PORT) in (shown["master_port"] or "")
    assert [signal.Signals(each).name for each in job.signals] == default_of(
        "signals_to_handle"
    ).split(",")


@chosen(lambda option: option.is_positive)
def test_a_time_of_zero_is_refused_by_all_interfaces_where_the_table_says_so(
    option: Option,
) -> None:
    told = f"{option.name} is 0, expected more than 0 seconds"

    with pytest.raises(ConfigError) as refused:
        job_from(parsed(f"{option.flag}=0"), {})
    assert str(refused.value) == told.replace(option.name, option.flag)
    with pytest.raises(ConfigError) as refused:
        rankwise.run(int, **cast("Any", {option.name: 0}))
    assert str(refused.value) == told


@chosen(lambda option: option.least is not None or option.most is not None)
def test_a_number_outside_of_the_tables_range_is_refused(option: Option) -> None:
    outside = [option.least - 1] if option.least is not None else []
    outside += [option.most + 1] if option.most is not None else []

    for number in outside:
        with pytest.raises(click.BadParameter, match="is not in the range"):
            parsed(f"{option.flag}={number}")


def test_times_of_zero_are_taken_where_the_table_refuses_none() -> None:
    words = ["--shutdown-timeout=0", "--restart-backoff=0", "--no-python", "true"]

    job = job_from(parse(words, {}), {})

    assert job.gang.grace == 0


def test_no_module_repeats_a_default_of_the_table() -> None:
    defaults = [default_of("signals_to_handle"), default_of("forward_signals"), MASTER_PORT]
    spelled = [*map(str, defaults), f"{MASTER_PORT:_}"]
    sources = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    repeated = {
        f"{path.relative_to(SOURCE)}: {constant}"
        for path, source in sources.items()
        if path != SOURCE / "launch/options.py" and any(each in source for each in spelled)
        for constant in constants(ast.parse(source))
        if constant in defaults
    }

    assert repeated == set(REPEATED)


REPEATED = {
    "compat/torch/launcher/api.py: SIGTERM,SIGINT,SIGHUP,SIGQUIT": "written from the table",
    "drivers/virtual/cluster/host.py: 29500": "the first of the ports of simulated nodes",
    "simranks/torch/rank_store.py: 29500": "the first of the ports of simulated servers",
}


def constants(tree: ast.AST) -> Iterator[object]:
    """Numbers and texts."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))


def test_a_launch_config_is_pickled_copied_and_compared_as_a_class_in_source_is() -> None:
    config = LaunchConfig(1, 2, 3, role="trainer", logs_specs=DefaultLogsSpecs(log_dir="/tmp"))

    again = pickle.loads(pickle.dumps(dataclasses.replace(config, logs_specs=None)))
    twin = dataclasses.replace(config, role="trainer")

    assert type(again) is LaunchConfig
    assert (again.min_nodes, again.max_nodes, again.nproc_per_node) == (1, 2, 3)
    assert twin == config
    assert LaunchConfig.__qualname__ == "LaunchConfig"
    assert LaunchConfig.__module__ == "rankwise.compat.torch.launcher.api"


def test_two_launch_configs_share_no_dictionary() -> None:
    first, second = LaunchConfig(1, 1, 1), LaunchConfig(1, 1, 1)

    first.rdzv_configs["key"] = first.metrics_cfg["key"] = "value"

    assert "key" not in second.rdzv_configs
    assert second.metrics_cfg == {}
