"""A run's pages, written again from its files; what cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
from token_tracking import ChatTemplate, Conversation
from token_tracking.errors import TokenTrackingError
from token_tracking.snapshot import KIND_CONVERSATION, ConversationImage, unpack

from agent_flow.config import load_config
from agent_flow.dump import NAME as DUMP
from agent_flow.dump import read_dump
from agent_flow.errors import RecordingError
from agent_flow.events import RolloutRow
from agent_flow.journal import read_events
from agent_flow.run_folder import PAGE, PROVENANCE, SNAPSHOT, Provenance, RunFolder, write_page
from agent_flow.templates import tokenizer_of


def view_rollout(folder: Path) -> Path:
    """Write the page of one rollout again; returns its path.

    Raises:
        RecordingError: one of its files is missing or damaged.
        ConfigError: the run's configuration or its tokenizer is not there any more.
    """
    provenance = _provenance(folder)
    tokenizer = tokenizer_of(load_config(folder.parent.parent / "run.toml"))
    given = provenance.template
    try:
        template = ChatTemplate.compile(
            tokenizer, given.source, tools=given.tools, template_kwargs=given.variables
        )
        conversation = Conversation.from_bytes(_read(folder / SNAPSHOT), template)
    except TokenTrackingError as error:
        raise RecordingError(str(error), where=str(folder / SNAPSHOT)) from error
    try:
        return write_page(folder, conversation, provenance)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordingError(f"its page cannot be made: {error}", where=str(folder)) from error


def view_run(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the index of a run again, and the pages that are missing; returns its path and what is broken.

    Raises:
        RecordingError: there is no run.
        JournalError: its journal cannot be read.
    """
    run = RunFolder(folder)
    if not run.journal.is_dir():
        raise RecordingError("no run folder: it has no journal", where=str(folder))
    rows = _rows(run)
    broken: list[str] = []
    for row in rows:
        place = run.rollouts / row.rollout_id
        if row.dropped and not place.exists():
            continue
        found = _broken(place)
        if not found and not (place / PAGE).exists():
            try:
                view_rollout(place)
            except RecordingError as error:
                found.append(str(error))
        broken += found
    return run.write_index(rows), tuple(broken)


def _broken(folder: Path) -> list[str]:
    """What of a rollout's files cannot be read."""
    found: list[str] = []
    try:
        _provenance(folder)
    except RecordingError as error:
        found.append(str(error))
    try:
        unpack(KIND_CONVERSATION, _read(folder / SNAPSHOT), ConversationImage)
    except (RecordingError, TokenTrackingError) as error:
        found.append(str(error) if isinstance(error, RecordingError) else f"{folder / SNAPSHOT}: {error}")
    if (folder / DUMP).exists():
        try:
            read_dump(folder / DUMP)
        except RecordingError as error:
            found.append(str(error))
    return found


def _provenance(folder: Path) -> Provenance:
    path = folder / PROVENANCE
    try:
        return msgspec.json.decode(_read(path), type=Provenance)
    except msgspec.DecodeError as error:
        raise RecordingError(f"does not decode: {error}", where=str(path)) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordingError(f"cannot be read: {error.strerror}", where=str(path)) from error


class _Started(msgspec.Struct, frozen=True, kw_only=True):
    task: str


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal's `delivered` and `dropped` say."""

    event: str
    rollout_id: str
    attempt: int = 0
    reward: float | None = None
    exit_status: str = ""
    reason: str = ""
    message: str = ""
    samples: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0


def _rows(run: RunFolder) -> list[RolloutRow]:
    rows: list[RolloutRow] = []
    tasks: dict[str, str] = {}
    for event in read_events(run.journal):
        if event["event"] == "started":
            tasks[str(event["rollout_id"])] = msgspec.convert(event, _Started).task
        elif event["event"] in ("delivered", "dropped"):
            end = msgspec.convert(event, _Ended)
            rows.append(
                RolloutRow(
                    rollout_id=end.rollout_id,
                    task=tasks[end.rollout_id],
                    attempt=end.attempt,
                    exit_status=end.exit_status,
                    reward=end.reward,
                    turns=end.turns,
                    prompt_tokens=end.prompt_tokens,
                    sampled_tokens=end.sampled_tokens,
                    seconds=end.seconds,
                    samples=end.samples,
                    dropped=end.reason,
                    note=end.message,
                )
            )
    return rows
