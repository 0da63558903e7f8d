"""What a record must pass before a conversation takes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from token_tracking.errors import RecordError
from token_tracking.history.branch import Branch
from token_tracking.record import GenerationRecord


def admit(record: GenerationRecord, branch: Branch, sent: npt.NDArray[np.int32]) -> GenerationRecord:
    """Check an engine's answer against the branch that asked for it; nothing is changed.

    Args:
        record: the answer.
        branch: whose prompt it continues.
        sent: the ids that were sent.

    Returns:
        The record, with its stop token named.

    Raises:
        RecordError: see `Conversation.record`.
    """
    template, tokenizer = branch.template, branch.template.tokenizer
    record.check_prompt(sent, tokenizer.decode)
    record.check_vocabulary(tokenizer.vocab_size)
    # An engine may stop a turn before the last token of its close; a limit or an abort there cut it off.
    stops = template.closings.close_ids if record.finish_reason == "stop" else template.stop_ids
    record = record.ended_by(stops)
    record.check_stop(stops, tokenizer.decode)
    record.check_text(tokenizer.special_ids, tokenizer.decode)
    if not len(record.output_ids) and record.finish_reason != "abort" and not branch.open_turn:
        why = "the prompt fills the context, or max_new_tokens is 0"
        raise RecordError(
            f"finish reason {record.finish_reason!r} without a single output id: {why}", code="empty"
        )
    if record.routed_experts is not None:
        branch.experts.check_shape(record.routed_experts)
    return record
