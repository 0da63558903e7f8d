"""A run's folder: what lies where, and how rollouts are written into it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from token_tracking.view import render_html

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.errors import ConfigError
from agent_flow.protocols import Rollout


class RunFolder:
    """`run.toml`, `journal/`, `samples/`, `trainer/` and `rollouts/ID/` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        folder = cls(path)
        try:
            for part in (folder.journal, folder.samples, folder.rollouts):
                part.mkdir(parents=True)
            (path / "run.toml").write_text(file.resolved(), encoding="utf-8")
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
        self, rollout: Rollout, facts: Mapping[str, str], provenance: Mapping[str, object]
    ) -> None:
        """Write everything a person or a script may want to know of one rollout."""
        folder = self.rollouts / rollout.rollout_id
        folder.mkdir(parents=True, exist_ok=True)
        report = rollout.conversation.report()
        template = rollout.conversation.template
        _write(folder / "messages.json", _document("messages", messages=list(rollout.messages)))
        _write(
            folder / "provenance.json",
            _document(
                "provenance",
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                task_id=rollout.task.instance_id,
                member=rollout.member,
                attempt=rollout.attempt,
                exit_status=rollout.exit_status,
                reward=rollout.reward,
                in_loss=rollout.in_loss,
                in_baseline=rollout.in_baseline,
                status=rollout.status,
                tests={} if rollout.verdict is None else dict(rollout.verdict.tests),
                produced_by=dict(provenance),
                template={
                    "source": template.source,
                    "tools": template.tools,
                    "variables": template.variables,
                    "fingerprint": template.fingerprint,
                },
                tokens=report.as_dict(),
            ),
        )
        (folder / "patch.diff").write_bytes(rollout.patch)
        (folder / "conversation.snapshot").write_bytes(rollout.conversation.to_bytes())
        if rollout.verdict is not None:
            (folder / "grader.log").write_text(
                rollout.verdict.log, encoding="utf-8", errors="surrogateescape"
            )
        page = render_html(rollout.conversation, title=rollout.task.instance_id, facts=facts)
        (folder / "view.html").write_text(page, encoding="utf-8", errors="replace")


def _document(kind: str, **values: object) -> bytes:
    document = {"kind": f"agent-flow-{kind}", "version": 1, **values}
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data + b"\n")
