import pytest

from rankwise.cli.spelling import Flag, SpellingError, in_strict_spelling

FLAGS = [
    Flag("--help", "-h", takes_value=False, is_torchrun=True),
    Flag("--module", "-m", takes_value=False, is_torchrun=True),
    Flag("--no-python", None, takes_value=False, is_torchrun=True),
    Flag("--nproc-per-node", None, takes_value=True, is_torchrun=True),
    Flag("--redirects", "-r", takes_value=True, is_torchrun=True),
    Flag("--log-dir", None, takes_value=True, is_torchrun=True),
    Flag("--logs-specs", None, takes_value=True, is_torchrun=True),
    Flag("--log-prefix", None, takes_value=True, is_torchrun=False),
    Flag("--restart-backoff", None, takes_value=True, is_torchrun=False),
    Flag("--no-prefix", None, takes_value=False, is_torchrun=False),
]


@pytest.mark.parametrize(
    ("words", "strict"),
    [
        ("--nproc-per-node 4 s", "--nproc-per-node=4 -- s"),
        ("--nproc_per_node=4 s", "--nproc-per-node=4 -- s"),
        ("--nproc_per-node 4 s", "--nproc-per-node=4 -- s"),
        ("--nproc=4 s", "--nproc-per-node=4 -- s"),
        ("--redirect=3 s", "--redirects=3 -- s"),
        ("-r 3 s", "--redirects=3 -- s"),
        ("-r3 s", "--redirects=3 -- s"),
        ("-r=3 s", "--redirects=3 -- s"),
        ("-mr3 s", "--module --redirects=3 -- s"),
        ("-mr 3 s", "--module --redirects=3 -- s"),
        ("--log-dir= s", "--log-dir= -- s"),
        ("--nproc -1 s", "--nproc-per-node=-1 -- s"),
        ("--module --mod s", "--module --module -- s"),
        ("-m", "--module"),
        ("--", "--"),
    ],
)
def test_every_way_to_write_a_flag_leads_to_one(words: str, strict: str) -> None:
    assert in_strict_spelling(words.split(), FLAGS) == strict.split()


@pytest.mark.parametrize(
    "of_script",
    [
        ["--help"],
        ["--", "-m", "--nproc_per_node=2"],
        ["x", "--", "--"],
        ["-"],
        ["", "a b"],
        ["--log-dir"],
    ],
)
def test_what_follows_the_script_is_left_alone(of_script: list[str]) -> None:
    assert in_strict_spelling(["-m", "s", *of_script], FLAGS) == [
        "--module",
        "--",
        "s",
        *of_script,
    ]


def test_a_word_with_a_space_is_no_flag_unless_the_space_is_in_its_value() -> None:
    assert in_strict_spelling(["--log-dir=a b", "--my script"], FLAGS) == [
        "--log-dir=a b",
        "--",
        "--my script",
    ]
    assert in_strict_spelling(["--log-dir", "--a b", "-r 3", "s"], FLAGS) == [
        "--log-dir=--a b",
        "--redirects= 3",
        "--",
        "s",
    ]


def test_two_dashes_before_the_script_end_the_flags() -> None:
    assert in_strict_spelling(["-m", "--", "--s", "--", "x"], FLAGS) == [
        "--module",
        "--",
        "--s",
        "--",
        "x",
    ]


def test_our_own_flags_leave_torchruns_abbreviations_unambiguous() -> None:
    words = ["--re", "1", "--no-p", "--log-", "d", "--res", "5", "s"]

    assert in_strict_spelling(words, FLAGS) == [
        "--redirects=1",
        "--no-python",
        "--log-dir=d",
        "--restart-backoff=5",
        "--",
        "s",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--nproc_per_nod3 4 s",
            "no such option: --nproc_per_nod3, did you mean --nproc-per-node?",
        ),
        ("--qqq s", "no such option: --qqq"),
        ("--verbose s", "no such option: --verbose"),
        ("--nprocs 2 s", "no such option: --nprocs, did you mean --nproc-per-node?"),
        ("--num-processes 2 s", "no such option: --num-processes, did you mean --nproc-per-node?"),
        ("--num_processes=2 s", "no such option: --num_processes, did you mean --nproc-per-node?"),
        ("--gpus 2 s", "no such option: --gpus, did you mean --nproc-per-node?"),
        ("-n 2 s", "no such option: -n, did you mean --nproc-per-node?"),
        ("-n2 s", "no such option: -n, did you mean --nproc-per-node?"),
        ("-np 2 s", "no such option: -np, did you mean --nproc-per-node?"),
        ("-N 2 s", "no such option: -N, did you mean --nnodes?"),
        ("--machine_rank 1 s", "no such option: --machine_rank, did you mean --node-rank?"),
        ("-x s", "no such option: -x"),
        ("-mx s", "no such option: -x in -mx"),
        ("--log x s", "ambiguous option: --log could be --log-dir, --logs-specs"),
        ("--module=1 s", "--module takes no value, got '1'"),
        (
            "--log-dir",
            "--log-dir needs a value (a value that begins with a dash is glued on with =)",
        ),
        ("--log-dir --module s", "--log-dir needs a value, found --module (a value that begins"),
        ("-r", "-r needs a value (a value that begins with a dash is glued on with =)"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(words: str, message: str) -> None:
    with pytest.raises(SpellingError) as caught:
        in_strict_spelling(words.split(), FLAGS)

    assert str(caught.value).startswith(message)
