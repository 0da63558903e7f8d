"""`Document`: what another trainer holds of one conversation, as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from token_tracking.errors import TokenTrackingError

_FORM = '{"messages": [...], "token_ids": [...], "loss_mask": [...], "tools": [...]}'


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What another trainer holds of one conversation, as JSON."""

    messages: list[dict[str, Any]]
    """The whole conversation. Without an assistant message at the end, `token_ids` are a prompt, or a rollout
    that ended there."""
    token_ids: list[int]
    loss_mask: list[int | bool | float] | None = None
    """1 (or true, or 1.0) where a token is trained; as long as `token_ids`. None: not known."""
    tools: list[dict[str, Any]] | None = None
    """Tool schemas. None: as the template's file says, or none."""


def read_document(data: bytes, where: str) -> Document:
    """Read another trainer's conversation.

    Raises:
        TokenTrackingError: it is not JSON of that form, or its lists do not fit together.
    """
    try:
        document = msgspec.json.decode(data, type=Document)
    except RecursionError as error:
        raise TokenTrackingError(f"{where} is nested too deeply") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise TokenTrackingError(
            f"{where}: {error}; need a snapshot, or JSON like {_FORM} (loss_mask and tools may be left out)"
        ) from error
    count, mask = len(document.token_ids), document.loss_mask
    if mask is not None and len(mask) != count:
        raise TokenTrackingError(f"{where}: loss_mask has {len(mask)} entries for {count} token_ids")
    bad = next((at for at, value in enumerate(mask or ()) if value not in (0, 1)), None)
    if mask is not None and bad is not None:
        raise TokenTrackingError(
            f"{where}: loss_mask must hold 0 and 1, loss_mask[{bad}] is {mask[bad]}: weights cannot be "
            "checked, give 1 where a token is trained at all"
        )
    if not document.messages or not count:
        raise TokenTrackingError(f"{where}: messages or token_ids are empty")
    return document
