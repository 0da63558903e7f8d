"""A run's folder: what lies where, and how rollouts are written into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from token_tracking import Conversation
from token_tracking.sample import Source
from token_tracking.view import render_html

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.dump import NAME as DUMP
from agent_flow.dump import RolloutDump, write_dump
from agent_flow.errors import ConfigError, text_of
from agent_flow.events import RolloutRow
from agent_flow.messages_page import render_messages
from agent_flow.redaction import masked_file
from agent_flow.rollout import Rollout
from agent_flow.templates import delta_road

PROVENANCE, SNAPSHOT, PAGE = "provenance.json", "conversation.snapshot", "view.html"
_MESSAGES, _LOG = "messages.json", "grader.log"
_OWN = frozenset({PROVENANCE, SNAPSHOT, PAGE, DUMP, _MESSAGES, _LOG})


class TemplateSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat template is compiled from."""

    source: str
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a page shows of `provenance.json`."""

    kind: Literal["agent-flow-provenance"]
    version: Literal[1]
    rollout_id: str
    task_id: str
    exit_status: str
    reward: float | None
    in_loss: bool
    in_baseline: bool
    source: Source
    seconds: float
    artifacts: dict[str, int]
    """Sizes by file name."""
    template: TemplateSource

    def facts(self) -> dict[str, str]:
        """What stands on top of a rollout's page."""
        return {
            "task": self.task_id,
            "exit status": self.exit_status,
            "reward": "not graded" if self.reward is None else f"{self.reward:g}",
            "seconds": f"{self.seconds:.1f}",
            "source": self.source,
            "in loss / in baseline": f"{self.in_loss} / {self.in_baseline}",
            "rollout": self.rollout_id,
            **{name: f"{size:,} bytes" for name, size in self.artifacts.items()},
        }


class _Messages(msgspec.Struct, frozen=True, kw_only=True):
    """What a page shows of `messages.json`."""

    messages: list[dict[str, object]]


class RunFolder:
    """`run.toml`, `journal/`, `samples/`, `trainer/` and `rollouts/ID/` of one run.

    Args:
        path: The folder.
        pages: So many rollouts get their page when they are written.
    """

    def __init__(self, path: Path, pages: int = 0) -> None:
        self.path = path
        self._pages = iter(range(pages))  # taken by the threads that write rollouts
        self.journal = path / "journal"
        self.samples = path / "samples"
        self.trainer = path / "trainer"
        self.rollouts = path / "rollouts"

    @classmethod
    def create(cls, file: ConfigFile, clock: Clock) -> RunFolder:
        """Make a new, empty run folder below the configuration's `run_dir`.

        Raises:
            ConfigError: it cannot be made.
        """
        parent = Path(file.run.run_dir).expanduser().resolve()
        path = parent / f"{file.run.name}-{clock.stamp()}-{clock.new_id()[:6]}"
        folder = cls(path, file.run.pages)
        try:
            for part in (folder.journal, folder.samples, folder.rollouts):
                part.mkdir(parents=True)
            (path / "run.toml").write_text(masked_file(file).resolved(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot make the run folder: {error.strerror}",
                where=str(path),
                fix="set run_dir to a folder that you may write to",
            ) from error
        return folder

    def discard(self) -> None:
        """Remove a folder in which no rollout was started."""
        shutil.rmtree(self.path)

    def write_rollout(
        self,
        rollout: Rollout,
        source: Source,
        seconds: float,
        provenance: Mapping[str, object],
        *,
        dump: Callable[[], RolloutDump] | None = None,
    ) -> tuple[str, ...]:
        """Write everything a person or a script may want to know of one rollout.

        Returns:
            The files that could not be written, and why: one of them never costs the others.
        """
        folder = self.rollouts / rollout.rollout_id
        folder.mkdir(parents=True, exist_ok=True)
        failed: list[str] = []

        def write(name: object, into: Callable[[Path], object]) -> None:
            try:
                into(folder / text_of(name))
            except Exception as error:  # a flow may leave anything in a rollout
                failed.append(f"{text_of(name)}: {type(error).__name__}: {text_of(error)}")

        document = cache(partial(_provenance, rollout, source, seconds, provenance))

        def page(_: Path) -> None:
            write_page(folder, rollout.conversation, msgspec.json.decode(document(), type=Provenance))

        write(_MESSAGES, lambda path: _write(path, _document("messages", messages=list(rollout.messages))))
        write(PROVENANCE, lambda path: _write(path, document()))
        write(SNAPSHOT, lambda path: path.write_bytes(rollout.conversation.to_bytes()))
        if dump is not None:
            write(DUMP, lambda path: write_dump(path, dump()))
        if (verdict := rollout.verdict) is not None:
            write(_LOG, lambda path: path.write_text(verdict.log, encoding="utf-8", errors="surrogateescape"))
        if next(self._pages, None) is not None:
            write(PAGE, page)
        for name, content in rollout.artifacts.items():
            write(name, partial(_write_artifact, name, content))
        return tuple(failed)

    def write_index(self, rows: Sequence[RolloutRow]) -> Path:
        """A page that leads from tasks to the pages of their rollouts."""
        cells = "".join(
            f"<tr><td>{self._link(row)}<td>{escape(row.exit_status or row.dropped)}<td>{row.reward_text}"
            f"<td>{row.turns}<td>{row.prompt_tokens:,}<td>{row.sampled_tokens:,}<td>{row.seconds:.1f}"
            f'<td><code title="{row.rollout_id}">{row.rollout_id[:12]}</code></tr>'
            for row in rows
        )
        kept = [self.rollouts / row.rollout_id for row in rows]
        without = sum(folder.exists() and not (folder / PAGE).exists() for folder in kept)
        more = (
            f"<p>{without:,} more pages can be made: agent-flow view {escape(self.path.name)}"
            if without
            else ""
        )
        page = _INDEX.format(name=escape(self.path.name), rows=cells, more=more)
        (self.path / "index.html").write_text(page, encoding="utf-8")
        return self.path / "index.html"

    def _link(self, row: RolloutRow) -> str:
        page = self.rollouts / row.rollout_id / PAGE
        task = escape(row.task)
        return f'<a href="{page.relative_to(self.path)}">{task}</a>' if page.exists() else task


_INDEX = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .35rem .8rem; border-bottom: 1px solid #8884; white-space: nowrap; }}
td:nth-child(n+3):nth-child(-n+7) {{ text-align: right; font-variant-numeric: tabular-nums; }}
code {{ opacity: .6; }}
</style>
<h1>{name}</h1>
<div class="wide"><table><tr><th>task<th>exit status<th>reward<th>turns<th>prompt tokens<th>sampled tokens
<th>seconds<th>rollout</tr>{rows}</table></div>
{more}
"""


def write_page(folder: Path, conversation: Conversation, provenance: Provenance) -> Path:
    """The self-contained page of one rollout, with every token, or its messages where there are none."""
    title, facts = provenance.task_id, provenance.facts()
    if conversation.turns:
        page = render_html(conversation, title=title, facts=facts)
    else:
        found = msgspec.json.decode((folder / _MESSAGES).read_bytes(), type=_Messages)
        page = render_messages(found.messages, title=title, facts=facts)
    (folder / PAGE).write_text(page, encoding="utf-8", errors="replace")
    return folder / PAGE


def _provenance(rollout: Rollout, source: Source, seconds: float, produced_by: Mapping[str, object]) -> bytes:
    template = rollout.conversation.template
    return _document(
        "provenance",
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        task_id=rollout.task.instance_id,
        member=rollout.member,
        attempt=rollout.attempt,
        mode=rollout.mode,
        exit_status=text_of(rollout.exit_status),
        # Of a rollout that was dropped they may be anything: only what is delivered was checked.
        reward=rollout.reward if type(rollout.reward) in (int, float) else None,
        in_loss=rollout.in_loss is True,
        in_baseline=rollout.in_baseline is True,
        status=rollout.status,
        source=source,
        seconds=seconds,
        turn_rewards=rollout.turn_rewards,
        extra=rollout.extra,
        artifacts={name: len(data) for name, data in rollout.artifacts.items() if _is_file(name, data)},
        tests={} if rollout.verdict is None else dict(rollout.verdict.tests),
        produced_by=dict(produced_by),
        template={
            "source": template.source,
            "tools": template.tools,
            "variables": template.variables,
            "fingerprint": template.fingerprint,
            "delta": delta_road(template),
        },
        tokens=rollout.conversation.report().as_dict(),
    )


def _document(kind: str, **values: object) -> bytes:
    document = {"kind": f"agent-flow-{kind}", "version": 1, **values}
    try:
        data = msgspec.json.encode(document, enc_hook=str)
    except UnicodeEncodeError:
        # Half of a surrogate pair, as `errors="surrogateescape"` makes of a byte that is no UTF-8.
        plain = json.dumps(msgspec.to_builtins(document, enc_hook=str), ensure_ascii=False)
        data = plain.encode("utf-8", "replace")
    return msgspec.json.format(data, indent=1)


def _is_file(name: object, data: object) -> bool:
    """Whether an artifact can be a file: bytes under a plain name that is none of this folder's own."""
    return isinstance(data, bytes | bytearray) and _is_plain(name)


def _is_plain(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in {"", ".", "..", *_OWN}
        and not set("/\\\0") & set(name)
        and text_of(name) == name
    )


def _write_artifact(name: object, data: object, path: Path) -> None:
    if not _is_plain(name):
        raise ValueError("not the plain name of a file of its own")
    if not _is_file(name, data):
        raise TypeError(f"{type(data).__name__}, need bytes")
    path.write_bytes(cast("bytes", data))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data + b"\n")
