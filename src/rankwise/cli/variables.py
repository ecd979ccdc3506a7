"""Environment variables that users set; docs/settings.md is generated from these tables.

Variables that rankwise sets for its own processes are in docs/development/architecture.md.
"""

from typing import NamedTuple


class Variable(NamedTuple):
    """What users read about an environment variable."""

    meaning: str
    default: str


VARIABLES = {
    "RANKWISE_COLLECTIVE_TIMEOUT": Variable(
        "seconds that an operation of `rankwise.collectives` waits for a rank that is alive", "300"
    ),
    "RANKWISE_LEDGER": Variable(
        "0: no [ledger](progress.md#the-ledger) of collective calls, as with `--no-ledger`", "1"
    ),
    "RANKWISE_STORE_TOKEN": Variable(
        "shared secret of the run's nodes: the `token` of an embedded store, and with"
        " `rankwise[tls]` the source of certificates for a run's own etcd. `rankwise manifest` and"
        " `--on ray` generate one",
        "the run id",
    ),
    "RANKWISE_ETCD_PASSWORD": Variable("the `password` for etcd", "none"),
    "RANKWISE_HEALTH_TOKEN": Variable("bearer token for the [health port](health.md)", "none"),
    "RANKWISE_GPUS": Variable(
        "0: [GPUs](gpu.md) are never read; 1: they are read although no device file shows one",
        "as device files show",
    ),
    "RANKWISE_COMPILED": Variable(
        "1, during `pip install .`: compile the [kernel of the"
        " simulator](sim/hardware.md#a-compiled-kernel); needs a C compiler",
        "0",
    ),
}
VARIABLES_OF_OTHERS = {
    "PYTHON_EXEC": "the Python for the ranks, as with torchrun",
    "OMP_NUM_THREADS": "if unset: 1 for several ranks; one rank gets the CPUs of its [CPU"
    " quota](howto/kubernetes.md#cpus-of-a-pod)",
    "CUDA_VISIBLE_DEVICES": "the GPUs that `--nproc-per-node gpu` counts and"
    " `--virtual-local-rank` distributes",
    "SLURM_…": "nodes and processes of a [SLURM](howto/slurm.md) step",
    "RAY_ADDRESS": "the cluster for `--on ray`",
    "OTEL_…": "the collector for metrics: [OpenTelemetry](health.md#opentelemetry)",
}
