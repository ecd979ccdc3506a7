"""A batch script for SLURM: one task per node, and a token that only these tasks know.

Tasks of a step cannot agree on a secret by themselves: all that SLURM tells them is known to others
as well. But srun hands them the variables of the batch script, so that is where the token is made,
anew for each start. It stands in no file, in no process list, and not in what SLURM keeps of jobs.
"""

import shlex

import msgspec

from rankwise.drivers.real.stores.opening import TOKEN_VARIABLE


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to run under SLURM.

    Attributes:
        nodes: how many.
        directives: more options of sbatch, such as `--gpus-per-node=8`.
        words: of `rankwise run`: options, program, its arguments.
    """

    nodes: int
    directives: tuple[str, ...]
    words: tuple[str, ...]


def batch_script(job: SlurmJob) -> str:
    """The script, for `sbatch`."""
    directives = (f"--nodes={job.nodes}", "--ntasks-per-node=1", *job.directives)
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `rankwise manifest slurm`; for `sbatch`.",
            *(f"#SBATCH {each}" for each in directives),
            "",
            "# A secret of this start of the job. srun passes it to the nodes.",
            f"{TOKEN_VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
            f"export {TOKEN_VARIABLE}",
            "",
            "# sbatch's CPUs per task are not srun's, from SLURM 22.05 on.",
            "exec srun --export=ALL \\",
            "  ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
            f"  {shlex.join(['rankwise', 'run', *job.words])}",
            "",
        ]
    )
