"""What `help()` shows: each field of what users fill in or read, with its meaning."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_args

import msgspec
import pytest
from trainer_bridge import (
    Batch,
    Collator,
    ProducerStats,
    ReceiverConfig,
    ReceiverStats,
    SenderConfig,
    SenderStats,
    Timing,
)
from trainer_bridge.advantages import AdvantageRule
from trainer_bridge.config import CommitOn, KeepCommitted, PartialGroups, RankSplit, SettleLevel
from trainer_bridge.credit import Credit
from trainer_bridge.weights import WeightRule

KINDS = [Batch, ReceiverConfig, SenderConfig, Timing, ReceiverStats, SenderStats, ProducerStats]
ITEM = re.compile(r"^    (\w+): (.+?)(?=^    \w+: |^\S|\Z)", re.MULTILINE | re.DOTALL)


def meanings(kind: Any, heading: str) -> dict[str, str]:
    """Name -> text of one section of a docstring."""
    section = (inspect.getdoc(kind) or "").split(f"\n{heading}:\n")[1]
    return {name: " ".join(text.split()) for name, text in ITEM.findall(section)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_meaning(kind: Any) -> None:
    """A string under a field is seen by editors, and not by `help()`: say it under `Attributes:`."""
    fields = msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else dataclasses.fields(kind)
    said = meanings(kind, "Attributes")
    assert list(said) == [field.name for field in fields]
    assert all(len(text) > 10 for text in said.values()), said


def test_choices_are_explained_where_they_are_made() -> None:
    of_config = meanings(ReceiverConfig, "Attributes") | meanings(SenderConfig, "Attributes")
    of_collator = meanings(Collator, "Args")
    for text, alias in (
        (of_config["settle"], SettleLevel),
        (of_config["partial_groups"], PartialGroups),
        (of_config["commit_on"], CommitOn),
        (of_config["rank_split"], RankSplit),
        (of_config["keep_committed"], KeepCommitted),
        (of_collator["weights"], WeightRule),
        (of_collator["advantages"], AdvantageRule),
        (of_collator["credit"], Credit),
    ):
        assert all(f"`{choice}`: " in text for choice in get_args(alias)), text
