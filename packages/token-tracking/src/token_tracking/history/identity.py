"""`TemplateIdentity`: the parts of a template's fingerprint, so that a snapshot can name what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from token_tracking.template import ChatTemplate


class TemplateIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is made of, short enough for every snapshot."""

    source: str
    """SHA-256 (hex) of the Jinja source."""
    tools: str
    """SHA-256 (hex) of the tool schemas as JSON."""
    tool_names: tuple[str, ...]
    variables: dict[str, str]
    """Each value as JSON."""

    @classmethod
    def of(cls, template: ChatTemplate) -> TemplateIdentity:
        """The identity of a template."""
        tools: Sequence[Mapping[str, Any]] = template.tools or ()
        functions = [tool.get("function", tool) for tool in tools]
        return cls(
            source=_sha256(template.source),
            tools=_sha256(json.dumps(tools, sort_keys=True, default=str)),
            tool_names=tuple(str(function.get("name", "?")) for function in functions),
            variables={
                name: json.dumps(value, sort_keys=True, default=str)
                for name, value in template.variables.items()
            },
        )

    def differences(self, given: TemplateIdentity) -> list[str]:
        """What another template has otherwise, with the option of `token-tracking` that gives it."""
        found: list[str] = []
        if self.source != given.source:
            found.append("another template text (--template)")
        if self.tools != given.tools:
            held, shown = self.tool_names, given.tool_names
            ours, theirs = _listed(held), "other schemas" if held == shown else _listed(shown)
            found.append(f"other tools (--tools): made with {ours}, given {theirs}")
        names = sorted({*self.variables, *given.variables})
        changed = [name for name in names if self.variables.get(name) != given.variables.get(name)]
        if changed:
            pairs = [(n, self.variables.get(n, "none"), given.variables.get(n, "none")) for n in changed]
            said = ", ".join(f"{name} made with {held}, given {shown}" for name, held, shown in pairs)
            found.append(f"other variables (--kwargs): {said}")
        return found


def other_template(
    wanted: str, made: TemplateIdentity | None, tokenizer: str, given: Sequence[ChatTemplate]
) -> str:
    """Why a snapshot cannot be opened with these templates.

    Args:
        wanted: fingerprint of the template that it was made with.
        made: identity of that template. None: the snapshot is of an earlier build, and does not say.
        tokenizer: fingerprint of the tokenizer that it was made with.
        given: the templates.
    """
    names = ", ".join(f"{template.fingerprint:.12}" for template in given)
    why = f"the snapshot was made with template {wanted:.12}, given: {names}"
    if made is None or len(given) != 1:
        return f"{why} (template, tools and variables must be the same: --template, --tools, --kwargs)"
    found = made.differences(TemplateIdentity.of(given[0]))
    if given[0].tokenizer.fingerprint != tokenizer:
        found = [other_tokenizer(tokenizer, given[0]), *found]
    return f"{why}: {'; '.join(found)}"


def other_tokenizer(tokenizer: str, template: ChatTemplate) -> str:
    """Why a snapshot cannot be opened with the tokenizer of a template."""
    return (
        f"the snapshot was made with tokenizer {tokenizer:.12}, the template has "
        f"{template.tokenizer.fingerprint:.12} ({template.tokenizer.name}, --tokenizer)"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
