"""`config_from_cli`: from words and environment to a `Job`, with nothing started."""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.units import DURATION_MAX, MILLISECOND, SECOND
from rankwise.cli.run import config_from_cli, notices, parse
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.launch.run.job import Executable, Function, Job, Module, Script, StartMethod, Streams
from rankwise.launch.run.signal_effects import SignalEffect, effects_of


def effects(job: Job) -> Mapping[int, SignalEffect]:
    return effects_of(job.signals, job.passed_signals, heeds_all=job.heeds_all_signals)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script in it."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(words: str | Sequence[str], **environ: str) -> Job:
    return config_from_cli(words.split() if isinstance(words, str) else words, environ)


def notices_of(words: str, **environ: str) -> list[str]:
    return notices(parse(words.split(), environ), job_of(words, **environ))


def refusal(words: str | Sequence[str], **environ: str) -> str:
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        job_of(words, **environ)
    error = caught.value
    assert "\n" not in str(error)
    return error.format_message() if isinstance(error, click.UsageError) else str(error)


def test_without_options_one_worker_runs_the_script(folder: Path) -> None:
    job = job_of("train.py --help -m -- x")

    assert job.program == Script("train.py", ("--help", "-m", "--", "x"))
    assert job.gang.size == 1
    assert job.policy.restarts_max == 0
    assert job.gang.grace == 30 * SECOND
    assert job.gang.hang_timeout is None
    assert job.role == "default"
    assert job.start_method is StartMethod.AUTO
    assert (job.master_addr, job.master_port) == ("127.0.0.1", None)
    assert job.signals == (15, 2, 1, 3)
    assert job.environment == {}
    assert job.logs.directory is None
    assert job.logs.prefix_template is None
    assert job.logs.console_ranks is None
    assert job.cpus_by_rank is None
    assert job.console


def test_options_reach_the_job(folder: Path) -> None:
    job = job_of(
        "--nproc_per_node 3 --max-restarts 2 --shutdown-timeout 5 --hang-timeout 2m "
        "--log-size 2M --timeout 1h30m "
        "--restart-backoff 500ms --role trainer --log-dir logs -r 0:1,2:3 -t 1 "
        "--local-ranks-filter 0,2 --duplicate-stdout-filters a,,b,c --rdzv-id nightly "
        "--start-method forkserver --preload json,email.mime --signals-to-handle SIGTERM,SIGUSR1 "
        "--virtual-local-rank --quiet --log-prefix ${rank}> --master-port 4711 --master-addr [::1] "
        "train.py"
    )

    assert job.gang.size == 3
    assert job.policy.restarts_max == 2
    assert job.gang.grace == 5 * SECOND
    assert job.gang.hang_timeout == 120 * SECOND
    assert job.timeout == 5400 * SECOND
    assert job.policy.backoff.initial == 500 * MILLISECOND
    assert job.role == "trainer"
    assert job.logs.directory == "logs"
    assert job.logs.redirects == {0: Streams.OUT, 2: Streams.BOTH}
    assert job.logs.tee == Streams.OUT
    assert job.logs.file_bytes_max == 2 << 20
    assert job.logs.console_ranks == frozenset({0, 2})
    assert job.logs.stdout_filters == ("a,b", "c")
    assert job.logs.prefix_template == "${rank}>"
    assert job.run_id == "nightly"
    assert job.start_method is StartMethod.FORKSERVER
    assert job.preload == ("json", "email.mime")
    assert job.signals == (signal.SIGTERM, signal.SIGUSR1)
    assert job.virtual_local_rank
    assert not job.console
    assert (job.master_addr, job.master_port) == ("::1", 4711)


def test_signals_of_the_user_go_to_ranks_unless_they_stop_the_run(folder: Path) -> None:
    passed = job_of("train.py")
    stopping = job_of("--signals-to-handle SIGUSR1,SIGINT train.py")
    outlived = job_of("--forward-signals none train.py")

    assert passed.heeds_all_signals
    assert effects(passed)[signal.SIGUSR1] is SignalEffect.PASSED_ON
    assert effects(stopping)[signal.SIGUSR1] is SignalEffect.STOPS
    assert effects(stopping)[signal.SIGUSR2] is SignalEffect.PASSED_ON
    assert signal.SIGTERM not in effects(stopping), "it does what it does to any program"
    assert effects(outlived)[signal.SIGUSR1] is SignalEffect.OUTLIVED


def test_real_time_signals_are_named_as_lines_name_them() -> None:
    job = job_of("--forward-signals SIGRTMIN+3,SIGRTMAX-1 -m this")

    assert job.passed_signals == (signal.SIGRTMIN + 3, signal.SIGRTMAX - 1)


def test_run_in_python_catches_no_signals_but_those_that_stop_it() -> None:
    job = Job(program=Script("train.py"), gang=GangSpec(size=1), run_id="run")

    assert set(effects(job)) == {*job.signals}


def test_nothing_is_made_while_reading(folder: Path) -> None:
    job_of("--log-dir logs/deeper -r 3 train.py")

    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


def test_the_command_line_wins_over_the_environment(folder: Path) -> None:
    assert job_of("train.py", PET_NPROC_PER_NODE="3").gang.size == 3
    assert job_of("--nproc-per-node 2 train.py", PET_NPROC_PER_NODE="3").gang.size == 2


@pytest.mark.parametrize("yes", ["1", "2", "-1", "true", "True", "YES", "on"])
def test_a_flags_variable_may_be_a_number_or_a_word(folder: Path, yes: str) -> None:
    assert job_of("json.tool", PET_MODULE=yes).program == Module("json.tool")


@pytest.mark.parametrize("no", ["0", "false", "no", "off", ""])
def test_a_flags_variable_may_say_no(folder: Path, no: str) -> None:
    assert job_of("train.py", PET_MODULE=no).program == Script("train.py")


def test_options_that_torchrun_does_not_read_from_the_environment_are_read(folder: Path) -> None:
    assert job_of("train.py", PET_NUMA_BINDING="node").cpus_by_rank is not None
    assert "torchrun.logs_specs[x]" in refusal("train.py", PET_LOGS_SPECS="x")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"PET_STANDALONE": "ja"},
            "PET_STANDALONE is 'ja', expected true, false, yes, no or a number (0 is false)",
        ),
        ({"PET_MAX_RESTARTS": "x"}, "PET_MAX_RESTARTS"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is 0, expected 1 or more workers"),
        ({"PET_START_METHOD": "x"}, "PET_START_METHOD"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "-1"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ],
)
def test_a_wrong_variable_is_named(folder: Path, environ: dict[str, str], message: str) -> None:
    assert message in refusal("train.py", **environ)


def test_a_torch_variable_gives_the_grace_and_its_own_option_wins(folder: Path) -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}

    assert job_of("train.py", **environ).gang.grace == 7 * SECOND
    assert job_of("train.py", PET_SHUTDOWN_TIMEOUT="8", **environ).gang.grace == 8 * SECOND
    assert job_of("--shutdown-timeout 0 train.py", **environ).gang.grace == 0


def test_a_prefix_can_be_given_by_torchs_variable_and_be_switched_off(folder: Path) -> None:
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>"}

    assert job_of("train.py", **environ).logs.prefix_template == "<${rank}>"
    assert job_of("--no-prefix train.py", **environ).logs.prefix_template == ""


def test_a_run_without_a_name_gets_a_readable_one(folder: Path) -> None:
    first, second = job_of("train.py").run_id, job_of("--rdzv-id none train.py").run_id

    assert re.fullmatch(r"[a-z]+-[a-z]+-[0-9a-f]{4}", first)
    assert first != second


def test_many_workers_get_one_thread_each_unless_somebody_decided(folder: Path) -> None:
    job = job_of("--nproc-per-node 2 train.py")

    assert job.environment == {"OMP_NUM_THREADS": "1"}
    assert notices_of("--nproc-per-node 2 train.py") == [
        "OMP_NUM_THREADS=1 for each of 2 workers, since it was not set"
    ]
    assert notices_of("--quiet --nproc-per-node 2 train.py") == []
    decided = job_of("--nproc-per-node 2 train.py", OMP_NUM_THREADS="4")
    assert decided.environment == {}
    assert notices_of("--nproc-per-node 2 train.py", OMP_NUM_THREADS="4") == []


def test_one_node_has_the_policy_and_the_checks_that_several_have(folder: Path) -> None:
    job = job_of(
        "--max-restarts 3 --no-retry ValueError,3 --max-no-progress 2 --max-node-failures 4 "
        "--health-port 8080 train.py",
        PET_NODE_CHECK="true",
    )

    plan = job.cluster
    assert plan is not None
    assert plan.is_alone
    assert (plan.checks, plan.health_port) == (("true",), 8080)
    policy = plan.rendezvous.policy
    assert (policy.restarts_max, policy.rounds_without_progress_max, policy.strikes_max) == (
        3,
        2,
        4,
    )
    assert (policy.final_exceptions, policy.final_exit_codes) == (("ValueError",), (3,))


@pytest.mark.parametrize("option", ["--spares 1", "--on-preemption leave", "--rdzv-once"])
def test_what_means_nothing_without_other_nodes_is_refused(folder: Path, option: str) -> None:
    name = option.split(maxsplit=1)[0]
    with pytest.raises(ConfigError, match=f"{name} needs several nodes"):
        job_of(f"{option} train.py")


def test_options_of_ours_behind_the_script_are_told_and_stay_the_scripts(folder: Path) -> None:
    assert notices_of("train.py --nproc-per-node 2") == [
        "--nproc-per-node is after train.py, which gets it; for rankwise, write it before"
    ]
    (told,) = notices_of("train.py --nnodes=2 x --nnodes=3 --max_restarts 3")
    assert told.startswith("--nnodes, --max-restarts stand after train.py, which gets them")
    script = job_of("train.py --nproc-per-node 2").program
    assert script == Script("train.py", ("--nproc-per-node", "2"))


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes 1 train.py --nnodes 2",
        "train.py --log-dir logs --role x --quiet",
        "train.py --nproc --help nnodes -- -m",
        "--quiet train.py --nnodes 2",
    ],
)
def test_what_is_likely_the_scripts_own_is_not_told(folder: Path, words: str) -> None:
    assert notices_of(words) == []


def test_a_run_without_a_name_in_a_shared_store_is_refused(folder: Path) -> None:
    words = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint store:2379"

    with pytest.raises(ConfigError, match="--rdzv-id is not given, and in etcd every run"):
        job_of(f"{words} train.py")

    assert job_of(f"{words} --rdzv-id nightly train.py").run_id == "nightly"
    assert job_of("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1 train.py").run_id == "none"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("-m http.server 80", "http.server 80"),
        ("--rdzv-conf program=mine train.py --node 3", "mine"),
    ],
)
def test_nodes_compare_what_they_run(folder: Path, words: str, program: str) -> None:
    plan = job_of(f"--nnodes 2 --rdzv-backend embedded --rdzv-endpoint 127.0.0.1:1 {words}").cluster

    assert plan is not None
    assert plan.rendezvous.charter.settings == {"program": program}
    assert "program" not in plan.store


def test_nodes_compare_their_tokens_and_show_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(token: str, name: str = "night") -> str:
        monkeypatch.setenv("RANKWISE_STORE_TOKEN", token)
        words = f"--nnodes 2 --rdzv-backend etcd --rdzv-endpoint store --rdzv-id {name}"
        plan = job_of(f"{words} train.py").cluster
        assert plan is not None
        return plan.rendezvous.charter.settings["fingerprint of RANKWISE_STORE_TOKEN"]

    assert fingerprint("sesame") == fingerprint("sesame")
    assert fingerprint("sesame") != fingerprint("another")
    assert fingerprint("sesame") != fingerprint("sesame", "day"), "it tells nothing of other runs"
    assert "sesame" not in fingerprint("sesame")


def test_long_arguments_are_cut_and_told_apart(folder: Path) -> None:
    meeting = "--nnodes 2 --rdzv-backend embedded --rdzv-endpoint 127.0.0.1:1"
    plans = [job_of(f"{meeting} train.py {'x' * 300}{end}").cluster for end in "ab"]

    one, other = [plan.rendezvous.settings["program"] for plan in plans if plan is not None]
    assert one != other
    assert len(one) < 250


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ("", StartMethod.AUTO),
        ("--start-method auto", StartMethod.AUTO),
        ("--start-method subprocess", StartMethod.SUBPROCESS),
        ("--start-method spawn", StartMethod.SPAWN),
        ("--start-method fork", StartMethod.FORKSERVER),
        ("--start-method forkserver", StartMethod.FORKSERVER),
        ("--run-path", StartMethod.SPAWN),
        ("--run-path --start-method fork", StartMethod.FORKSERVER),
    ],
)
def test_start_methods(folder: Path, options: str, method: StartMethod) -> None:
    assert job_of(f"{options} train.py").start_method is method


def test_a_script_by_run_path_is_a_function_worker(folder: Path) -> None:
    program = job_of("--run-path --no-python train.py 1 2").program

    assert isinstance(program, Function)
    assert program.name == "train.py"


def test_an_executable_is_looked_up(folder: Path) -> None:
    tool = folder / "bin" / "tool"
    tool.parent.mkdir()
    tool.touch(mode=0o755)

    assert job_of("--no-python bin/tool x").program == Executable("bin/tool", ("x",))
    assert job_of("--no-python tool", PATH=str(tool.parent)).program == Executable("tool")
    forked = job_of("--no-python --start-method fork bin/tool")
    assert forked.start_method is StartMethod.SUBPROCESS


def test_another_interpreter_may_be_named(folder: Path) -> None:
    job = job_of("-m not_here", PYTHON_EXEC=sys.executable)

    assert job.python == sys.executable
    assert job.program == Module("not_here")


def test_modules_are_found_in_the_working_directory(folder: Path) -> None:
    package = folder / "package" / "inner"
    package.mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "__init__.py").touch()
    (package / "work.py").touch()

    assert job_of("-m package.inner.work").program == Module("package.inner.work")
    assert "without __main__" in refusal("-m package.inner")
    assert "package" not in sys.modules
    assert str(folder) not in sys.path


def test_a_module_that_only_its_parent_can_find_is_found(folder: Path) -> None:
    (folder / "made_up").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "part.py").touch()
    (folder / "made_up" / "__init__.py").write_text("__path__ = ['elsewhere']")
    try:
        assert job_of("-m made_up.part").program == Module("made_up.part")
    finally:
        sys.modules.pop("made_up", None)


@pytest.mark.parametrize(
    "words", ["--rdzv-backend c10d --rdzv-endpoint", "--standalone --rdzv-endpoint"]
)
def test_an_endpoint_elsewhere_that_one_node_does_not_use_is_told(folder: Path, words: str) -> None:
    assert notices_of(f"{words} other:29400 train.py") == [
        "--rdzv-endpoint other:29400 is not used: with one node there is no rendezvous"
    ]
    assert notices_of(f"{words} localhost:0 train.py") == []
    assert notices_of("--rdzv-endpoint other:29400 train.py") == [], "it is the master's address"


@pytest.mark.parametrize("rdzv", ["static", "c10d", "etcd", "etcd-v2"])
def test_one_node_accepts_what_cannot_matter(folder: Path, rdzv: str) -> None:
    job = job_of(
        f"--nnodes 1:1 --standalone --rdzv-backend {rdzv} --rdzv-endpoint h:1 --local-addr me "
        "--rdzv-conf timeout=3,is_host=0 --monitor-interval 5 --node-rank 0 train.py"
    )

    assert (job.master_addr, job.master_port) == ("127.0.0.1", None)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("node7:29400", ("node7", 29400)),
        ("node7", ("node7", None)),
        ("node7:0", ("node7", None)),
        ("[::1]:29400", ("::1", 29400)),
        ("[::1]", ("::1", None)),
        ("::1", ("::1", None)),
    ],
)
def test_a_static_endpoint_is_the_master(
    folder: Path, endpoint: str, address: tuple[str, int | None]
) -> None:
    job = job_of(f"--rdzv-endpoint {endpoint} train.py")

    assert (job.master_addr, job.master_port) == address


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no script given"),
        ("gone.py", "script 'gone.py' does not exist in"),
        (".", "script '.' is a directory without __main__.py"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node is 0, expected 1 or more workers"),
        ("--nproc-per-node -2 train.py", "--nproc-per-node is -2, expected 1 or more workers"),
        ("--nproc-per-node 1.5 train.py", "--nproc-per-node is '1.5', expected a number, auto"),
        (
            "--nproc-per-node 4097 train.py",
            "--nproc-per-node is 4097, expected at most 4096 workers",
        ),
        (
            f"--nproc-per-node 1{'0' * 20} train.py",
            f"--nproc-per-node is 1{'0' * 20}, expected at most 4096 workers",
        ),
        (
            "--nproc-per-node foo train.py",
            "--nproc-per-node is 'foo', expected a number, auto, cpu, gpu or xpu",
        ),
        (
            "--max-restarts 99999999999999999999 train.py",
            "--max-restarts is 99999999999999999999, expected 0 or more, at most 1000000000",
        ),
        ("--max-restarts -1 train.py", "--max-restarts is -1, expected 0 or more"),
        ("--max-restarts x train.py", "'x' is not a valid integer"),
        ("--hang-timeout 0 train.py", "--hang-timeout is 0, expected more than 0 seconds"),
        ("--timeout 0 train.py", "--timeout is 0, expected more than 0 seconds"),
        ("--log-size 1K train.py", "'1K' is not a size, expected 4K or more, such as 64K, 100M"),
        ("--log-size big train.py", "'big' is not a size"),
        (
            "--log-size 99999999999T train.py",
            "'99999999999T' is too large, expected at most 1024T",
        ),
        ("--log-size 1M train.py", "--log-size has no effect without log files (write some by"),
        (
            "--log-size 1M --log-dir logs --duplicate-stdout-filters loss train.py",
            "--log-size has no effect without log files",
        ),
        ("--log-dir= train.py", "--log-dir is '', expected a directory (leave it out for none)"),
        ("--on sim --log-dir= train.py", "--log-dir is '', expected a directory"),
        ("--on sim --seed -1 train.py", "-1 is not in the range x>=0"),
        ("--monitor-interval -1 train.py", "-1.0 is not in the range x>=0"),
        ("--hang-timeout 5d train.py", "'5d' is not a time, expected seconds or 500ms, 30s"),
        ("--timeout 30m1h train.py", "'30m1h' is not a time, expected seconds or 500ms, 30s, 5m"),
        (
            "--log-prefix '${tiem}|' train.py",
            "nothing is called tiem; there are ${role_name}, ${local_rank}, ${rank}, ${date}",
        ),
        (
            "--hang-timeout 99999999999999h train.py",
            "'99999999999999h' is too long, expected at most ten years (87600h)",
        ),
        (f"--shutdown-timeout {'9' * 400} train.py", "expected at most ten years"),
        ("--restart-backoff 87601h train.py", "expected at most ten years"),
        ("--hang-timeout inf train.py", "'inf' is not a time"),
        ("--hang-timeout nan train.py", "'nan' is not a time"),
        ("--nnodes 1:4 train.py", "the static rendezvous has a fixed number of nodes"),
        ("--nnodes 2 --standalone train.py", "--nnodes is '2', but --standalone means one node"),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank is 2, expected 0 to 1"),
        ("--nnodes 2 --rdzv-backend etcd train.py", "--rdzv-endpoint is not given, and etcd needs"),
        (
            "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h:1 --node-rank 1 train.py",
            "only the static rendezvous lets nodes choose their ranks",
        ),
        ("--nnodes 2 --spares 1 train.py", "--spares is 1, expected 0 with the static rendezvous"),
        ("--max-no-progress 0 train.py", "--max-no-progress: 0 is not in the range x>=1"),
        ("--health-port 65536 train.py", "--health-port: 65536 is not in the range 0<=x<=65535"),
        ("--nnodes 2 --no-retry a-b train.py", "--no-retry: 'a-b' is neither an exception's name"),
        (
            "--no-retry 256 train.py",
            "--no-retry: no worker can end with 256, expected an exit code",
        ),
        ("--no-retry 3,-99 train.py", "--no-retry: no worker can end with -99, expected an exit"),
        (
            "--nnodes 2 --max-no-progress 0 train.py",
            "--max-no-progress: 0 is not in the range x>=1",
        ),
        ("--nnodes 2 --local-addr no.such.invalid train.py", "--local-addr is 'no.such.invalid'"),
        ("--nnodes 2 --rdzv-conf lease_ttl=0 train.py", "lease_ttl is '0', expected more than 0"),
        ("--nnodes 2 --rdzv-conf lease_ttl=1e9 train.py", "more than 0 and less than 1e9 seconds"),
        ("--nnodes 0 train.py", "--nnodes is '0', expected 0 < MIN <= MAX"),
        ("--nnodes 1:2:3 train.py", "--nnodes is '1:2:3', expected N or MIN:MAX"),
        ("--nnodes x train.py", "--nnodes is 'x', expected N or MIN:MAX"),
        ("--node-rank 1 train.py", "--node-rank is 1, expected 0 since --nnodes is 1:1"),
        ("--rdzv-backend zk train.py", "--rdzv-backend is 'zk', expected one of static, c10d"),
        ("--rdzv-conf a train.py", "--rdzv-conf: 'a' is not KEY=VALUE"),
        ("--rdzv-conf a=1,=2 train.py", "--rdzv-conf: '=2' is not KEY=VALUE"),
        ("--rdzv-conf a=1,a=2 train.py", "--rdzv-conf: a is given twice, as 1 and 2"),
        ("--rdzv-conf join_timeout=x train.py", "join_timeout is 'x', expected seconds"),
        ("--rdzv-endpoint h:99999 train.py", "--rdzv-endpoint is 'h:99999', expected HOST or HOST"),
        ("--rdzv-endpoint h:x train.py", "--rdzv-endpoint is 'h:x', expected HOST or HOST:PORT"),
        ("--rdzv-id a/b train.py", "--rdzv-id is 'a/b', expected a name that can be part of"),
        ("--master-port 70000 train.py", "--master-port: 70000 is not in the range 0<=x<=65535"),
        ("--signals-to-handle SIGFOO train.py", "--signals-to-handle: 'SIGFOO' is not a signal"),
        ("--signals-to-handle SIGKILL train.py", "SIGKILL cannot be handled"),
        ("--signals-to-handle SIGSTOP train.py", "SIGSTOP cannot be handled"),
        ("--signals-to-handle SIGTERM,SIGCHLD train.py", "SIGCHLD comes whenever a process"),
        ("--signals-to-handle SIGSEGV train.py", "SIGSEGV reports a fault"),
        ("--signals-to-handle , train.py", "--signals-to-handle names no signal"),
        ("--forward-signals SIGFOO train.py", "--forward-signals: 'SIGFOO' is not a signal"),
        ("--forward-signals SIGWINCH train.py", "--forward-signals: SIGWINCH ends no process"),
        ("--forward-signals , train.py", "--forward-signals names no signal"),
        ("--forward-signals SIGSEGV train.py", "--forward-signals: SIGSEGV reports a fault"),
        ("--forward-signals SIGIOT train.py", "--forward-signals: SIGIOT reports a fault"),
        ("--forward-signals SIGCHLD train.py", "own ends, so it is not passed on"),
        ("--forward-signals SIGPIPE train.py", "SIGPIPE is ignored by rankwise itself"),
        ("--forward-signals SIGXFSZ train.py", "SIGXFSZ is ignored by rankwise itself"),
        ("--forward-signals SIGTERM train.py", "SIGTERM stops the run (--signals-to-handle)"),
        ("--forward-signals NONE train.py", "is 'NONE': none stands alone, and in small letters"),
        ("--forward-signals none,SIGUSR1 train.py", "is 'none,SIGUSR1': none stands alone"),
        ("--forward-signals SIGRTMIN+31 train.py", "'SIGRTMIN+31' is not a signal's name"),
        ("-r 4 train.py", "--redirects is '4'"),
        ("-t 1:x train.py", "--tee is '1:x'"),
        ("--local-ranks-filter a train.py", "--local-ranks-filter is 'a', expected a comma-sep"),
        ("--log-dir train.py train.py", "train.py is not a directory"),
        ("--log-dir train.py/logs train.py", "train.py is not a directory"),
        ("--no-python -m train.py", "--no-python and --module exclude each other"),
        ("--no-python ./gone", "program './gone' does not exist"),
        ("--no-python ./train.py", "program './train.py' may not be executed"),
        ("--no-python train.py", "program 'train.py' is not in PATH (write ./train.py for"),
        ("-m gone_module", "module 'gone_module' is not found"),
        ("-m json.gone", "module 'json.gone' is not found"),
        ("-m json", "module 'json' is a package without __main__"),
        ("-m train.py", "module 'train.py' is not found (leave -m out to run a script)"),
        ("-m ./train.py", "-m './train.py' is not a module's name (leave -m out"),
        ("--preload json train.py", "--preload has no effect without --start-method forkserver"),
        ("--start-method fork --preload gone train.py", "--preload: module 'gone' is not found"),
        ("--start-method thread train.py", "'thread' is not one of"),
        ("--numa-binding wide train.py", "'wide' is not one of"),
        (
            "--logs-specs mine train.py",
            "Could not find entrypoint under 'torchrun.logs_specs[mine]",
        ),
        ("--event-log-handler mine train.py", "--event-log-handler is 'mine', which is not regis"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(folder: Path, words: str, message: str) -> None:
    assert message in refusal(words)


@pytest.mark.parametrize("role", ["two\nlines", "\x1b[31m", "bell\a"])
def test_a_role_that_would_break_the_prefixes_is_refused(folder: Path, role: str) -> None:
    assert refusal(["--role", role, "train.py"]).startswith(f"--role is {role!r}, expected a word")


def test_preloads_are_looked_for_where_the_workers_look(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "train.py").touch()
    (folder / "deep" / "beside.py").touch()
    (folder / "here.py").touch()
    fork = "--start-method fork --preload"

    assert job_of(f"{fork} beside deep/train.py").preload == ("beside",)
    assert job_of(f"{fork} here -m json.tool").preload == ("here",)
    assert "looked in the script's directory" in refusal(f"{fork} here deep/train.py")
    assert "looked in the current directory" in refusal(f"{fork} beside -m json.tool")
    assert "'beside' is not found" in refusal(f"{fork} beside deep/train.py", PYTHONSAFEPATH="1")


@pytest.mark.parametrize("option", [[], ["--no-python"]])
def test_a_link_that_leads_to_itself_is_told_as_such(folder: Path, option: list[str]) -> None:
    (folder / "loop").symlink_to("loop")

    assert refusal([*option, "./loop"]).endswith(
        "'./loop' cannot be used: it is a symbolic link that leads back to itself"
    )


def test_a_name_that_is_no_utf_8_is_told_with_its_bytes(folder: Path) -> None:
    name = os.fsdecode(b"./caf\xe9.py")

    assert refusal([name]).startswith(r"script './caf\xe9.py' does not exist in")
    assert refusal(["--no-python", name]) == r"program './caf\xe9.py' does not exist"


def test_the_longest_times_are_taken(folder: Path) -> None:
    assert job_of("--hang-timeout 87600h train.py").gang.hang_timeout == DURATION_MAX


def test_nothing_is_started_in_a_directory_that_is_gone(folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()

    for words in (str(folder / "train.py"), "-m json.tool", "--log-dir logs -m json.tool"):
        assert refusal(words).startswith("the working directory cannot be used: No such file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions_are_looked_at(folder: Path) -> None:
    (folder / "train.py").chmod(0)
    (folder / "logs").mkdir(mode=0o500)

    assert refusal("train.py") == "script 'train.py' cannot be read (see its permissions)"
    assert "nothing can be written" in refusal("--log-dir logs -m json.tool")


def test_virtual_local_ranks_need_a_device_each(folder: Path) -> None:
    words = "--virtual-local-rank --nproc-per-node 2 train.py"

    assert job_of(words, CUDA_VISIBLE_DEVICES="4,5").virtual_local_rank
    assert "CUDA_VISIBLE_DEVICES names 1 ('4')" in refusal(words, CUDA_VISIBLE_DEVICES="4")
    assert "CUDA_VISIBLE_DEVICES names 0 ('')" in refusal(words, CUDA_VISIBLE_DEVICES="")


def test_one_worker_per_cpu(folder: Path) -> None:
    assert job_of("--nproc-per-node cpu train.py").gang.size == len(os.sched_getaffinity(0))


def test_numa_binding_gives_every_rank_cpus_that_it_may_use(folder: Path) -> None:
    job = job_of("--numa-binding node --nproc-per-node 3 train.py")

    assert job.cpus_by_rank is not None
    assert sorted(job.cpus_by_rank) == [0, 1, 2]
    assert all(cpus and cpus <= os.sched_getaffinity(0) for cpus in job.cpus_by_rank.values())


def test_a_known_event_handler_is_accepted(folder: Path) -> None:
    assert job_of("--event-log-handler console train.py").gang.size == 1


@pytest.mark.usefixtures("folder")
def test_an_empty_failure_command_is_refused() -> None:
    refused = refusal(["--on-failure", " ", "train.py"])

    assert "--on-failure is ' ', expected a shell command (leave it out for none)" in refused


@pytest.mark.usefixtures("folder")
def test_torch_s_variable_may_name_in_a_prefix_what_nobody_knows() -> None:
    variable = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${host}:"}

    assert job_of("train.py", **variable).logs.prefix_template == "${host}:"
    assert "nothing is called host" in refusal("--log-prefix ${host}: train.py")
