"""Random sequences of calls against plain models: the ledger, the conversation, an engine that is cut.

Each default run is short and the same every time; the `slow` ones draw many more.
"""

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from token_tracking import (
    AmbiguousHistoryError,
    ChatTemplate,
    Conversation,
    ConversationError,
    GenerationRecord,
    KeptSets,
    LedgerError,
    RecordError,
    SnapshotError,
    TemplateError,
    TokenLedger,
    TokenManager,
    TokenSource,
    TokenTrackingError,
    UnsupportedContentError,
)
from token_tracking.backends.hf import HFTokenizer
from token_tracking.history.branch import Branch
from token_tracking.same_messages import same
from token_tracking.testing import IDENTITY, completion, trl_template

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]


def few(examples: int, steps: int = 50, *, shrink: bool = False) -> settings:
    """Settings for a run that is the same every time; to shrink a failure takes minutes."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tool(content: str, n: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{n}", "name": "bash", "content": content}


# --- the ledger

ID = st.integers(0, 2**31 - 1)
IDS = st.lists(ID, max_size=300)
VERSION = st.sampled_from([-2, 0, 7, 2**31 - 1])
NAN = int(np.float32(np.nan).view(np.uint32))


@dataclass
class Row:
    """One token as it must be held."""

    id: int
    source: TokenSource
    logprob: int = NAN
    """The bits of a float32."""
    version: int = -1
    kept: list[int] = field(default_factory=list[int])


def rows(ledger: TokenLedger) -> list[Row]:
    sets = ledger.kept_sets()
    offsets = [0] * (len(ledger) + 1) if sets is None else sets.offsets.tolist()
    kept = [] if sets is None else sets.ids.tolist()
    columns = zip(
        ledger.ids.tolist(),
        ledger.sources.tolist(),
        ledger.logprobs.view(np.uint32).tolist(),
        ledger.versions.tolist(),
        ledger.mask.tolist(),
        offsets[:-1],
        offsets[1:],
        strict=True,
    )
    held: list[Row] = []
    for token, source, logprob, version, mask, low, high in columns:
        assert mask == (source == TokenSource.SAMPLED)
        held.append(Row(token, TokenSource(source), logprob, version, kept[low:high]))
    return held


class Ledgers(RuleBasedStateMachine):
    """Appends of every kind, refused ones, forks of forks and snapshots, against lists of rows."""

    @initialize()
    def start(self) -> None:
        self.held: list[tuple[TokenLedger, list[Row]]] = [(TokenLedger(), [])]
        self.manager, self.managed = TokenManager(), list[Row]()

    def pick(self, n: int) -> tuple[TokenLedger, list[Row]]:
        return self.held[n % len(self.held)]

    @rule(n=st.integers(0, 9), ids=IDS, repair=st.booleans(), form=st.sampled_from([list, tuple, np.array]))
    def append_unsampled(self, n: int, ids: list[int], repair: bool, form: Any) -> None:
        ledger, model = self.pick(n)
        given_ids = np.array(ids, np.int64) if form is np.array else form(ids)
        append = ledger.append_repair if repair else ledger.append_prompt
        assert append(given_ids) == (len(model), len(model) + len(ids))
        model += [Row(i, TokenSource.REPAIR if repair else TokenSource.TEMPLATE) for i in ids]

    @rule(n=st.integers(0, 9), ids=IDS, version=VERSION, recorded=st.booleans(), kept=st.integers(0, 3))
    def append_sampled(self, n: int, ids: list[int], version: int, recorded: bool, kept: int) -> None:
        ledger, model = self.pick(n)
        self.sample(ledger, model, ids, version, recorded, kept)

    def sample(
        self, ledger: TokenLedger, model: list[Row], ids: list[int], version: int, recorded: bool, kept: int
    ) -> None:
        values = -np.arange(len(ids), dtype=np.float32) if recorded else None
        lists = [sorted({*range(at % (kept + 1)), i}) for at, i in enumerate(ids)] if kept else None
        sets = None if lists is None else KeptSets.from_lists(lists)
        array = np.array(ids, np.int32)
        assert ledger.append_sampled(array, values, version, sets) == (len(model), len(model) + len(ids))
        bits = [NAN] * len(ids) if values is None else values.view(np.uint32).tolist()
        model += [
            Row(i, TokenSource.SAMPLED, bits[at], version, [] if lists is None else lists[at])
            for at, i in enumerate(ids)
        ]
        for given_array in (array, *(() if values is None else (values,)), *(sets or ())):
            given_array[...] = 0  # what was given belongs to the caller

    @rule(ids=IDS, version=VERSION, recorded=st.booleans(), sampled=st.booleans())
    def use_the_list_face(self, ids: list[int], version: int, recorded: bool, sampled: bool) -> None:
        if not sampled:
            self.manager.add_prompt(ids)
            self.managed += [Row(i, TokenSource.TEMPLATE) for i in ids]
            return
        values = [-0.25 * at for at in range(len(ids))] if recorded else None
        self.manager.add_response(ids, values, weight_version=version)
        bits = [NAN] * len(ids) if values is None else np.array(values, np.float32).view(np.uint32).tolist()
        self.managed += [Row(i, TokenSource.SAMPLED, b, version) for i, b in zip(ids, bits, strict=True)]

    @rule()
    def reset(self) -> None:
        self.held.append((self.manager.ledger, self.managed))
        self.manager.reset()
        self.managed = []

    @rule(n=st.integers(0, 9), bad=st.integers(0, 14))
    def refused(self, n: int, bad: int) -> None:
        ledger, _ = self.pick(n)
        ids: Any = [1, 2]
        sets = KeptSets.from_lists
        wrong_dtype = KeptSets(np.array([1, 2], np.int64), np.array([0, 1, 2]))  # type: ignore[arg-type]
        calls: list[Callable[[], object]] = [
            lambda: ledger.append_prompt([1, -1]),
            lambda: ledger.append_prompt([2**31]),
            lambda: ledger.append_prompt(np.array([0.5])),
            lambda: ledger.append_repair(np.array([[1]])),
            lambda: ledger.append_sampled(ids, [-0.5], 0),
            lambda: ledger.append_sampled(ids, [-0.5, float("nan")], 0),
            lambda: ledger.append_sampled(ids, [-0.5, 1.0], 0),
            lambda: ledger.append_sampled(ids, [-0.5, -1e300], 0),
            lambda: ledger.append_sampled(ids, None, -1),
            lambda: ledger.append_sampled(ids, None, True),
            lambda: ledger.append_sampled(ids, None, 0, sets([[1]])),
            lambda: ledger.append_sampled(ids, None, 0, sets([[1], [3]])),
            lambda: ledger.append_sampled(ids, None, 0, wrong_dtype),
            lambda: ledger.fork(len(ledger) + 1),
            lambda: self.manager.add_response([5], [-0.5, -0.5]),
        ]
        with pytest.raises(LedgerError):
            calls[bad]()

    @rule(n=st.integers(0, 9), cut=st.integers(0, 1000))
    def fork(self, n: int, cut: int) -> None:
        ledger, model = self.pick(n)
        length = min(cut, len(model))
        child = ledger.fork(length)
        assert child.shared_length(ledger) == length
        self.held.append((child, copy.copy(model[:length])))

    @rule(n=st.integers(0, 9))
    def restore(self, n: int) -> None:
        ledger, model = self.pick(n)
        data = ledger.to_bytes()
        again = TokenLedger.from_bytes(data)
        assert again.to_bytes() == data
        self.held.append((again, list(model)))

    @rule(n=st.integers(0, 9), at=st.integers(0, 10_000), bit=st.integers(0, 7))
    def damage(self, n: int, at: int, bit: int) -> None:
        data = bytearray(self.pick(n)[0].to_bytes())
        data[at % len(data)] ^= 1 << bit
        with pytest.raises(SnapshotError):
            TokenLedger.from_bytes(bytes(data))

    @invariant()
    def what_was_written_is_there(self) -> None:
        for ledger, model in [*self.held, (self.manager.ledger, self.managed)]:
            channels = ledger.channels()
            assert {len(column) for column in channels.values()} == {len(model)} == {len(ledger)}
            assert not any(column.flags.writeable for column in channels.values())
            assert rows(ledger) == model
        assert self.manager.token_ids == [row.id for row in self.managed]
        assert self.manager.loss_mask == [int(row.source == TokenSource.SAMPLED) for row in self.managed]


@pytest.mark.original("A-tokens-together")
@pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_a_ledger_is_a_list_of_rows(examples: int):
    run_state_machine_as_test(Ledgers, settings=few(examples, 25))


# --- the conversation

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
PIECES = st.lists(
    st.sampled_from(
        [
            "ok",
            "\n",
            " \n\n",
            "<think>\nhm\n</think>\n\n",
            "<think>",
            "</think>",
            CALL,
            CALL,
            "\n" + CALL,
            '<tool_call>\n{"name"',
            "<|im_end|>",
            "<|user|>\nx",
            "é\u0301\u4e16\U0001f642",
            "\ufdd0|\ufdd1",
            "/nothink",
        ]
    ),
    min_size=1,
    max_size=4,
)
HEARD = st.sampled_from(["out", "", "\nlines\n\n", " <|im_end|>\n<|im_start|>assistant", "é\u0301", "\ufdd0"])
ENDS = st.sampled_from(
    ["stop", "stop", "stop", "stop string", "length", "length at the stop", "abort", "abort"]
)
SPOKEN = tuple[int, int, int]
"""Id, bits of the log-probability, weight version."""


SLOW = ["qwen3", "qwen2_5", "qwen3_8", "glm4moe", "llama3_1", "deepseekv3", "phi3", "lfm2"]


class Conversations(RuleBasedStateMachine):
    """A harness with its own message list and an engine, against what each of them said.

    `twins[0]` is the conversation; after a restore `twins[1]` is made of its bytes, and both get every call.
    """

    def __init__(self, template: ChatTemplate, other: ChatTemplate):
        super().__init__()
        self.templates = (template, other)
        self.twins = [Conversation(template)]
        self.history: list[Message] = [{"role": "system", "content": "sys"}, user("fix it")]
        self.sampled: list[list[SPOKEN]] = []
        self.part: Message | None = None
        """What an aborted turn has said so far; None: no turn is open."""
        self.advance(self.history)

    @property
    def waiting(self) -> bool:
        return self.part is not None or self.history[-1]["role"] != "assistant"

    def both(self, call: Callable[[Conversation], Any]) -> Any:
        """Call on each twin; they must do the same."""
        done: list[Any] = []
        refused: list[TokenTrackingError] = []
        for twin in self.twins:
            try:
                done.append(call(twin))
            except TokenTrackingError as error:
                refused.append(error)
        if refused:
            assert not done
            assert len({(type(error), str(error)) for error in refused}) == 1
            raise refused[0]
        assert all(result == done[0] for result in done)
        return done[0]

    def unchanged(
        self, call: Callable[[Conversation], Any], error: type[Exception] | tuple[Any, ...]
    ) -> None:
        before = self.twins[0].to_bytes()
        with pytest.raises(error):
            self.both(call)
        assert self.twins[0].to_bytes() == before

    def advance(self, history: list[Message], template: ChatTemplate | None = None) -> None:
        given_list = copy.deepcopy(history)
        before = self.twins[0].to_bytes()
        try:
            plan = self.both(
                lambda c: (c.plan(given_list, template=template), c.advance(given_list, template=template))
            )
        except AmbiguousHistoryError:
            assert self.twins[0].to_bytes() == before
            self.history = [dict(message) for message in self.twins[0].messages]
            return
        assert plan[0] == plan[1]
        self.history = history
        self.part = self.open_part()
        assert given_list == history

    @property
    def last_number(self) -> int:
        """The number of the current branch's last turn."""
        return self.twins[0].branches[self.twins[0].current].turns[-1].number

    def open_part(self) -> Message | None:
        """What the open turn has said; an `advance` may have come back to a branch with one."""
        conversation = self.twins[0]
        if not conversation.open_turn:
            return None
        return conversation.template.parse([i for i, _, _ in self.sampled[self.last_number]]).message()

    # The engine.

    @precondition(lambda self: self.waiting)
    @rule(
        pieces=PIECES,
        end=ENDS,
        stop=st.integers(0, 9),
        recorded=st.booleans(),
        version=VERSION,
        cut=st.integers(0, 3),
    )
    def say(self, pieces: list[str], end: str, stop: int, recorded: bool, version: int, cut: int) -> None:
        template = self.twins[0].template
        encode = template.tokenizer.encode_plain
        # Piece by piece: these are seldom the ids that the tokenizer would choose for the whole text.
        ids = [i for piece in pieces for i in encode(piece)]
        change: dict[str, Any] = {"finish_reason": end}
        if end in ("stop", "length at the stop"):
            change["finish_reason"] = end.split()[0]
            ids.append(sorted(template.stop_ids)[stop % len(template.stop_ids)])
        elif end == "stop string":
            ids += encode("END")
            change = {"finish_reason": "stop", "stop_string": "END"}
        elif end == "abort":
            ids = ids[:cut]
        logprobs = -np.arange(len(ids), dtype=np.float32) / 8 if recorded else None
        answer = GenerationRecord(
            prompt_ids=self.twins[0].prompt_ids().copy(),
            output_ids=np.array(ids, np.int32),
            logprobs=logprobs,
            logprob_kind="raw" if recorded else "none",
            weight_version=version,
            **change,
        )
        was_open = self.part is not None
        message = self.both(lambda c: c.record(answer))
        bits = [NAN] * len(ids) if logprobs is None else logprobs.view(np.uint32).tolist()
        if ids and not was_open:
            self.sampled.append([])
        if ids:
            self.sampled[self.last_number] += [(i, b, version) for i, b in zip(ids, bits, strict=True)]
        self.part = self.open_part()
        if end == "abort":
            assert message == (self.part or {"role": "assistant", "content": ""})
        else:
            assert self.part is None
            self.history = [*self.history, copy.deepcopy(message)]
        message["content"] = "changed by the harness"

    @precondition(lambda self: self.waiting)
    @rule(bad=st.integers(0, 8))
    def lie(self, bad: int) -> None:
        good = completion(self.twins[0], "ok", logprob=-0.5)
        sent, ids = good.prompt_ids.copy(), good.output_ids
        if bad == 3 and len(sent) <= 8:
            return  # so short a prompt may be what a model samples: an echo of it is not told from that
        wrong = sent.copy()
        wrong[len(wrong) // 2] += 1
        stop_id = good.stop_id

        def with_ids(*parts: Any, **change: Any) -> Callable[[Conversation], Any]:
            output = np.concatenate(parts).astype(np.int32)
            values = {"prompt_ids": sent, "output_ids": output, "finish_reason": "stop", **change}
            return lambda c: c.record(GenerationRecord(**values))

        self.unchanged(
            [
                with_ids(ids, prompt_ids=wrong),
                with_ids(ids, prompt_ids=sent[:-1]),
                with_ids(ids, prompt_ids=np.concatenate([sent, sent])),
                with_ids(sent, ids),
                with_ids(ids, ids[:1]),
                with_ids(ids[:-1]),
                with_ids([2_000_000], finish_reason="length"),
                with_ids(ids, stop_id=stop_id, completion_tokens=len(ids) + 1),
                lambda c: c.record(good, {"role": "user", "content": "x"}),
            ][bad],
            ConversationError if bad == 8 else RecordError,
        )

    @precondition(lambda self: self.part is not None)
    @rule()
    def close(self) -> None:
        message = self.both(lambda c: c.close_turn())
        assert message == self.part
        self.part = None
        self.history = [*self.history, copy.deepcopy(message)]

    # The harness.

    @precondition(lambda self: not self.waiting)
    @rule(heard=HEARD, also=st.booleans(), by=st.sampled_from(["advance", "advance", "add"]))
    def answer(self, heard: str, also: bool, by: str) -> None:
        calls = self.history[-1].get("tool_calls", ())
        new = [tool(heard, n) for n in range(len(calls))]
        new += [user(heard)] if also or not new else []
        if by == "add":
            before = self.twins[0].to_bytes()
            try:
                self.both(lambda c: c.add(new))
            except ConversationError:
                assert self.twins[0].to_bytes() == before
            else:
                self.history = [*self.history, *new]
                return
        self.advance([*self.history, *new])

    @rule(heard=HEARD)
    def add_to_what_was_not_sent(self, heard: str) -> None:
        if self.part is None:
            self.advance([*self.history, user(heard)])

    @precondition(lambda self: self.part is not None)
    @rule(heard=HEARD)
    def pass_the_open_turn(self, heard: str) -> None:
        assert self.part is not None
        self.advance([*self.history, self.part, user(heard)])

    @rule(again=st.integers(1, 2))
    def send_again(self, again: int) -> None:
        for _ in range(again):
            self.advance(list(self.history))

    @rule(back=st.integers(0, 3))
    def retry(self, back: int) -> None:
        turns = [at for at, message in enumerate(self.history) if message["role"] == "assistant"]
        if turns:
            self.advance(self.history[: turns[-1 - back % len(turns)]])

    @rule(at=st.integers(0, 9), text=HEARD)
    def edit(self, at: int, text: str) -> None:
        at %= len(self.history)
        history = copy.deepcopy(self.history)
        history[at] = {**history[at], "content": f"edited {text}"}
        self.advance(history)

    @precondition(lambda self: len(self.history) > 3)
    @rule(keep=st.integers(0, 2))
    def compact(self, keep: int) -> None:
        tail = self.history[-keep:] if keep else []
        while tail and tail[0]["role"] == "tool":
            tail = tail[1:]
        self.advance([self.history[0], user("summary: all fine"), *tail])

    @rule(which=st.integers(0, 1))
    def change_tools(self, which: int) -> None:
        self.advance(list(self.history), self.templates[which])

    @rule()
    def spell_arguments_otherwise(self) -> None:
        """A harness that hands calls back as objects."""
        history = copy.deepcopy(self.history)
        for message in history:
            for call in message.get("tool_calls", ()):
                if isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        self.advance(history)

    @rule(bad=st.integers(0, 4))
    def call_wrongly(self, bad: int) -> None:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
        rewards = [0.5] * (len(self.sampled) + 1)
        calls: list[tuple[Callable[[Conversation], Any], type[Exception]]] = [
            (lambda c: c.advance([*self.history, image]), UnsupportedContentError),
            (lambda c: c.advance([*self.history, user("ab\udcff")]), TemplateError),
            (lambda c: c.advance([*self.history, {"content": "x"}]), TemplateError),
            (lambda c: c.samples(**IDENTITY, turn_rewards=rewards), ConversationError),
        ]
        if self.part is None:
            calls.append((lambda c: c.close_turn(), ConversationError))
        self.unchanged(*calls[bad % len(calls)])

    @rule()
    def restore(self) -> None:
        data = self.twins[0].to_bytes()
        again = Conversation.from_bytes(data, *self.templates)
        assert again.to_bytes() == data
        self.twins = [self.twins[-1], again]

    # What must hold.

    @invariant()
    def the_harness_and_the_conversation_agree(self) -> None:
        conversation = self.twins[0]
        assert conversation.open_turn == (self.part is not None)
        assert len(conversation.messages) == len(self.history)
        assert all(same(a, b) for a, b in zip(conversation.messages, self.history, strict=True))
        if self.waiting:
            self.both(lambda c: c.prompt_ids().tolist())
        else:
            self.unchanged(lambda c: c.prompt_ids(), ConversationError)
        assert len({twin.to_bytes() for twin in self.twins}) == 1

    @invariant()
    def channels_fit(self) -> None:
        for branch in self.twins[0].branches:
            ledger = branch.ledger
            assert len({len(column) for column in ledger.channels().values()}) == 1
            sampled = ledger.sources == TokenSource.SAMPLED
            assert np.array_equal(ledger.mask == 1, sampled)
            assert (ledger.versions[~sampled] == -1).all()
            assert (ledger.versions[sampled] != -1).all()
            assert np.isnan(ledger.logprobs[~sampled]).all()
            spans = [(turn.start, turn.end) for turn in branch.turns]
            assert sum(end - start for start, end in spans) == np.count_nonzero(sampled)
            assert all(sampled[start:end].all() for start, end in spans)
            repaired = np.flatnonzero(ledger.sources == TokenSource.REPAIR)
            ends = [turn.end for turn in branch.turns if turn.last.stop_id is None]
            assert all(at in ends or at - 1 in repaired for at in repaired.tolist())

    @invariant()
    def every_sampled_token_is_trained_once(self) -> None:
        conversation = self.twins[0]
        assert conversation.turns == len(self.sampled)
        assert conversation.sampled_tokens == sum(map(len, self.sampled))
        own = [branch for branch in conversation.branches if len(branch.turns) > branch.inherited]
        numbers = [turn.number for branch in own for turn in branch.turns[branch.inherited :]]
        assert sorted(numbers) == list(range(len(self.sampled)))
        parts = conversation.samples(**IDENTITY, turn_rewards=[float(n) for n in range(len(self.sampled))])
        assert [part.part for part in parts] == list(range(len(own)))
        for part, branch in zip(parts, own, strict=True):
            for index, turn in enumerate(branch.turns):
                spoken = self.sampled[turn.number]
                span = slice(turn.start, turn.end)
                bits = np.ascontiguousarray(part.logprobs[span]).view(np.uint32).tolist()
                held = zip(part.token_ids[span].tolist(), bits, part.versions[span].tolist(), strict=True)
                assert list(held) == spoken
                assert (part.loss_mask[span] == (index >= branch.inherited)).all()
            assert part.trained_tokens == sum(
                len(self.sampled[turn.number]) for turn in branch.turns[branch.inherited :]
            )
            rewards = [turn.reward for turn in part.turns if turn.reward is not None]
            assert rewards == [turn.number for turn in branch.turns[branch.inherited :]]

    @invariant()
    def prompts_are_renders(self) -> None:
        conversation = self.twins[0]
        report = conversation.report()
        json.dumps(report.as_dict())
        assert report.broken == 0, report.lines()
        assert len(report.prompts) == len(self.sampled)
        assert all(count > 0 for count in conversation.findings().values())
        for branch in report.branches:
            assert branch.why
        for check in report.prompts:
            branch = conversation.branches[check.branch]
            assert (check.verdict == "rewritten") == bool(check.rewrites)
            assert not any(rewrite.touches_sampled for rewrite in check.rewrites)
            if check.verdict == "equal":
                self.equals_render(branch, check.turn)

    def equals_render(self, branch: Branch, index: int) -> None:
        """The same question as the report's, asked with plain renders: text, and ids of control tokens."""
        turn, tokenizer = branch.turns[index], branch.template.tokenizer
        held = branch.ledger.ids[: turn.start]
        shown = branch.messages[: turn.message_index]
        if any(before.cross_stop for before in branch.turns[:index]):
            return
        assert tokenizer.decode(held.tolist()) == branch.template.render(shown, add_generation_prompt=True)
        marked = branch.control.encode(branch.template.render_marked(shown, branch.control, generate=True))
        special = [*tokenizer.special_ids]
        assert held[np.isin(held, special)].tolist() == [i for i in marked if i in tokenizer.special_ids]


def machine(compiled: Compile, name: str, family: bool) -> Callable[[], Conversations]:
    templates = [compiled(name, family=family, tools=tools) for tools in (True, False)]
    return lambda: Conversations(*templates)


@pytest.mark.parametrize(("name", "family"), [("qwen3", False), ("glm4moe", True)])
def test_a_conversation_is_what_was_said(name: str, family: bool, compiled: Compile):
    run_state_machine_as_test(machine(compiled, name, family), settings=few(16, 16))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "family"),
    [(name, name not in ("qwen3", "qwen2_5", "qwen3_8")) for name in SLOW],
)
def test_a_conversation_is_what_was_said_long(name: str, family: bool, compiled: Compile):
    run_state_machine_as_test(machine(compiled, name, family), settings=few(200, 30, shrink=True))


# --- an engine that is cut

SCRIPT: list[tuple[str, str]] = [
    ("<think>\nlook \u4e16\U0001f642\n</think>\n\nI look.\n" + CALL, "a.py\n\nb.py <|im_end|>"),
    ("<think>\ntest\n</think>\n\n" + CALL + "\n" + CALL, "1 passed"),
    ("<think>\nok\n</think>\n\nDone.", ""),
]
"""What is sampled in each turn, and what its tool calls answer."""


class Engine:
    """A deterministic engine: the ids so far decide what it samples, and with which log-probability."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        encode = template.tokenizer.encode_plain
        assert template.close_id is not None
        self.turns = [[*encode(text), template.close_id] for text, _ in SCRIPT]

    def sample(self, prompt: Any, turn: int, done: int, count: int | None) -> GenerationRecord:
        """The next `count` tokens of a turn of which `done` are in the prompt; None: to its end."""
        rest = self.turns[turn][done:]
        ids = rest if count is None else rest[:count]
        before = [*prompt.tolist(), *ids]
        logprobs = [self.logprob(before[: len(prompt) + at + 1]) for at in range(len(ids))]
        return GenerationRecord(
            prompt_ids=np.array(prompt),
            output_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            logprob_kind="processed",
            finish_reason="stop" if len(ids) == len(rest) else "abort",
            weight_version=7,
            top_k=2,
            kept_ids=np.array([i for one in ids for i in (one, int(not one))], np.int32),
            kept_offsets=np.arange(0, 2 * len(ids) + 1, 2, dtype=np.int64),
        )

    @staticmethod
    def logprob(ids: Sequence[int]) -> float:
        return -(zlib.crc32(np.array(ids, np.int32).tobytes()) % 4096) / 256


def rollout(template: ChatTemplate, cuts: Callable[[int], list[tuple[int, bool]]]) -> Conversation:
    """The script, each turn cut after the tokens that `cuts` names; at each cut the process ends.

    The flag of a cut says whether the new process sends the history again.
    """
    engine = Engine(template)
    conversation = Conversation(template)
    history: list[Message] = [{"role": "system", "content": "sys"}, user("fix it")]
    for turn, (_, heard) in enumerate(SCRIPT):
        conversation.advance(history)
        done = 0
        for count, again in cuts(turn):
            answer = engine.sample(conversation.prompt_ids(), turn, done, count)
            if answer.finish_reason == "stop":
                break
            conversation.record(answer)
            done += len(answer.output_ids)
            data = conversation.to_bytes()
            conversation = Conversation.from_bytes(data, template)
            assert conversation.to_bytes() == data
            assert conversation.open_turn == (done > 0)
            if again:
                conversation.advance(history)
        message = conversation.record(engine.sample(conversation.prompt_ids(), turn, done, None))
        history = [*history, message]
        results = [tool(heard, n) for n in range(len(message.get("tool_calls", ())))]
        history += results or ([user(heard)] if turn + 1 < len(SCRIPT) else [])
    return conversation


def written(conversation: Conversation) -> tuple[Any, ...]:
    (sample,) = conversation.samples(**IDENTITY)
    arrays = (sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions)
    assert sample.kept_ids is not None
    assert sample.kept_offsets is not None
    more = (sample.kept_ids, sample.kept_offsets)
    (branch,) = conversation.branches
    channels = tuple(column.tobytes() for column in branch.ledger.channels().values())
    return (*(a.tobytes() for a in (*arrays, *more)), channels, conversation.messages, conversation.turns)


CUTS = [("qwen3", False), ("glm4moe", True)]


@pytest.mark.original("A-model-state", "B-generate-logprobs")
@pytest.mark.parametrize(("name", "family"), CUTS)
def test_a_cut_at_any_token_changes_nothing(name: str, family: bool, compiled: Compile):
    """Promise 4, every token of the first turn and of a later one."""
    template = compiled(name, family=family)
    whole = written(rollout(template, lambda turn: []))
    for turn, ids in enumerate(Engine(template).turns[:2]):
        for k in range(len(ids)):
            cut = rollout(template, lambda at, turn=turn, k=k: [(k, k % 2 == 0)] if at == turn else [])
            assert written(cut) == whole, (turn, k)


SPLITS = st.lists(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=5),
    min_size=len(SCRIPT),
    max_size=len(SCRIPT),
)


def cut_anywhere(template: ChatTemplate, examples: int) -> None:
    whole = written(rollout(template, lambda turn: []))

    @few(examples)
    @given(splits=SPLITS)
    def check(splits: list[list[tuple[int, bool]]]) -> None:
        assert written(rollout(template, lambda turn: splits[turn])) == whole

    check()


@pytest.mark.parametrize(("name", "family"), CUTS)
@pytest.mark.parametrize(
    "examples", [10, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_cuts_anywhere_any_number_of_times_change_nothing(
    name: str, family: bool, examples: int, compiled: Compile
):
    """Promise 4: the bytes are those of the run that nobody cut."""
    cut_anywhere(compiled(name, family=family), examples)


def test_conversations_of_one_date_share_the_template_of_that_date(many: HFTokenizer):
    """A template that prints a date was probed anew, 0.3 s for gpt-oss, for each conversation restored."""
    today, tomorrow = (
        ChatTemplate.compile(many, trl_template("gptoss"), now=datetime(2026, 3, day, tzinfo=UTC))
        for day in (1, 2)
    )
    first, second = Conversation(today), Conversation(today)
    restored = [Conversation.from_bytes(one.to_bytes(), tomorrow) for one in (first, second)]
    assert restored[0].template is restored[1].template is not tomorrow
    assert restored[0].template.now == today.now
