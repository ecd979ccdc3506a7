"""Makes a JobSet the owner of the objects that came with it, so that they end with it.

An owner reference holds the owner's UID, which Kubernetes gives when the JobSet is applied. So a
pod of the JobSet writes the references: its first container asks the API server for the UID and
patches each object. From then on the cluster's garbage collector deletes the objects, and with the
StatefulSet the disks, after the JobSet has been deleted.

The patch is idempotent: each pod that starts sends it. If the API server refuses, the run goes on
without owner references, and the objects are deleted with the manifest.
"""

import http.client
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rankwise.base.errors import ConfigError, RankwiseError

API_VERSION = "jobset.x-k8s.io/v1alpha2"
PATIENCE_S = 10
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds token, authority and namespace of its service account."""
_SUCCESS = range(200, 300)


class OwnedObject(msgspec.Struct, frozen=True):
    """An object in the namespace of the JobSet."""

    group: str
    version: str
    resource: str
    name: str

    @property
    def text(self) -> str:
        """As a word of a command line, such as `apps/v1/statefulsets/train-etcd`."""
        return "/".join(
            part for part in (self.group, self.version, self.resource, self.name) if part
        )

    @classmethod
    def parsed(cls, text: str) -> "OwnedObject":
        """The object that `text` names.

        Raises:
            ConfigError: the text has neither three nor four parts.
        """
        parts = text.split("/")
        if len(parts) == 3:
            parts.insert(0, "")
        if len(parts) != 4 or not all(parts[1:]):
            raise ConfigError(
                f"object is {text!r}, expected GROUP/VERSION/RESOURCE/NAME, such as "
                "apps/v1/statefulsets/train-etcd"
            )
        return cls(*parts)


class ApiServer:
    """The API server of the cluster, as a pod reaches it with its service account."""

    def __init__(self, host: str, port: int, account: Path = ACCOUNT) -> None:
        """Read the service account.

        Raises:
            RankwiseError: the pod has no service account.
        """
        try:
            self._token = (account / "token").read_text().strip()
            self._namespace = (account / "namespace").read_text().strip()
            context = ssl.create_default_context(cafile=account / "ca.crt")
        except OSError as error:
            raise RankwiseError(
                f"the pod has no service account: {error.filename or error}: {error.strerror}",
                hint="leave automountServiceAccountToken on",
            ) from error
        self._connection = http.client.HTTPSConnection(
            host, port, timeout=PATIENCE_S, context=context
        )

    def get(self, object_: OwnedObject) -> dict[str, Any]:
        """Read an object. Raises RankwiseError if the server does not answer, or refuses."""
        return self._ask("GET", object_, None)

    def patch(self, object_: OwnedObject, change: dict[str, Any]) -> None:
        """Merge a change into an object. Raises RankwiseError as `get` does."""
        self._ask("PATCH", object_, change)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _ask(
        self, method: str, object_: OwnedObject, change: dict[str, Any] | None
    ) -> dict[str, Any]:
        base = f"/apis/{object_.group}" if object_.group else "/api"
        path = (
            f"{base}/{object_.version}/namespaces/{self._namespace}/{object_.resource}/"
            f"{object_.name}"
        )
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if change is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        body = None if change is None else json.dumps(change)
        try:
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RankwiseError(
                f"the API server does not answer {method} {path}: {error}"
            ) from error
        if response.status not in _SUCCESS:
            reason = answer.get("message", response.reason)
            raise RankwiseError(f"the API server refuses {method} {path}: {reason}")
        return dict(answer)


def own(api: ApiServer, job_set: str, objects: Sequence[OwnedObject]) -> None:
    """Make a JobSet the owner of objects.

    Raises:
        RankwiseError: the API server does not answer, or refuses. Objects before that one are
            owned.
    """
    group, _, version = API_VERSION.partition("/")
    found = api.get(OwnedObject(group, version, "jobsets", job_set))
    owner = {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "name": job_set,
        "uid": found["metadata"]["uid"],
    }
    for each in objects:
        api.patch(each, {"metadata": {"ownerReferences": [owner]}})
