"""Strategic merge patches of manifests: what a cluster asks for and rankwise has no option for.

Maps are merged key by key, and null removes a key. Lists whose items have an identity are merged by
it, as Kubernetes' schemas say (containers by name, mounts by path); other lists are replaced.
"$patch: delete" removes an item, "$patch: replace" a map's other keys. Text that a patch leaves
alone keeps its comments.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from rankwise.base.errors import ConfigError
from rankwise.launch.manifests.noted_yaml import Noted

DIRECTIVE = "$patch"
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "replicatedJobs": "name",
}
"""Lists merged by identity. Ports are, too, but by another key in pods than in Services.

A JobSet is a custom resource, whose lists kubectl would replace. To repeat a whole Job for one
toleration is what `--patch` is to spare.
"""
_NEEDED_BY_NEW: dict[str, tuple[str, ...] | None] = {
    "containers": ("image",),
    "initContainers": ("image",),
    "volumeMounts": ("name",),
    "volumeDevices": ("name",),
    "replicatedJobs": None,
}
"""What an item that a patch adds has to have; None where none is added."""


_MAPS_OF_STRINGS = ("labels", "annotations", "nodeSelector", "matchLabels")


class Patch(NamedTuple):
    """One document of a file of patches: the object that it is for, and what to change there."""

    kind: str
    name: str | None
    tree: dict[str, Any]
    origin: str


def patches_in(text: str, path: str) -> tuple[Patch, ...]:
    """Read the documents of a file.

    Raises:
        ConfigError: it is not YAML, or a document does not say what it is for.
    """
    try:
        documents = list(yaml.load_all(text, Loader=_LoaderOfPatches))  # a safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "unreadable characters"
        raise ConfigError(f"--patch {path!r}{where} is not YAML: {problem}") from error
    patches = tuple(_patch(tree, path) for tree in documents if tree is not None)
    if not patches:
        raise ConfigError(f"--patch {path!r} has no document", hint="begin one with kind: JobSet")
    return patches


class _LoaderOfPatches(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would keep the last one."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:  # PyYAML's signature
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _check_whole(tree: dict[str, Any], called: str, origin: str) -> None:
    """Refuse an object that has lost what every object has, or has a number for a string."""
    for key in ("apiVersion", "kind", "metadata"):
        if not tree.get(key):
            raise ConfigError(
                f"--patch {origin!r} removes {key} of {called}, which has to be there"
            )
    if not _plain(tree["metadata"]).get("name"):
        raise ConfigError(f"--patch {origin!r} removes metadata.name of {called}")
    _check_strings(tree, called, origin)


def _check_strings(tree: Any, path: str, origin: str) -> None:
    tree = _plain(tree)
    if isinstance(tree, list):
        for item in tree:
            _check_strings(item, f"{path}[]", origin)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            here, plain = f"{path}.{key}", _plain(value)
            strings = plain if key in _MAPS_OF_STRINGS and isinstance(plain, dict) else {}
            if path.endswith("env[]") and key == "value":
                strings = {"": plain}
            for name, each in strings.items():
                if not isinstance(_plain(each), str):
                    where = f"{here}.{name}" if name else here
                    raise ConfigError(
                        f"--patch {origin!r} has {each!r} at {where}, expected a string",
                        hint=f'put it in quotes: "{each}"',
                    )
            _check_strings(value, here, origin)


def _patch(tree: Any, path: str) -> Patch:
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
        raise ConfigError(
            f"--patch {path!r} has a document without kind", hint="begin it with kind: JobSet"
        )
    metadata = tree.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return Patch(tree["kind"], name, tree, path)


def patched(
    objects: Sequence[tuple[dict[str, Any], str]], patches: Sequence[Patch]
) -> list[tuple[dict[str, Any], str]]:
    """The objects with each patch merged into the object of its kind, and of its name if given.

    Raises:
        ConfigError: no object or several fit, or a patch has another shape than the object.
    """
    result = list(objects)
    for patch in patches:
        fitting = [
            index
            for index, (tree, _) in enumerate(result)
            if tree["kind"] == patch.kind and patch.name in (None, tree["metadata"]["name"])
        ]
        called = patch.kind if patch.name is None else f"{patch.kind}/{patch.name}"
        if len(fitting) != 1:
            of_kind = [tree for tree, _ in result if tree["kind"] == patch.kind]
            names = [f"{tree['kind']}/{tree['metadata']['name']}" for tree in of_kind]
            kinds = dict.fromkeys(tree["kind"] for tree, _ in result)
            count = "several objects here are" if fitting else "no object here is"
            raise ConfigError(
                f"--patch {patch.origin!r} is for {called}, and {count} of that kind and name",
                hint=f"name one of: {', '.join(names or kinds)}",
            )
        tree, why = result[fitting[0]]
        whole = _merged(tree, patch.tree, called, patch.origin)
        if tree.get("spec") and not whole.get("spec"):
            raise ConfigError(f"--patch {patch.origin!r} removes spec of {called}")
        _check_whole(whole, called, patch.origin)
        result[fitting[0]] = (whole, why)
    return result


def _merged(old: Any, new: Any, path: str, origin: str) -> Any:
    if isinstance(old, Noted):
        merged = _merged(old.value, new, path, origin)
        # The reason is that of our value.
        return (
            merged
            if merged != old.value and not isinstance(merged, dict | list)
            else Noted(merged, old.why)
        )
    if isinstance(new, dict):
        if old is not None and not isinstance(old, dict):
            raise _other_shape(path, "a map", origin)
        return _merged_map(old or {}, new, path, origin)
    if isinstance(new, list):
        if old is not None and not isinstance(old, list):
            raise _other_shape(path, "a list", origin)
        key = MERGE_KEYS.get(path.rpartition(".")[2])
        return new if key is None else _merged_list(old or [], new, key, path, origin)
    if isinstance(old, dict | list):
        raise _other_shape(path, f"{new!r}", origin)
    return new


def _merged_map(old: dict[str, Any], new: dict[str, Any], path: str, origin: str) -> dict[str, Any]:
    directive = new.get(DIRECTIVE)
    if directive not in (None, "replace", "merge"):
        raise ConfigError(
            f"--patch {origin!r} has {DIRECTIVE}: {directive} at {path}, expected replace or merge"
        )
    merged = {} if directive == "replace" else dict(old)
    for key, value in new.items():
        if key == DIRECTIVE:
            continue
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value, f"{path}.{key}", origin)
    return merged


def _merged_list(old: list[Any], new: list[Any], key: str, path: str, origin: str) -> list[Any]:
    merged = list(old)
    for item in new:
        if not isinstance(item, dict) or key not in item:
            raise ConfigError(f"--patch {origin!r} has an item without {key} at {path}")
        places = [index for index, each in enumerate(merged) if _plain(each).get(key) == item[key]]
        if not places and not _is_whole(item, path):
            raise ConfigError(
                f"--patch {origin!r} has {key} {item[key]!r} at {path}, which is not there",
                hint=_there(merged, key),
            )
        if item.get(DIRECTIVE) == "delete":
            merged = [each for index, each in enumerate(merged) if index not in places]
        elif places:
            merged[places[0]] = _merged(merged[places[0]], item, path + "[]", origin)
        else:
            merged.append(_merged_map({}, item, path + "[]", origin))
    return merged


def _is_whole(item: dict[str, Any], path: str) -> bool:
    """Whether an item can be a new one: else its name has to be one of those that are there."""
    needed = _NEEDED_BY_NEW.get(path.rpartition(".")[2], ())
    return item.get(DIRECTIVE) != "delete" and needed is not None and all(map(item.get, needed))


def _there(items: list[Any], key: str) -> str:
    names = ", ".join(str(_plain(each).get(key)) for each in items)
    return f"there is: {names}" if names else "there is none"


def _plain(item: Any) -> Any:
    return item.value if isinstance(item, Noted) else item


def _other_shape(path: str, given: str, origin: str) -> ConfigError:
    return ConfigError(
        f"--patch {origin!r} has {given} at {path}, where the manifest has another type"
    )
