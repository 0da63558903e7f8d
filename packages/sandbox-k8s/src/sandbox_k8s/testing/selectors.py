"""Label and field selectors, as query parameters have them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from .answers import bad_request
from .store import Object, labels_of

_OPERATOR = re.compile(
    r"\s*(!?)\s*([A-Za-z0-9][-A-Za-z0-9_./]*)\s*(==|!=|=|in\b|notin\b|$)\s*(.*?)\s*$", re.DOTALL
)
_FIELDS: Mapping[str, Sequence[str]] = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "status.phase", "status.podIP"),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "events": (
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.fieldPath", "reason", "reportingComponent", "type",
    ),
}  # fmt: skip
_EVERYWHERE = ("metadata.name", "metadata.namespace")

Matcher = Callable[[Object], bool]


def matcher(plural: str, labels: str, fields: str) -> Matcher:
    """Whether an object is selected by both.

    Raises:
        RefusalError: A selector cannot be read, or names a field that cannot be selected by.
    """
    by_label = [_label_term(term) for term in _terms(labels)]
    by_field = [_field_term(plural, term) for term in _terms(fields)]

    def matches(found: Object) -> bool:
        given = labels_of(found)
        return all(holds(given) for holds in by_label) and all(holds(found) for holds in by_field)

    return matches


def _terms(selector: str) -> list[str]:
    """Split at commas that are outside of parentheses."""
    return [term for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _label_term(term: str) -> Callable[[Mapping[str, str]], bool]:
    parsed = _OPERATOR.match(term)
    if parsed is None:
        found = [*term.split(), "", ""][1]
        raise bad_request(
            f"unable to parse requirement: found '{found}', expected: in, notin, =, ==, !=, gt, lt"
        )
    negated, key, operator, rest = parsed.groups()
    if operator == "":
        return lambda labels: (key in labels) is not bool(negated)
    if operator in ("in", "notin"):
        values = {value.strip() for value in rest.removeprefix("(").removesuffix(")").split(",")}
    else:
        values = {rest}
    if operator in ("!=", "notin"):
        return lambda labels: labels.get(key) not in values
    return lambda labels: labels.get(key) in values


def _field_term(plural: str, term: str) -> Matcher:
    field, operator, value = re.split("(!=|==|=)", term, maxsplit=1) if "=" in term else (term, "", "")
    if not operator:
        raise bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
    if field not in _EVERYWHERE and field not in _FIELDS[plural]:
        raise bad_request(f"field label not supported: {field}")

    def matches(found: Object) -> bool:
        inner: Any = found
        for name in field.split("."):
            inner = cast("Object", inner).get(name, {}) if isinstance(inner, dict) else {}
        shown: str = str(inner).lower() if isinstance(inner, bool) else inner or ""
        return (shown == value) is (operator != "!=")

    return matches
