"""Exit codes of the commands; docs/exit-codes.md is generated from these tables."""

from rankwise.base.errors import DEVICE_FULL_EXIT_CODE

EXIT_CODE_OF_A_TIMEOUT = 124
"""What `timeout` of the core utilities says of a command that ran out of time."""
EXIT_CODE_OF_ANOTHER_JOB = 2
EXIT_CODE_OF_A_LATECOMER = 75
"""EX_TEMPFAIL of sysexits.h: nothing ran here, and a later run may have a place for this node."""
EXIT_CODE_OF_A_FULL_DEVICE = DEVICE_FULL_EXIT_CODE
"""Of `--timing-only`; the rank's error has it, see `simranks.torch.out_of_memory`."""

EXIT_CODES_OF_RUN = {
    "0": "every rank succeeded",
    "1": "a rank failed without an exit code: it raised an exception, or never entered a collective"
    " call that the others waited in",
    f"{EXIT_CODE_OF_ANOTHER_JOB}": "no rank was started: the command line is invalid, or other"
    " nodes have another job or token under the same run id",
    f"{EXIT_CODE_OF_A_LATECOMER}": "the job succeeded on other nodes without this one",
    f"{EXIT_CODE_OF_A_FULL_DEVICE}": "the memory of a modelled device is full, with"
    " `--timing-only`",
    f"{EXIT_CODE_OF_A_TIMEOUT}": "a hang longer than `--hang-timeout`, or a run longer than"
    " `--timeout`",
    "128 + signal": "a signal ended the run, or killed the rank that failed first: 130 after"
    " Ctrl-C, 143 after SIGTERM, 137 after SIGKILL",
    "other": "the exit code of the rank that failed first",
}
EXIT_CODES_OF_OTHERS = {
    "`rankwise sim`": f"as `rankwise run`; {EXIT_CODE_OF_A_TIMEOUT} also after `--max-time`, 1"
    " after a wrong result",
    "`rankwise diff`": "1: the two runs differ, or one of them failed",
    "`rankwise replay`": "1: the decisions differ from the journal's; 2: the file is not a journal",
    "`rankwise doctor`": "1: there are problems",
    "`rankwise stop`": "0: the run was stopped; 1: it had ended before; 2: there is no such run",
    "`rankwise ps`, `top`, `logs`, `stacks`, `why`, `report`": "1: the run does not answer, or the"
    " output cannot be written; 2: there is no such run; 141: the reader of the output has ended",
    "all": "2: the command line is invalid",
}
