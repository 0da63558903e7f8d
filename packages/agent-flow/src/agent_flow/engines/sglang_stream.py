"""What comes back from SGLang's `/generate` with `stream`: bytes to chunks, chunks to exact records.

Read from the source of SGLang 0.5.23 (`tokenizer_manager.py`) and from recorded answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Annotated, TypeVar, cast

import msgspec
import numpy as np
from token_tracking import GenerationRecord, KeptSets
from token_tracking.errors import TokenTrackingError
from token_tracking.sample import UNKNOWN_VERSION, FinishReason, LogprobKind

from agent_flow.engines.replica import ReplicaRequest
from agent_flow.errors import EngineError

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


TokenRow = tuple[float | None, TokenId, str | None]
"""One entry of `output_token_logprobs`: log-probability, token id, text (not asked for)."""


class Span(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` were sampled under weights `version`."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True):
    """`finish_reason` of the last chunk."""

    type: str
    matched: int | list[int] | str | None = None
    """The stop token, or the stop string."""
    message: str | None = None
    status_code: int | None = None
    """Of an abort that is an error."""


class MetaInfo(msgspec.Struct, frozen=True):
    """The part of `meta_info` that is used."""

    id: str
    finish_reason: Finish | None
    weight_version: str
    completion_tokens: int
    prompt_tokens: int | None = None
    """None in the last chunk of a call that was aborted in the waiting queue."""
    output_token_logprobs: list[TokenRow] = []
    output_token_sampling_mask: list[list[TokenId]] = []
    output_token_sampling_logprobs: list[float] = []
    weight_versions: list[Span] | None = None
    """In the last chunk alone."""


class Refusal(msgspec.Struct, frozen=True):
    """What comes in the place of the first chunk, under HTTP status 200, where a call is refused."""

    message: str = ""
    code: int = 400


class Chunk(msgspec.Struct, frozen=True):
    """One event of the stream."""

    output_ids: list[TokenId] = []
    meta_info: MetaInfo | None = None
    error: Refusal | None = None


def decode_chunk(data: bytes) -> Chunk:
    """One event's JSON.

    Raises:
        EngineError: it is none.
    """
    try:
        return msgspec.json.decode(data, type=Chunk)
    except msgspec.DecodeError as error:
        raise contradiction(f"an event that is no answer of /generate: {error}", data) from error


def contradiction(what: str, evidence: bytes = b"") -> EngineError:
    """An answer that cannot be true. Nothing of it is kept; another server may do better."""
    return EngineError(
        "contradiction", what, retryable=True, evidence=evidence[:2000].decode("utf-8", "backslashreplace")
    )


class EventReader:
    """Server-sent events out of bytes, however they are cut up and however long one is.

    (aiohttp's own `readline` refuses lines over 128 KiB; a cumulative chunk is longer.)
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Generator[bytes]:
        """The data of every event that is complete. Comments and other fields are left out."""
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._buffer[:end]).removesuffix(b"\r")
            del self._buffer[: end + 1]
            self._scanned = 0
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
        self._scanned = len(self._buffer)


class Answer:
    """What has come of one call, chunk by chunk.

    A chunk is cumulative (SGLang's default: everything so far) or brings the new tokens alone
    (`--incremental-streaming-output`). Which one it is, its own count `completion_tokens` and what is held
    decide, for each chunk anew; what is neither is an error.
    """

    def __init__(self, rid: str, prompt_tokens: int, *, kept_sets: bool, version_before: str | None) -> None:
        """`version_before`: what the server had named as its weights before the call was sent. None: nothing.

        `kept_sets`: the sampling mask was asked for.
        """
        self.ids: list[int] = []
        self.rows: list[TokenRow] = []
        self.kept: list[list[int]] = []
        self.kept_logprobs: list[float] = []
        self.finish: Finish | None = None
        self.rid = rid
        self._prompt_tokens = prompt_tokens
        self.kept_sets = kept_sets
        self._named = version_before
        self._pieces: list[tuple[int, str | None]] = []
        self._spans: list[Span] | None = None

    def add(self, meta: MetaInfo, output_ids: list[int]) -> None:
        """Take what a chunk brings.

        Raises:
            EngineError: it contradicts the call, itself, or an earlier chunk.
        """
        if self.finish is not None:
            raise self._wrong("a chunk after the last one")
        if meta.id != self.rid:
            raise self._wrong(f"an answer to call {meta.id!r}")
        if meta.prompt_tokens is not None and meta.prompt_tokens != self._prompt_tokens:
            raise self._wrong(f"it read {meta.prompt_tokens} prompt tokens; {self._prompt_tokens} were sent")
        new = meta.completion_tokens - len(self.ids)
        if new < 0:
            raise self._wrong(f"{meta.completion_tokens} output tokens after {len(self.ids)}")
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        ids = self._new_ids(output_ids, new, aborted=aborted)
        rows = self._new("output_token_logprobs", meta.output_token_logprobs, self.rows, new)
        if [row[1] for row in rows] != ids:
            raise self._wrong("output_ids and output_token_logprobs name other tokens")
        if self.kept_sets:
            masks = meta.output_token_sampling_mask
            self.kept += self._new("output_token_sampling_mask", masks, self.kept, new)
            values, held = meta.output_token_sampling_logprobs, self.kept_logprobs
            held += self._new("output_token_sampling_logprobs", values, held, new)
        self.ids += ids
        self.rows += rows
        self.finish = meta.finish_reason
        self._name(meta)

    def versions(self, read: Callable[[str], int]) -> list[tuple[int, int, int]]:
        """Runs of tokens of one weight version: start, end, version; equal neighbours are one run.

        The last chunk has spans that say it. A stream that was cut has none (nor have older servers):
        what a chunk brings then has the version that this chunk *and* the answer before it name, since it
        was sampled between the two; where they differ, or nothing came before, it is unknown (-2).

        Args:
            read: from the server's text to a version.

        Raises:
            EngineError: the spans do not cover the output exactly.
        """
        if not self.ids:
            return [(0, 0, UNKNOWN_VERSION if self._named is None else read(self._named))]
        runs: list[tuple[int, int, int]] = []
        start = 0
        for end, text in self._pieces if self._spans is None else self._covering(self._spans):
            version = UNKNOWN_VERSION if text is None else read(text)
            if runs and runs[-1][2] == version:
                runs[-1] = (runs[-1][0], end, version)
            elif end > start:
                runs.append((start, end, version))
            start = end
        return runs

    def _name(self, meta: MetaInfo) -> None:
        sure = meta.weight_version == self._named
        self._pieces.append((len(self.ids), meta.weight_version if sure else None))
        self._named = meta.weight_version
        self._spans = meta.weight_versions

    def _covering(self, spans: list[Span]) -> Generator[tuple[int, str]]:
        end = 0
        for span in spans:
            if span.start != end or span.end <= span.start:
                raise self._wrong(f"weight_versions {_shown(spans)} have a gap or overlap")
            end = span.end
            yield end, span.version
        if end != len(self.ids):
            raise self._wrong(f"weight_versions {_shown(spans)} for {len(self.ids)} output tokens")

    def _new_ids(self, ids: list[int], new: int, *, aborted: bool) -> list[int]:
        total = len(self.ids) + new
        if len(ids) == total and ids[: len(self.ids)] == self.ids:
            return ids[len(self.ids) :]
        # The last chunk of an incremental stream repeats the last token if the call was aborted in the queue
        # (`_handle_abort_req`), behind the new ones where both were sent as one.
        if aborted and len(ids) == new + 1 and ids[new:] == (self.ids + ids[:new])[-1:]:
            return ids[:new]
        return self._new("output_ids", ids, self.ids, new)

    def _new(self, name: str, values: list[T], held: list[T], new: int) -> list[T]:
        total = len(held) + new
        if len(values) == total and values[: len(held)] == held:
            return values[len(held) :]
        if len(values) == new:
            return values
        # Aborted in the queue, as above: what is new, and then everything.
        if len(values) == new + total and values[new:] == held + values[:new]:
            return values[:new]
        what = f"{len(values)} {name} for {new} new tokens after {len(held)}"
        raise self._wrong(f"{name} contradicts an earlier chunk" if len(values) == total else what)

    def _wrong(self, what: str) -> EngineError:
        return contradiction(f"call {self.rid}: {what}")


def _shown(spans: list[Span]) -> str:
    return ", ".join(f"{span.start}:{span.end} {span.version!r}" for span in spans)


def records_of(
    answer: Answer, request: ReplicaRequest, kind: LogprobKind, read: Callable[[str], int]
) -> tuple[GenerationRecord, ...]:
    """The answer as records: one for each run of tokens of one weight version, all but the last aborted.

    Args:
        answer: whole, or cut: then the last one is aborted too.
        request: what was sent.
        kind: which distribution `output_token_logprobs` belong to.
        read: from the server's text to a version.

    Raises:
        EngineError: the answer cannot be true.
    """
    finish = answer.finish or Finish("abort")
    if finish.type not in ("stop", "length", "abort"):
        raise contradiction(f"call {request.rid}: finish reason {finish.type!r}")
    if isinstance(finish.matched, str):
        # No stop string was sent. "NaN happened": the server has overwritten a token
        # (`_check_vocab_boundary_finish`).
        raise contradiction(f"call {request.rid}: stopped by the text {finish.matched!r}")
    runs = answer.versions(read)
    try:
        return tuple(
            _record(answer, request, kind, run, finish if run is runs[-1] else Finish("abort"))
            for run in runs
        )
    except TokenTrackingError as error:
        raise contradiction(f"call {request.rid}: {error}") from error


def _record(
    answer: Answer, request: ReplicaRequest, kind: LogprobKind, run: tuple[int, int, int], finish: Finish
) -> GenerationRecord:
    start, end, version = run
    matched = finish.matched[-1] if isinstance(finish.matched, list) else finish.matched
    values: Sequence[float | None] = [row[0] for row in answer.rows[start:end]]
    kept = None
    if answer.kept_sets:
        values, kind = answer.kept_logprobs[start:end], "processed"
        kept = KeptSets.from_lists(answer.kept[start:end])
    sampling = request.sampling
    return GenerationRecord(
        prompt_ids=np.concatenate([request.prompt_ids, np.array(answer.ids[:start], np.int32)]),
        output_ids=np.array(answer.ids[start:end], np.int32),
        logprobs=np.array(values, np.float32),
        logprob_kind=kind,
        finish_reason=cast("FinishReason", finish.type),
        stop_id=cast("int | None", matched),
        weight_version=version,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        min_p=sampling.min_p,
        kept_ids=None if kept is None else kept.ids,
        kept_offsets=None if kept is None else kept.offsets,
    )
