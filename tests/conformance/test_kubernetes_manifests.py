"""Manifests hold against Kubernetes' own schemas, strictly: a field that is misspelt is refused.

The schemas of the built-in kinds come with the package kubernetes-validate. Of JobSet, which is no
built-in kind, the fields of jobset.x-k8s.io/v1alpha2 are written down here; the Jobs in it are
built-in again.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rankwise.cli.main import invoke

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")

VERSIONS = ("1.31", "1.34", kubernetes_validate.latest_version())
"""From the oldest one whose Jobs have a successPolicy by default."""

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0}


def strict(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


JOB_SET = strict(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object"},
        "spec": strict(
            {
                "replicatedJobs": {
                    "type": "array",
                    "minItems": 1,
                    "items": strict(
                        {
                            "name": NAME,
                            "groupName": NAME,
                            "replicas": COUNT,
                            "template": strict({"metadata": {}, "spec": {}}, "spec"),
                            "dependsOn": {"type": "array"},
                        },
                        "name",
                        "template",
                    ),
                },
                "network": strict(
                    {
                        "enableDNSHostnames": {"type": "boolean"},
                        "subdomain": NAME,
                        "publishNotReadyAddresses": {"type": "boolean"},
                    }
                ),
                "successPolicy": strict(
                    {
                        "operator": {"enum": ["Any", "All"]},
                        "targetReplicatedJobs": {"type": "array", "items": NAME},
                    },
                    "operator",
                ),
                "failurePolicy": strict(
                    {
                        "maxRestarts": COUNT,
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                        "rules": {"type": "array"},
                    }
                ),
                "startupPolicy": {"type": "object"},
                "suspend": {"type": "boolean"},
                "coordinator": {"type": "object"},
                "managedBy": {"type": "string"},
                "ttlSecondsAfterFinished": COUNT,
                "volumeClaimPolicies": {"type": "array"},
            },
            "replicatedJobs",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)

EVERYTHING = [
    *("--image", "example/train:1", "--name", "digits", "--namespace", "research"),
    *("--nodes", "2:4", "--gpus", "8", "--cpu", "16", "--memory", "64Gi", "--env", "A=b"),
    *("--secret-env", "PASSWORD=etcd/password", "--one-per-host"),
    *("--", "--max-restarts", "3", "--shutdown-timeout", "90", "train.py", "--epochs", "3"),
]
LITTLE = ["--image", "example/train:1", "--", "train.py"]
EXTERNAL = ["--image", "i", "--no-etcd", "--rdzv-endpoint", "etcd:2379", "--", "train.py"]


def objects_of(words: list[str], capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert invoke(["manifest", "kubernetes", *words]) == 0
    return [one for one in yaml.safe_load_all(capfd.readouterr().out) if one is not None]


def check(one: dict[str, Any], version: str) -> None:
    """Raise unless the schemas allow it."""
    if one["kind"] != "JobSet":
        kubernetes_validate.validate(one, version, strict=True)
        return
    jsonschema.validate(one, JOB_SET)
    for job in one["spec"]["replicatedJobs"]:
        within = {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"]}
        within["spec"] = job["template"]["spec"]
        kubernetes_validate.validate(within, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("words", [EVERYTHING, LITTLE, EXTERNAL])
def test_every_object_is_what_kubernetes_allows(
    words: list[str], version: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for one in objects_of(words, capfd):
        check(one, version)


def keys_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each key whose name Kubernetes has given."""
    if isinstance(tree, list):
        for index, each in enumerate(tree):
            yield from keys_of(each, (*path, index))
    elif isinstance(tree, dict):
        for key, each in tree.items():
            yield (*path, key)
            # What is in these is named by us.
            if key not in ("labels", "matchLabels", "selector", "requests", "limits", "stringData"):
                yield from keys_of(each, (*path, key))


def test_a_misspelt_field_is_refused_wherever_it_stands(capfd: pytest.CaptureFixture[str]) -> None:
    accepted = []
    count = 0
    for one in objects_of(EVERYTHING, capfd):
        for path in keys_of(one):
            if path[-1] == "kind":  # by which the schema is chosen
                continue
            misspelt = copy.deepcopy(one)
            *way, key = path
            place: Any = misspelt
            for step in way:
                place = place[step]
            place[f"{key}y"] = place.pop(key)
            count += 1
            try:
                check(misspelt, VERSIONS[-1])
            except (
                KeyError,
                jsonschema.ValidationError,
                kubernetes_validate.ValidationError,
                kubernetes_validate.InvalidSchemaError,
            ):
                continue
            accepted.append(f"{one['kind']}: {path}")

    assert count > 150
    assert accepted == []


def test_what_names_something_else_names_something_that_is_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in objects_of(EVERYTHING, capfd)}
    job_set, members = objects["JobSet", "digits"], objects["StatefulSet", "digits-etcd"]
    (job,) = job_set["spec"]["replicatedJobs"]
    templates = [members["spec"]["template"], job["template"]["spec"]["template"]]
    labels = [template["metadata"]["labels"] for template in templates]

    assert ("Service", job_set["spec"]["network"]["subdomain"]) in objects
    assert ("Service", members["spec"]["serviceName"]) in objects
    assert members["spec"]["selector"]["matchLabels"] == labels[0]
    policy = objects["NetworkPolicy", "digits-etcd"]["spec"]
    allowed = [
        peer["podSelector"]["matchLabels"] for rule in policy["ingress"] for peer in rule["from"]
    ]
    assert allowed == [labels[1], labels[0]]
    for template, more_volumes in zip(templates, [{"data"}, set[str]()], strict=True):
        pod = template["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | more_volumes
        ports = {port["name"] for port in container["ports"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for probe in (value for key, value in container.items() if key.endswith("Probe")):
            assert (
                next(value for value in probe.values() if isinstance(value, dict))["port"] in ports
            )
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    (token,) = (each for each in container["env"] if each["name"] == "RANKWISE_STORE_TOKEN")
    reference = token["valueFrom"]["secretKeyRef"]
    assert reference["key"] in objects["Secret", reference["name"]]["stringData"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["containerName"] == templates[1]["spec"]["containers"][0]["name"]
