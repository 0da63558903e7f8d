"""Which tokens the model saw and which it sampled, over every turn of a rollout.

Importing this package loads numpy and msgspec. Names that need `tokenizers` or `jinja2` (extra `[hf]`) load
them on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from token_tracking.answers.expert_payloads import decode_sglang_experts, decode_vllm_experts
from token_tracking.answers.experts import DeferredRows
from token_tracking.errors import (
    AmbiguousHistoryError,
    ControlTokenError,
    ConversationError,
    LedgerError,
    MissingLogprobsError,
    RecordError,
    SampleError,
    SnapshotError,
    TemplateError,
    TokenizerError,
    TokenTrackingError,
    UnsupportedContentError,
)
from token_tracking.forms.tree import PrefixTree, TreeLeaf, TreeNode, prefix_tree
from token_tracking.forms.turns import FormCost, form_costs, turn_samples
from token_tracking.kept import KeptSets
from token_tracking.ledger import TokenLedger, TokenSource
from token_tracking.manager import TokenManager
from token_tracking.parsing.parse import ParsedCompletion
from token_tracking.parsing.tool_call import ToolCall
from token_tracking.record import GenerationRecord
from token_tracking.sample import NOT_SAMPLED, UNKNOWN_VERSION, Sample, Turn
from token_tracking.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from token_tracking.checking.report import ConversationReport
    from token_tracking.conversation import Conversation
    from token_tracking.history.plan import Plan
    from token_tracking.template import ChatTemplate

_LAZY = {
    "ChatTemplate": "token_tracking.template",
    "Conversation": "token_tracking.conversation",
    "ConversationReport": "token_tracking.checking.report",
    "Plan": "token_tracking.history.plan",
}

__all__ = [
    "NOT_SAMPLED",
    "UNKNOWN_VERSION",
    "AmbiguousHistoryError",
    "ChatTemplate",
    "ControlTokenError",
    "Conversation",
    "ConversationError",
    "ConversationReport",
    "DeferredRows",
    "FormCost",
    "GenerationRecord",
    "KeptSets",
    "LedgerError",
    "MissingLogprobsError",
    "ParsedCompletion",
    "Plan",
    "PrefixTree",
    "RecordError",
    "Sample",
    "SampleError",
    "SnapshotError",
    "TemplateError",
    "TokenLedger",
    "TokenManager",
    "TokenSource",
    "TokenTrackingError",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "TreeLeaf",
    "TreeNode",
    "Turn",
    "UnsupportedContentError",
    "decode_sglang_experts",
    "decode_vllm_experts",
    "form_costs",
    "load_tokenizer",
    "prefix_tree",
    "turn_samples",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
