"""What the API server does to a pod by itself: defaults, checks, and which changes it allows."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from .answers import Cause, RefusalError, invalid
from .store import Object

_NAME = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_NAME}(\.{_NAME})*"
_LABEL = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    f"'{_SUBDOMAIN}')"
)
_LABEL_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'MyValue', or 'my_value', or '12345', regex used "
    f"for validation is '{_LABEL}')"
)
_VARIABLE_TEXT = (
    "a valid environment variable name must consist only of printable ASCII characters other than '='"
)
_RESTART_POLICIES = ("Always", "OnFailure", "Never")
_CHANGEABLE_TEXT = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
    "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
    "previously negative)"
)
_MOST_ANNOTATION_BYTES = 262_144
_MOST_OBJECT_BYTES = 2_097_152
_TOLERATIONS = [
    {
        "key": f"node.kubernetes.io/{key}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 300,
    }
    for key in ("not-ready", "unreachable")
]


def check_size(body: Object) -> None:
    """Refuse what etcd's client would not carry, with the words of that client."""
    size = len(json.dumps(body, separators=(",", ":")))
    if size > _MOST_OBJECT_BYTES:
        message = (
            "rpc error: code = ResourceExhausted desc = trying to send message larger than max "
            f"({size} vs. {_MOST_OBJECT_BYTES})"
        )
        raise RefusalError(500, "", message)


def check_metadata(kind: str, found: Object) -> None:
    """Refuse names, labels and annotations that no object may have."""
    causes = list(_faults_of_metadata(found["metadata"]))
    if kind == "Pod":
        causes += _faults_of_spec(found.get("spec") or {})
    if causes:
        raise invalid(kind, found["metadata"].get("name", ""), causes)


def _faults_of_metadata(metadata: dict[str, Any]) -> Iterator[Cause]:
    name = metadata.get("name", "")
    if not name:
        message = "Required value: name or generateName is required"
        yield Cause("FieldValueRequired", message, "metadata.name")
    elif not re.fullmatch(_SUBDOMAIN, name) or len(name) > 253:
        yield Cause("FieldValueInvalid", f'Invalid value: "{name}": {_SUBDOMAIN_TEXT}', "metadata.name")
    labels: dict[str, str] = metadata.get("labels") or {}
    for value in labels.values():
        if not re.fullmatch(_LABEL, value) or len(value) > 63:
            yield Cause("FieldValueInvalid", f'Invalid value: "{value}": {_LABEL_TEXT}', "metadata.labels")
    annotations: dict[str, str] = metadata.get("annotations") or {}
    if (
        sum(len(name.encode()) + len(value.encode()) for name, value in annotations.items())
        > _MOST_ANNOTATION_BYTES
    ):
        message = f"Too long: may not be more than {_MOST_ANNOTATION_BYTES} bytes"
        yield Cause("FieldValueTooLong", message, "metadata.annotations")


def _faults_of_spec(spec: dict[str, Any]) -> Iterator[Cause]:
    containers: list[dict[str, Any]] = spec.get("containers") or []
    if not containers:
        yield Cause("FieldValueRequired", "Required value", "spec.containers")
    volumes: list[dict[str, Any]] = spec.get("volumes") or []
    names = {one["name"] for one in volumes}
    for index, container in enumerate(containers):
        yield from _faults_of_container(container, f"spec.containers[{index}]", names)
    if spec.get("restartPolicy", "Always") not in _RESTART_POLICIES:
        said = ", ".join(f'"{one}"' for one in _RESTART_POLICIES)
        message = f'Unsupported value: "{spec["restartPolicy"]}": supported values: {said}'
        yield Cause("FieldValueNotSupported", message, "spec.restartPolicy")


def _faults_of_container(container: dict[str, Any], field: str, volumes: set[str]) -> Iterator[Cause]:
    for index, variable in enumerate(container.get("env") or ()):
        name = variable["name"]
        where = f"{field}.env[{index}].name"
        if not name:
            yield Cause("FieldValueRequired", "Required value", where)
        elif not re.fullmatch("[ -<>-~]+", name):
            shown = json.dumps(name).replace("\\u00", "\\x")
            yield Cause("FieldValueInvalid", f"Invalid value: {shown}: {_VARIABLE_TEXT}", where)
    for name in ("image", "name"):
        if not container.get(name):
            yield Cause("FieldValueRequired", "Required value", f"{field}.{name}")
    image: str = container.get("image") or ""
    if image != image.strip():
        message = f'Invalid value: "{image}": must not have leading or trailing whitespace'
        yield Cause("FieldValueInvalid", message, f"{field}.image")
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            where = f"{field}.volumeMounts[{index}].name"
            yield Cause("FieldValueNotFound", f'Not found: "{mount["name"]}"', where)


def completed(pod: Object) -> Object:
    """A new pod with the defaults that the API server writes into it."""
    given: dict[str, Any] = copy.deepcopy(pod["spec"])
    spec: dict[str, Any] = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": "default",
        "serviceAccount": "default",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "priority": 0,
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        **given,
    }
    spec["tolerations"] = [*spec.get("tolerations", []), *_TOLERATIONS]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        latest = ":" not in container["image"].rpartition("/")[2] or container["image"].endswith(":latest")
        defaults: dict[str, Any] = {
            "resources": {},
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "imagePullPolicy": "Always" if latest else "IfNotPresent",
        }
        container |= {**defaults, **container}
        resources = container["resources"]
        if "limits" in resources:
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}
    status = {"phase": "Pending", "qosClass": _quality(spec["containers"])}
    return {**pod, "spec": spec, "status": status}


def _quality(containers: list[dict[str, Any]]) -> str:
    resources = [one["resources"] for one in containers]
    if not any(one.get("requests") or one.get("limits") for one in resources):
        return "BestEffort"
    if all(
        {"cpu", "memory"} <= one.get("limits", {}).keys()
        and all(one["requests"][what] == one["limits"][what] for what in ("cpu", "memory"))
        for one in resources
    ):
        return "Guaranteed"
    return "Burstable"


def check_change(old: Object, new: Object) -> None:
    """Refuse a change of a pod's spec that is not allowed while it lives.

    Raises:
        RefusalError: 422, with the texts of a real one, but without its picture of the difference.
    """
    name = old["metadata"]["name"]
    before, after = _without_changeable(old["spec"]), _without_changeable(new["spec"])
    if before != after:
        raise invalid("Pod", name, [Cause("FieldValueForbidden", _CHANGEABLE_TEXT, "spec")])
    field = "spec.activeDeadlineSeconds"
    earlier, later = (one["spec"].get("activeDeadlineSeconds") for one in (old, new))
    if earlier is not None and (later is None or later > earlier):
        message = f"Invalid value: {later}: must be less than or equal to previous value"
        if later is None:
            message = "Invalid value: null: must not update from a positive integer to nil value"
        raise invalid("Pod", name, [Cause("FieldValueInvalid", message, field)])


def _without_changeable(spec: dict[str, Any]) -> dict[str, Any]:
    rest = copy.deepcopy(spec)
    rest.pop("activeDeadlineSeconds", None)
    rest.pop("tolerations", None)
    for container in [*rest["containers"], *rest.get("initContainers", [])]:
        container.pop("image", None)
    return rest
