"""From the options of `rankwise manifest kubernetes` to what stands in the manifests."""

import io
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankwise.cli.main import invoke


def written(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """The objects by `kind/name`."""
    code = invoke(["manifest", "kubernetes", *words])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return {
        f"{one['kind']}/{one['metadata']['name']}": one
        for one in yaml.safe_load_all(out)
        if one is not None
    }


def complaint(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert invoke(["manifest", "kubernetes", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def pod_of(objects: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    (job,) = objects[f"JobSet/{name}"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


def container_of(objects: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    (container,) = pod_of(objects, name)["containers"]
    assert isinstance(container, dict)
    return container


def test_a_job_set_comes_with_its_etcd_and_its_services(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(capfd, "--image", "example/train:1", "--", "train_digits.py")

    assert list(objects) == [
        "Service/train-digits-etcd",
        "Service/train-digits-etcd-peers",
        "PodDisruptionBudget/train-digits-etcd",
        "StatefulSet/train-digits-etcd",
        "NetworkPolicy/train-digits-etcd",
        "ServiceAccount/train-digits",
        "Role/train-digits",
        "RoleBinding/train-digits",
        "Secret/train-digits-token",
        "Service/train-digits",
        "JobSet/train-digits",
    ]


def test_the_pods_run_the_same_words(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--max-restarts", "3", "-m", "pkg.train", "--epochs", "3", "$(HOME)")

    objects = written(
        capfd, "--image", "i", "--nodes", "2:4", "--nproc-per-node", "8", "--", *words
    )

    container = container_of(objects, "pkg-train")
    assert container["command"] == ["rankwise", "run"]
    assert container["args"][:2] == ["--nnodes=2:4", "--nproc-per-node=8"]
    # Kubernetes reads $$ as one, and does not fill in a variable.
    assert container["args"][-len(words) :] == [*words[:-1], "$$(HOME)"]


def test_the_grace_of_pods_is_longer_than_that_of_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ("--image", "i", "--name", "n", "--")

    usual = pod_of(written(capfd, *words, "t.py"), "n")
    longer = pod_of(written(capfd, *words, "--shutdown-timeout", "2m", "t.py"), "n")

    assert usual["terminationGracePeriodSeconds"] == 60
    assert longer["terminationGracePeriodSeconds"] == 150


def test_probes_ask_the_port_that_the_agent_answers_on(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(
        capfd, "--image", "i", "--name", "n", "--", "--health-port", "9000", "train.py"
    )

    container = container_of(objects, "n")
    assert "--health-port=9000" in container["args"]
    assert container["ports"] == [{"name": "health", "containerPort": 9000}]
    assert objects["Service/n"]["spec"]["ports"] == [{"name": "health", "port": 9000}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "health"}


def test_gpus_are_resources_and_the_number_of_workers(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--image", "i", "--name", "n", "--gpus")

    nvidia = container_of(written(capfd, *words, "8", "--", "t.py"), "n")
    amd = container_of(written(capfd, *words, "amd.com/gpu=4", "--cpu", "16", "--", "t.py"), "n")

    assert nvidia["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "--nproc-per-node=8" in nvidia["args"]
    assert amd["resources"]["requests"] == {"cpu": "16", "amd.com/gpu": "4"}


def test_variables_come_from_the_command_line_and_from_secrets(
    capfd: pytest.CaptureFixture[str],
) -> None:
    objects = written(
        capfd,
        *("--image", "i", "--name", "n", "--env", "A=b=c"),
        *("--secret-env", "RANKWISE_ETCD_PASSWORD=etcd/password", "--", "t.py"),
    )

    environment = container_of(objects, "n")["env"]
    assert {"name": "A", "value": "b=c"} in environment
    assert {
        "name": "RANKWISE_ETCD_PASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "etcd", "key": "password"}},
    } in environment


def test_each_manifest_brings_the_pods_a_token_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ("--image", "i", "--name", "n", "--", "t.py")
    objects = [written(capfd, *words) for _ in range(2)]

    tokens = [each["Secret/n-token"]["stringData"]["token"] for each in objects]
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    assert tokens[0] != tokens[1]
    assert objects[0]["Secret/n-token"]["immutable"] is True
    assert {
        "name": "RANKWISE_STORE_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "n-token", "key": "token"}},
    } in container_of(objects[0], "n")["env"]


@pytest.mark.parametrize(
    "words",
    [("--env", "RANKWISE_STORE_TOKEN=t"), ("--secret-env", "RANKWISE_STORE_TOKEN=mine/token")],
)
def test_a_token_that_the_user_gives_is_the_only_one(
    words: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    objects = written(capfd, "--image", "i", "--name", "n", *words, "--", "t.py")

    assert not any(name.startswith("Secret/") for name in objects)
    environment = container_of(objects, "n")["env"]
    assert [one["name"] for one in environment].count("RANKWISE_STORE_TOKEN") == 1


def test_a_file_with_a_token_in_it_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"

    assert invoke(["manifest", "kubernetes", "--image", "i", "-o", str(path), "--", "t.py"]) == 0

    assert path.stat().st_mode & 0o077 == 0


def test_a_batch_script_hands_all_tasks_one_token_and_each_start_another(tmp_path: Path) -> None:
    """Run by bash; srun is replaced by what it does to the variables and words of its tasks."""
    script, log = tmp_path / "job.sh", tmp_path / "log"
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
for task in 0 1; do echo "$RANKWISE_STORE_TOKEN|$*" >>{log}; done
"""
    )
    program.chmod(0o755)
    words = ["--nodes", "4", "--sbatch=--gpus-per-node=8", "-o", str(script), "--"]
    assert invoke(["manifest", "slurm", *words, "--max-restarts", "3", "train.py", "a b"]) == 0

    for _ in range(2):
        environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "6"}
        subprocess.run(["bash", script], env=environment, check=True)

    told = [line.partition("|") for line in log.read_text().splitlines()]
    first, same, second, also_same = (token for token, _, _ in told)
    assert first == same != second == also_same
    assert re.fullmatch("[0-9a-f]{32}", first)
    expected = "--export=ALL --cpus-per-task=6 rankwise run --max-restarts 3 train.py a b"
    assert {words for _, _, words in told} == {expected}
    lines = script.read_text().splitlines()
    assert lines[2:5] == [
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
    ]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("gpus=8", "expected an option of sbatch"),
        ("--comment=a\nrm -rf /", "expected an option of sbatch"),
        ("--ntasks-per-node=8", "the script says that itself"),
    ],
)
def test_what_is_no_further_option_of_sbatch_is_refused(
    option: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["manifest", "slurm", "--nodes", "2", f"--sbatch={option}", "--", "t.py"]) == 2

    assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"), [([], "no program given"), (["--", "t.py"], "no --nodes given")]
)
def test_who_leaves_out_words_of_a_batch_script_is_shown_an_example(
    words: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["manifest", "slurm", *words]) == 2

    complaint = capfd.readouterr().err
    assert told in complaint
    assert "for example: rankwise manifest slurm --nodes 2 -- train.py" in complaint


def test_an_etcd_of_ones_own_is_used_instead(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(
        capfd,
        *("--image", "i", "--name", "n", "--no-etcd", "--rdzv-endpoint", "etcd.infra:2379", "--"),
        "t.py",
    )

    assert list(objects) == ["Secret/n-token", "Service/n", "JobSet/n"]
    assert "--rdzv-endpoint=etcd.infra:2379" in container_of(objects, "n")["args"]


def test_a_fixed_number_of_pods_must_all_succeed(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--image", "i", "--name", "n", "--nodes")

    def job(nodes: str) -> dict[str, Any]:
        (one,) = written(capfd, *words, nodes, "--", "t.py")["JobSet/n"]["spec"]["replicatedJobs"]
        spec: dict[str, Any] = one["template"]["spec"]
        return spec

    assert "successPolicy" not in job("4")
    assert job("2:4")["successPolicy"] == {"rules": [{"succeededCount": 2}]}
    assert job("2:4")["completions"] == job("2:4")["parallelism"] == 4


def test_a_job_that_stops_on_preemption_is_over_when_it_has_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    objects = written(capfd, "--image", "i", "--", "--on-preemption", "stop", "t.py")

    assert "--on-preemption=leave" not in container_of(objects, "t")["args"]
    (job,) = objects["JobSet/t"]["spec"]["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["values"] == [137]


def test_pods_may_be_kept_apart(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(capfd, "--image", "i", "--one-per-host", "--", "t.py")

    (term,) = pod_of(objects, "t")["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    labels = objects["JobSet/t"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"] == labels


def test_a_namespace_is_written_into_every_object(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(capfd, "--image", "i", "--namespace", "research", "--", "t.py")

    assert {one["metadata"]["namespace"] for one in objects.values()} == {"research"}


def test_equal_words_with_a_secret_of_the_users_make_equal_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So it can be kept in a repository, where a token had better not be."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"

    for path in (first, second):
        words = ["--image", "i", "--secret-env", "RANKWISE_STORE_TOKEN=s/k", "--output", str(path)]
        assert invoke(["manifest", "kubernetes", *words, "--", "t.py"]) == 0

    assert first.read_text() == second.read_text()
    assert "# " in first.read_text()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--", "t.py"], "--image"),
        (["--image", "", "--", "t.py"], "--image is ''"),
        (["--image", "i"], "no program given"),
        ([], "for example: rankwise manifest kubernetes --image example/train:1 -- train.py"),
        (["--", "t.py"], "no --image given; for example: "),
        (["--image", "i", "--name", "A_b", "--", "t.py"], "--name is 'A_b'"),
        (["--image", "i", "--name", "n" * 41, "--", "t.py"], "at most 40"),
        (["--image", "i", "--nodes", "1", "--", "t.py"], "--nodes is '1', expected 2 to 10000"),
        (["--image", "i", "--nodes", "4:2", "--", "t.py"], "0 < MIN <= MAX"),
        (["--image", "i", "--gpus", "many", "--", "t.py"], "--gpus is 'many'"),
        (["--image", "i", "--memory", "lots", "--", "t.py"], "--memory is 'lots'"),
        (["--image", "i", "--env", "1A=b", "--", "t.py"], "--env is '1A=b'"),
        (["--image", "i", "--secret-env", "A=b", "--", "t.py"], "NAME=SECRET/KEY"),
        (["--image", "i", "--no-etcd", "--", "t.py"], "--no-etcd and --rdzv-endpoint go together"),
        (["--image", "i", "--rdzv-endpoint", "e:1", "--", "t.py"], "go together"),
        (["--image", "i", "--", "--nnodes", "2", "t.py"], "give --nodes before the --"),
        (["--image", "i", "--", "--standalone", "t.py"], "--standalone is given after the --"),
        (["--image", "i", "--", "--rdzv-backend", "c10d", "t.py"], "brings an etcd"),
        (["--image", "i", "--", "--no-such-option", "t.py"], "no such option"),
        (["--image", "i", "--output", "no/such/folder/file", "--", "t.py"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told in complaint(capfd, *words)


PATCH = """
kind: JobSet
metadata: {labels: {kueue.x-k8s.io/queue-name: research}}
spec:
  replicatedJobs:
  - name: node
    template:
      spec:
        template:
          spec:
            serviceAccountName: trainer
            imagePullSecrets: [{name: registry}]
            nodeSelector: {pool: gpu}
            tolerations: [{key: gpu, operator: Exists}]
            containers:
            - name: node
              volumeMounts: [{name: checkpoints, mountPath: /checkpoints}]
            volumes:
            - {name: checkpoints, persistentVolumeClaim: {claimName: checkpoints}}
---
kind: Service
metadata: {name: n-etcd}
spec: {type: ClusterIP}
"""


def test_patch_adds_what_a_cluster_asks_for_and_keeps_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text(PATCH)
    words = ("--image", "i", "--name", "n")
    plain = written(capfd, *words, "--", "t.py")

    objects = written(capfd, *words, "--patch", str(file), "--", "t.py")

    pod, container = pod_of(objects, "n"), container_of(objects, "n")
    labels = objects["JobSet/n"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels.items() > plain["JobSet/n"]["metadata"]["labels"].items()
    assert pod["serviceAccountName"] == "trainer"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert [one["name"] for one in pod["volumes"]] == ["shared-memory", "checkpoints"]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/dev/shm", "/checkpoints"]
    assert container["args"] == container_of(plain, "n")["args"]
    assert objects["Service/n-etcd"]["spec"]["type"] == "ClusterIP"


def test_patch_removes_by_null_and_by_directive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "patch.yaml"
    pod = "{containers: [{name: node, startupProbe: null, env: [{name: POD_IP, $patch: delete}]}]}"
    job = f"{{name: node, template: {{spec: {{template: {{spec: {pod}}}}}}}}}"
    file.write_text(f"kind: JobSet\nspec: {{replicatedJobs: [{job}]}}\n")

    objects = written(capfd, "--image", "i", "--patch", str(file), "--", "t.py")

    container = container_of(objects, "t")
    assert "startupProbe" not in container
    names = [one["name"] for one in container["env"]]
    assert "POD_IP" not in names
    assert "JOB_UID" in names


def test_all_patches_count_and_the_role_is_bound_to_the_account_of_the_pods(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text(of_pod("serviceAccountName: mine"))
    monkeypatch.setattr("sys.stdin", io.StringIO(of_pod("priorityClassName: high")))

    patches = ("--patch", str(file), "--patch", "-")
    objects = written(capfd, "--image", "i", "--name", "train", *patches, "--", "t.py")

    (job_set,) = (each for each in objects.values() if each["kind"] == "JobSet")
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("mine", "high")
    (binding,) = (each for each in objects.values() if each["kind"] == "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "mine"}]


def of_pod(spec: str) -> str:
    template = f"{{spec: {{template: {{spec: {{{spec}}}}}}}}}"
    return f"{{kind: JobSet, spec: {{replicatedJobs: [{{name: node, template: {template}}}]}}}}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kind: [", "line 1 is not YAML"),
        ("spec: {}", "a document without kind"),
        ("kind: Job", "is for Job, and no object here is of that kind and name"),
        ("kind: Service", "is for Service, and several objects here are of that kind and name"),
        ("{kind: JobSet, spec: 3}", "has 3 at JobSet.spec"),
        ("{kind: JobSet, spec: {replicatedJobs: [{}]}}", "an item without name"),
        ("# nothing yet", "has no document (begin one with kind: JobSet)"),
        (
            "{kind: JobSet, spec: {replicatedJobs: [{name: nodes}]}}",
            "which is not there (there is:",
        ),
        ("{kind: JobSet, spec: null}", "removes spec of JobSet"),
        ("{kind: JobSet, metadata: {name: null}}", "removes metadata.name of JobSet"),
        ("kind: JobSet\nkind: Secret", "line 2 is not YAML: kind is given twice"),
        (
            "{kind: JobSet, metadata: {labels: {a: 1}}}",
            "has 1 at JobSet.metadata.labels.a, expected a string (put it in quotes",
        ),
        (
            of_pod("containers: [{name: node, env: [{name: A, value: 1}]}]"),
            "env[].value, expected a string",
        ),
        (of_pod("containers: [{name: nod}]"), "has name 'nod' at JobSet.spec"),
        (of_pod("containers: [{name: nod}]"), "which is not there (there is: node)"),
        (of_pod("containers: [{name: node, env: [{name: PODIP, $patch: delete}]}]"), "'PODIP'"),
        (of_pod("containers: [{name: node, volumeMounts: [{mountPath: /dev/sh}]}]"), "'/dev/sh'"),
    ],
)
def test_patch_that_does_not_fit_is_refused_in_one_line(
    text: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text(text)

    assert told in complaint(capfd, "--image", "i", "--patch", str(file), "--", "t.py")


def test_number_of_workers_may_follow_the_dashes(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(capfd, "--image", "i", "--", "--nproc-per-node", "8", "t.py")

    arguments = container_of(objects, "t")["args"]
    assert arguments[-3:] == ["--nproc-per-node", "8", "t.py"]
    assert not any(word.startswith("--nproc-per-node=") for word in arguments)


def test_number_of_workers_given_twice_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--image", "i", "--nproc-per-node", "8", "--", "--nproc-per-node", "4", "t.py")

    assert "before and after the --" in complaint(capfd, *words)


def test_notes_ask_for_a_volume_for_checkpoints(capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["manifest", "kubernetes", "--image", "i", "--", "t.py"]) == 0

    assert "volume for checkpoints" in capfd.readouterr().out


def test_pods_may_make_the_job_set_the_owner_of_all_other_objects(
    capfd: pytest.CaptureFixture[str],
) -> None:
    objects = written(capfd, "--image", "i", "--", "t.py")

    pod = pod_of(objects, "t")
    (owner,) = pod["initContainers"]
    assert owner["command"] == ["rankwise", "manifest", "own"]
    job_set, *owned = owner["args"]
    assert job_set == "t"
    names = {(text.split("/")[-2], text.split("/")[-1]) for text in owned}
    assert names == {
        ("networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s", name)
        for kind, _, name in (key.partition("/") for key in objects)
        if kind != "JobSet"
    }
    allowed = {
        (resource, name)
        for rule in objects["Role/t"]["rules"]
        if "patch" in rule["verbs"]
        for resource in rule["resources"]
        for name in rule["resourceNames"]
    }
    assert allowed == names
    assert pod["serviceAccountName"] == objects["RoleBinding/t"]["subjects"][0]["name"] == "t"
    assert objects["JobSet/t"]["spec"]["ttlSecondsAfterFinished"] == 86_400


def test_without_etcd_pods_get_no_rights(capfd: pytest.CaptureFixture[str]) -> None:
    objects = written(
        capfd, "--image", "i", "--no-etcd", "--rdzv-endpoint", "etcd:2379", "--", "t.py"
    )

    assert not {"Role/t", "RoleBinding/t", "ServiceAccount/t"} & objects.keys()
    assert "initContainers" not in pod_of(objects, "t")
    assert "ttlSecondsAfterFinished" not in objects["JobSet/t"]["spec"]
