"""Manifests for Kubernetes: a JobSet whose pods are the nodes of a run, and an etcd for them.

One Indexed Job with a pod per node, each with `rankwise run` in it. Kubernetes replaces pods;
rankwise restarts workers, gives ranks and says what became of the job. So that the two do not work
against each other:

- a pod that is told to go (drained, preempted) leaves the run, and the pod that replaces it joins;
  a disruption costs nothing of any budget;
- a pod that was killed from outside (137) is replaced, a few times;
- any other exit code is the verdict on the whole run, which restarts of pods cannot change: the
  Job has failed;
- success of the fewest nodes that may run is success: agents end with 0 only when the whole run has
  succeeded, so pods that never found a place are not waited for;
- every Job has a run of its own in the store, named after the Job's UID.

The etcd has three members, stable names and disks. It has no password; a NetworkPolicy lets only
the pods of the job in, where the cluster's network enforces it. It ends with the JobSet: the pods
make the JobSet the owner of all other objects (`ownership`).

The run's token comes in a Secret. It cannot be changed, since pods that replace others must know
what these know: a manifest that was written anew is refused until the first one's objects are gone.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rankwise.drivers.real.stores.opening import TOKEN_VARIABLE
from rankwise.launch.manifests.noted_yaml import Noted, document
from rankwise.launch.manifests.ownership import API_VERSION, OwnedObject
from rankwise.launch.manifests.patches import Patch, patched

CLIENT_PORT = 2379
PEER_PORT = 2380
MEMBER_COUNT = 3
POD_ROLE = "node"
TOKEN_KEY = "token"  # noqa: S105  # the name of it
GRACE_MARGIN_S = 30
"""For ranks to agree on a step to stop at, and to sweep what they leave."""
REPLACEMENTS_MAX = 6
_EVERY_INTERFACE = "0.0.0.0"  # noqa: S104  # other pods are meant to reach it
_KILLED, _TERMINATED = 137, 143
_KEPT_S = 86_400
_RBAC = "rbac.authorization.k8s.io"


class Etcd(msgspec.Struct, frozen=True, kw_only=True):
    """The etcd that comes with the job."""

    image: str
    storage: str


class SecretKey(msgspec.Struct, frozen=True):
    """One value in a Secret that exists already."""

    secret: str
    key: str


class KubernetesJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to run on Kubernetes.

    Attributes:
        name: of the JobSet; the other objects' names begin with it.
        namespace: None for whichever is current when the manifests are applied.
        image: has rankwise and the program in it.
        nodes_min, nodes_max: how few pods may run, and how many at most.
        nproc: workers per pod, as for `--nproc-per-node`; None: the words say it.
        backend, endpoint: where pods meet.
        etcd: the etcd to write down too; None if the endpoint exists already.
        words: the rest of the words of `rankwise run`: options, program, its arguments.
        grace_s: how long workers may take to end.
        health_port: where agents answer probes.
        leaves_alone: a pod that is told to go leaves the run instead of stopping it.
        resources: requests and limits of a pod, by resource.
        environment, secrets: variables of the pods, by name.
        one_per_host: whether no two pods may share a machine.
        token: the secret of the pods alone; None: the variables say it, or nothing does.
    """

    name: str
    namespace: str | None = None
    image: str
    nodes_min: int
    nodes_max: int
    nproc: str | None
    backend: str
    endpoint: str
    etcd: Etcd | None
    words: tuple[str, ...]
    grace_s: int
    health_port: int
    leaves_alone: bool = True
    resources: dict[str, str] = {}
    environment: dict[str, str] = {}
    secrets: dict[str, SecretKey] = {}
    one_per_host: bool = False
    token: str | None = None


def etcd_endpoints(name: str) -> str:
    """Where the pods of a job find the members of their own etcd."""
    return ",".join(f"{member}.{name}-etcd-peers:{CLIENT_PORT}" for member in _members(name))


def manifests(job: KubernetesJob, patches: Sequence[Patch] = ()) -> str:
    """All objects as YAML, in the order in which they should be applied, patched.

    Raises:
        ConfigError: a patch names an object that is not among them, or does not fit.
    """
    objects: list[tuple[dict[str, Any], str]] = []
    if job.etcd is not None:
        objects += [
            (_client_service(job), "etcd, for people and tools: any member that is ready."),
            (_peer_service(job), "etcd's members by name, as soon as they exist."),
            (_disruption_budget(job), "Two of three members must be available."),
            (_stateful_set(job, job.etcd), "etcd, in which the nodes meet."),
            (
                _network_policy(job),
                "This etcd has no password: only the pods of the job may talk to it.",
            ),
            (_service_account(job), "The pods make the JobSet the owner of the other objects."),
            (_role(job), "For that, and nothing else."),
            (_role_binding(job), "Gives the role to the pods."),
        ]
    if job.token is not None:
        objects.append((_token_secret(job, job.token), "A secret that only the pods know."))
    objects += [
        (_node_service(job), "Names for the pods, and where Prometheus finds GET /metrics."),
        (_job_set(job), f"The run: {job.nodes_max} pods, each of them one node."),
    ]
    objects = patched(objects, patches)
    _bind_account_of_pods(objects)
    head = "# Written by `rankwise manifest kubernetes`; for `kubectl apply -f`.\n"
    head += "# Pods lose their files when they end: mount a volume for checkpoints (--patch).\n"
    return head + "".join("---\n" + document(tree, head=why) for tree, why in objects)


def _bind_account_of_pods(objects: list[tuple[dict[str, Any], str]]) -> None:
    """Give the role to the account that the pods have now: a patch may have named another."""
    by_kind = {tree["kind"]: tree for tree, _ in objects}
    binding = by_kind.get("RoleBinding")
    if binding is None:
        return
    (replicated,) = by_kind["JobSet"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    account = pod.get("serviceAccountName", "default")
    for subject in binding["subjects"]:
        if subject["kind"] == "ServiceAccount":
            subject["name"] = account


def _client_service(job: KubernetesJob) -> dict[str, Any]:
    return {
        **_head("v1", "Service", job, f"{job.name}-etcd", "etcd"),
        "spec": {
            "selector": _labels(job, "etcd"),
            "ports": [{"name": "client", "port": CLIENT_PORT}],
        },
    }


def _peer_service(job: KubernetesJob) -> dict[str, Any]:
    return {
        **_head("v1", "Service", job, f"{job.name}-etcd-peers", "etcd"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": Noted(
                value=True, why="Members must find each other to get ready."
            ),
            "selector": _labels(job, "etcd"),
            "ports": [
                {"name": "client", "port": CLIENT_PORT},
                {"name": "peer", "port": PEER_PORT},
            ],
        },
    }


def _disruption_budget(job: KubernetesJob) -> dict[str, Any]:
    return {
        **_head("policy/v1", "PodDisruptionBudget", job, f"{job.name}-etcd", "etcd"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(job, "etcd")}},
    }


def _stateful_set(job: KubernetesJob, etcd: Etcd) -> dict[str, Any]:
    return {
        **_head("apps/v1", "StatefulSet", job, f"{job.name}-etcd", "etcd"),
        "spec": {
            "replicas": Noted(MEMBER_COUNT, "The number of members is written into their flags."),
            "serviceName": f"{job.name}-etcd-peers",
            "podManagementPolicy": Noted(
                "Parallel", "The first member is only ready once a second one is there."
            ),
            "selector": {"matchLabels": _labels(job, "etcd")},
            "persistentVolumeClaimRetentionPolicy": Noted(
                {"whenDeleted": "Delete", "whenScaled": "Retain"},
                "The disks are deleted with the job.",
            ),
            "template": {
                "metadata": {"labels": _labels(job, "etcd")},
                "spec": {
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 1000,
                        "runAsGroup": 1000,
                        "fsGroup": 1000,
                    },
                    "affinity": _spread(job, "etcd", is_strict=False),
                    "containers": [_etcd_container(job, etcd)],
                },
            },
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "data"},
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": etcd.storage}},
                    },
                }
            ],
        },
    }


def _etcd_container(job: KubernetesJob, etcd: Etcd) -> dict[str, Any]:
    own = f"$(POD_NAME).{job.name}-etcd-peers"
    cluster = ",".join(
        f"{member}=http://{member}.{job.name}-etcd-peers:{PEER_PORT}"
        for member in _members(job.name)
    )
    return {
        "name": "etcd",
        "image": etcd.image,
        "command": ["etcd"],
        "args": [
            "--name=$(POD_NAME)",
            "--data-dir=/var/lib/etcd/data",
            f"--listen-client-urls=http://{_EVERY_INTERFACE}:{CLIENT_PORT}",
            f"--advertise-client-urls=http://{own}:{CLIENT_PORT}",
            f"--listen-peer-urls=http://{_EVERY_INTERFACE}:{PEER_PORT}",
            f"--initial-advertise-peer-urls=http://{own}:{PEER_PORT}",
            f"--initial-cluster={cluster}",
            f"--initial-cluster-token={job.name}",
            "--initial-cluster-state=new",
            Noted("--auto-compaction-mode=revision", "A long run must not fill the disk."),
            "--auto-compaction-retention=1000",
        ],
        "env": [_field("POD_NAME", "metadata.name")],
        "ports": [
            {"name": "client", "containerPort": CLIENT_PORT},
            {"name": "peer", "containerPort": PEER_PORT},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "client"},
            "periodSeconds": 5,
            "failureThreshold": 3,
        },
        "livenessProbe": Noted(
            {"tcpSocket": {"port": "client"}, "periodSeconds": 10, "failureThreshold": 6},
            "Not /health: killing a member that lacks its peers does not help.",
        ),
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "512Mi"},
        },
        "volumeMounts": [{"name": "data", "mountPath": "/var/lib/etcd"}],
    }


def _network_policy(job: KubernetesJob) -> dict[str, Any]:
    return {
        **_head("networking.k8s.io/v1", "NetworkPolicy", job, f"{job.name}-etcd", "etcd"),
        "spec": {
            "podSelector": {"matchLabels": _labels(job, "etcd")},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": _labels(job, POD_ROLE)}}],
                    "ports": [{"port": CLIENT_PORT}],
                },
                {
                    "from": [{"podSelector": {"matchLabels": _labels(job, "etcd")}}],
                    "ports": [{"port": CLIENT_PORT}, {"port": PEER_PORT}],
                },
            ],
        },
    }


def _owned_objects(job: KubernetesJob) -> list[OwnedObject]:
    """What is deleted with the JobSet."""
    etcd = f"{job.name}-etcd"
    owned = [
        OwnedObject("", "v1", "services", etcd),
        OwnedObject("", "v1", "services", f"{etcd}-peers"),
        OwnedObject("policy", "v1", "poddisruptionbudgets", etcd),
        OwnedObject("apps", "v1", "statefulsets", etcd),
        OwnedObject("networking.k8s.io", "v1", "networkpolicies", etcd),
        OwnedObject("", "v1", "services", job.name),
    ]
    if job.token is not None:
        owned.append(OwnedObject("", "v1", "secrets", _token_name(job)))
    # Last, since these allow the rest.
    return [
        *owned,
        OwnedObject("", "v1", "serviceaccounts", job.name),
        OwnedObject(_RBAC, "v1", "rolebindings", job.name),
        OwnedObject(_RBAC, "v1", "roles", job.name),
    ]


def _service_account(job: KubernetesJob) -> dict[str, Any]:
    return _head("v1", "ServiceAccount", job, job.name, POD_ROLE)


def _role(job: KubernetesJob) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [
        {
            "apiGroups": [API_VERSION.partition("/")[0]],
            "resources": ["jobsets"],
            "resourceNames": [job.name],
            "verbs": ["get"],
        }
    ]
    names: dict[tuple[str, str], list[str]] = {}
    for each in _owned_objects(job):
        names.setdefault((each.group, each.resource), []).append(each.name)
    rules += [
        {
            "apiGroups": [group],
            "resources": [resource],
            "resourceNames": those,
            # A cluster may ask for `delete` from those who set an owner.
            "verbs": ["patch", "delete"],
        }
        for (group, resource), those in names.items()
    ]
    return {**_head(f"{_RBAC}/v1", "Role", job, job.name, POD_ROLE), "rules": rules}


def _role_binding(job: KubernetesJob) -> dict[str, Any]:
    return {
        **_head(f"{_RBAC}/v1", "RoleBinding", job, job.name, POD_ROLE),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": job.name},
        "subjects": [{"kind": "ServiceAccount", "name": job.name}],
    }


def _token_secret(job: KubernetesJob, token: str) -> dict[str, Any]:
    return {
        **_head("v1", "Secret", job, _token_name(job), POD_ROLE),
        "immutable": Noted(value=True, why="Pods that replace others must know the same."),
        "stringData": {TOKEN_KEY: token},
    }


def _token_name(job: KubernetesJob) -> str:
    return f"{job.name}-token"


def _node_service(job: KubernetesJob) -> dict[str, Any]:
    return {
        **_head("v1", "Service", job, job.name, POD_ROLE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"jobset.sigs.k8s.io/jobset-name": job.name},
            "ports": [{"name": "health", "port": job.health_port}],
        },
    }


def _job_set(job: KubernetesJob) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if job.etcd is not None:
        kept["ttlSecondsAfterFinished"] = Noted(
            _KEPT_S, "After a day the JobSet is deleted, with etcd and its disks."
        )
    return {
        **_head(API_VERSION, "JobSet", job, job.name, POD_ROLE),
        "spec": {
            **kept,
            "network": {
                "enableDNSHostnames": True,
                "subdomain": Noted(job.name, "The Service above."),
            },
            "failurePolicy": Noted(
                {"maxRestarts": 0},
                "rankwise restarts the workers itself (--max-restarts), without losing the pods.",
            ),
            "replicatedJobs": [
                {"name": POD_ROLE, "replicas": 1, "template": {"spec": _job(job)}},
            ],
        },
    }


def _job(job: KubernetesJob) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes_max,
        "parallelism": job.nodes_max,
    }
    if job.nodes_min < job.nodes_max:
        spec["successPolicy"] = Noted(
            {"rules": [{"succeededCount": job.nodes_min}]},
            "A pod succeeds only when the whole run has: pods that found no place, or came too "
            "late, are not waited for.",
        )
    surprises = [_KILLED, _TERMINATED] if job.leaves_alone else [_KILLED]
    return {
        **spec,
        "backoffLimit": Noted(REPLACEMENTS_MAX, "How many pods that were killed are replaced."),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                Noted(
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    "Drained or preempted: replaced, and not counted.",
                ),
                Noted(
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": POD_ROLE,
                            "operator": "NotIn",
                            "values": surprises,
                        },
                    },
                    "Any other code is the result of the whole run, after all its restarts.",
                ),
            ]
        },
        "template": {"metadata": {"labels": _labels(job, POD_ROLE)}, "spec": _pod(job)},
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": Noted(
            job.grace_s + GRACE_MARGIN_S,
            f"Workers may take {job.grace_s} s to end; the rest is for ranks to agree on a step "
            "to stop at, and for killing what is left.",
        ),
    }
    if job.one_per_host:
        pod["affinity"] = _spread(job, POD_ROLE, is_strict=True)
    if job.etcd is not None:
        pod["serviceAccountName"] = job.name
        pod["initContainers"] = [
            Noted(_owner_container(job), "The JobSet becomes the owner of etcd, and ends it.")
        ]
    pod["containers"] = [_node_container(job)]
    pod["volumes"] = [
        Noted(
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            "Without it /dev/shm has 64 MiB, too little for data loaders. It counts as memory.",
        )
    ]
    return pod


def _owner_container(job: KubernetesJob) -> dict[str, Any]:
    return {
        "name": "owner",
        "image": job.image,
        "command": ["rankwise", "manifest", "own"],
        "args": [job.name, *(each.text for each in _owned_objects(job))],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
    }


def _node_container(job: KubernetesJob) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": POD_ROLE,
        "image": job.image,
        "command": ["rankwise", "run"],
        "args": [
            f"--nnodes={job.nodes_min}:{job.nodes_max}",
            *([] if job.nproc is None else [f"--nproc-per-node={job.nproc}"]),
            Noted(f"--rdzv-id={job.name}-$(JOB_UID)", "Every Job begins a run of its own."),
            Noted("--rdzv-once", "A pod that starts after the run ends with the run's exit code."),
            f"--rdzv-backend={job.backend}",
            f"--rdzv-endpoint={job.endpoint}",
            "--local-addr=$(POD_IP)",
            Noted("--node-topology=$(HOST_NAME)", "Pods of one machine get neighbouring ranks."),
            f"--health-port={job.health_port}",
            *(
                [
                    Noted(
                        "--on-preemption=leave",
                        "The others go on, and the pod that replaces this one joins them.",
                    )
                ]
                if job.leaves_alone
                else []
            ),
            # Kubernetes would fill in variables.
            *(word.replace("$(", "$$(") for word in job.words),
        ],
        "env": [
            _field("JOB_UID", "metadata.labels['batch.kubernetes.io/controller-uid']"),
            _field("POD_IP", "status.podIP"),
            _field("HOST_NAME", "spec.nodeName"),
            *({"name": name, "value": value} for name, value in job.environment.items()),
            *(
                {
                    "name": name,
                    "valueFrom": {"secretKeyRef": {"name": where.secret, "key": where.key}},
                }
                for name, where in _secrets_of(job).items()
            ),
        ],
        "ports": [{"name": "health", "containerPort": job.health_port}],
        "startupProbe": {**_health(), "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**_health(), "periodSeconds": 10, "timeoutSeconds": 6},
        "livenessProbe": Noted(
            {**_health(), "periodSeconds": 20, "timeoutSeconds": 6, "failureThreshold": 3},
            "Checks that the agent responds. --hang-timeout detects hanging workers.",
        ),
    }
    if job.resources:
        container["resources"] = {"requests": job.resources, "limits": dict(job.resources)}
    container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108
    return container


def _secrets_of(job: KubernetesJob) -> dict[str, SecretKey]:
    if job.token is None:
        return job.secrets
    return {**job.secrets, TOKEN_VARIABLE: SecretKey(_token_name(job), TOKEN_KEY)}


def _health() -> dict[str, Any]:
    return {"httpGet": {"path": "/health", "port": "health"}}


def _spread(job: KubernetesJob, component: str, *, is_strict: bool) -> dict[str, Any]:
    term = {
        "labelSelector": {"matchLabels": _labels(job, component)},
        "topologyKey": "kubernetes.io/hostname",
    }
    if is_strict:
        return {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": Noted(
                    [term], "No two pods on one machine."
                )
            }
        }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _head(
    api_version: str, kind: str, job: KubernetesJob, name: str, component: str
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    metadata["labels"] = _labels(job, component)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _labels(job: KubernetesJob, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "rankwise",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _members(name: str) -> list[str]:
    return [f"{name}-etcd-{index}" for index in range(MEMBER_COUNT)]
