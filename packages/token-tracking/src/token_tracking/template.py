"""`ChatTemplate`: a template bound to a tokenizer, tools and variables, and what probing learnt."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from token_tracking.compiler.beginning import holds_after
from token_tracking.compiler.closings import learn_closings
from token_tracking.compiler.delta import MARKER, Delta, DeltaProgram, Refusal, marked_turn
from token_tracking.compiler.probe import examine
from token_tracking.compiler.probe_contents import ROLES, learn, refusal, unprinted
from token_tracking.compiler.proof import compile_program
from token_tracking.compiler.rendering import JinjaTemplate
from token_tracking.control import ControlPolicy, ControlTokens
from token_tracking.errors import TemplateError
from token_tracking.media import MediaIds
from token_tracking.messages import Message, check, texts, with_arguments, with_parts, with_string_content
from token_tracking.parsing.parse import CompletionParser, ParsedCompletion
from token_tracking.parsing.parser_choice import ParserChoice, choose
from token_tracking.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_NO_DATE = datetime(1970, 1, 1, tzinfo=UTC)


def _prints_date(source: str) -> bool:
    return "strftime_now" in source


class ChatTemplate:
    """Renders messages, knows its deltas, and parses completions. Build it with `ChatTemplate.compile`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        jinja: JinjaTemplate,
        *,
        tools: tuple[Mapping[str, Any], ...] | None,
        variables: Mapping[str, Any],
        now: datetime,
        parser: str = "auto",
    ):
        self.tokenizer = tokenizer
        self.tools = tools
        self.variables = dict(variables)
        self.now = now
        self.unproven_beginnings = 0
        """Histories so far after which the program is not taken at its word: their renders are compared."""
        self.unreadable_arguments = 0
        """Tool calls rendered so far whose arguments were no JSON object where the template wants one."""
        self._jinja = jinja
        self._dated: ChatTemplate | None = None
        identity = json.dumps([jinja.fingerprint, tools, self.variables], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self.facts, prober = examine(self._probe_render, tokenizer, _names(tools))
        proof = ControlTokens(tokenizer, "escape" if tokenizer.splits_at_specials else "keep")
        self._proof_control = proof
        program = _no_strip(tokenizer) or compile_program(self.facts, prober, proof, jinja.constants)
        self.program: DeltaProgram | None = program if isinstance(program, DeltaProgram) else None
        self.refusal: str | None = program.why if isinstance(program, Refusal) else None
        eos = self.variables.get("eos_token")
        self.closings = learn_closings(
            self.facts, prober, self.program, tokenizer, eos if isinstance(eos, str) else None
        )
        self.media = MediaIds(tokenizer)
        markers = self.facts.markers
        self._asked_parser = parser
        self.parser: ParserChoice = choose(
            parser,
            tokenizer,
            CompletionParser(tokenizer, markers, self.stop_ids, tools or ()),
            prints_calls=self.facts.calls,
            tools=tools or (),
            prompt=prober.text(prober.start(), generate=True) or "",
        )
        self._prober = prober
        self._roles = dict.fromkeys(ROLES, True) | dict.fromkeys(self.facts.drops, False)
        self._print_parser = CompletionParser(
            tokenizer, msgspec.structs.replace(markers, prefilled=False), frozenset(), tools or ()
        )
        if self.refusal is not None:
            log.warning("chat template %.12s: deltas by full renders (%s)", jinja.fingerprint, self.refusal)

    @property
    def source(self) -> str:
        """Jinja source; with `tools` and `variables` it makes the same template again, to open a snapshot."""
        return self._jinja.source

    @classmethod
    def compile(
        cls,
        tokenizer: Tokenizer,
        template: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        parser: str = "auto",
    ) -> ChatTemplate:
        """Probe a Jinja chat template and compile its deltas.

        Args:
            tokenizer: from `load_tokenizer`, or any object with its protocol.
            template: Jinja source.
            tools: JSON schemas of the tools that every render is given. They are part of the template's
                identity.
            template_kwargs: variables of the template (`enable_thinking` and the like).
            now: the instant that `strftime_now` prints in every render. None: the present, read once. It
                does not count where the template prints no date.
            parser: what `parse` takes completions apart with: `template` (its own form of tool calls, learnt
                by probing), `renderers` or `renderers:FAMILY` (that package's parser, extra `[renderers]`),
                `auto` (the first, unless the form could not be learnt and `renderers` knows the tokenizer's
                name). It changes no token; `describe()` says which it is and why.

        Raises:
            TemplateError: the source is not Jinja, or renders not even one user message; the parser that was
                asked for cannot be had.
        """
        # Where no date is printed the instant must not tell two equal templates, or their snapshots, apart.
        instant = (now or datetime.now().astimezone()) if _prints_date(template) else _NO_DATE
        return cls(
            tokenizer,
            JinjaTemplate(template, now=instant),
            tools=tuple(tools) if tools else None,
            variables={**tokenizer.named_tokens, **(template_kwargs or {})},
            now=instant,
            parser=parser,
        )

    def at(self, now: datetime) -> ChatTemplate:
        """The same template with another `now`; itself if nothing would change."""
        if now == self.now or not _prints_date(self.source):
            return self
        if self._dated is None or self._dated.now != now:
            # To probe anew takes 0.3 s; the conversations that a process restores mostly have one date.
            self._dated = ChatTemplate(
                self.tokenizer,
                JinjaTemplate(self._jinja.source, now=now),
                tools=self.tools,
                variables=self.variables,
                now=now,
                parser=self._asked_parser,
            )
        return self._dated

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Text of a conversation, as `transformers` would render it.

        Tool-call arguments are given to the template in the form it wants (JSON text where it prints text
        verbatim, else an object), so that messages may carry either.

        Raises:
            TemplateError: the template refuses the messages.
            UnsupportedContentError: a message has an image or audio part.
        """
        return self._render(messages, self.tools, add_generation_prompt)

    def render_marked(self, messages: Sequence[Message], control: ControlTokens, *, generate: bool) -> str:
        """As `render`, with the control tokens in message text marked (see `token_tracking.control`)."""
        return self._render(control.mark_messages(messages), self.tools, generate)

    def control(self, policy: ControlPolicy) -> ControlTokens:
        """Marking and encoding under a policy."""
        return ControlTokens(self.tokenizer, policy)

    def parse(self, ids: Sequence[int]) -> ParsedCompletion:
        """Take a completion apart (see `compile`: `parser`). Never raises on what a model wrote."""
        return self.parser.parser.parse(self.closings.without(ids))

    def parse_printed(self, text: str) -> ParsedCompletion:
        """Take apart an assistant turn as the template printed it, prefilled markers included."""
        return self._print_parser.parse(self.tokenizer.encode_plain(text))

    def in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends before its reasoning was closed."""
        return self.parser.parser.in_reasoning(ids)

    def proven_after(self, history: Sequence[Message]) -> bool:
        """Whether the program's proof holds for a conversation that begins so; it renders a few."""
        if self.program is None:
            return False
        shown = [self._content(message, index) for index, message in enumerate(history)]
        if holds_after(shown, self.program, self.facts, self._prober, self._proof_control):
            return True
        if not self.unproven_beginnings:
            roles = ", ".join(message["role"] for message in history[:4])
            log.warning(
                "chat template %.12s: its program is not proven after a history that begins with %s: "
                "full renders are compared until it has another question",
                self._jinja.fingerprint,
                roles,
            )
        self.unproven_beginnings += 1
        return False

    def delta(
        self, history: Sequence[Message], new: Sequence[Message], control: ControlTokens
    ) -> tuple[Delta, str] | None:
        """What follows the assistant turn that ends `history`, up to the next generation prompt.

        Returns:
            The delta and how it was found: `"program"` or `"marker"` (two full renders, compared). None if
            neither is certain.
        """
        if self.program is not None and self.program.covers(history[-1], new):
            return self.program.run(history[-1], new, control), "program"
        found = self._delta_by_marker(history, new, control)
        return None if found is None else (found, "marker")

    def _delta_by_marker(
        self, history: Sequence[Message], new: Sequence[Message], control: ControlTokens
    ) -> Delta | None:
        marked = marked_turn(history[-1], self.facts)
        if marked is None:
            return None
        turn, tail = marked
        try:
            shown = self.render_marked([*history[:-1], turn, *new], control, generate=True)
            full = self.render_marked([*history, *new], control, generate=True)
        except TemplateError:
            return None
        if shown.count(MARKER) != 1:
            return None
        after = shown.split(MARKER)[1]
        if not after.startswith(tail) or not full.endswith(after):
            return None
        text = after.removeprefix(tail)
        first = next(control.find(text), None)
        return Delta(text, control.encode_array(text)) if first is not None and first[0] == 0 else None

    def describe(self) -> dict[str, Any]:
        """What was learnt, as JSON-safe values."""
        from token_tracking.inspecting.description import describe

        return describe(self)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens at which an engine should stop: the last of each way in which a turn ends."""
        return self.closings.stop_ids

    @property
    def turn_close(self) -> tuple[int, ...]:
        """What a model samples to end a turn which a user answers; empty: nothing is printed there."""
        if self.program is not None and ("assistant", "user") in self.program.joints:
            ids = self.program.joints["assistant", "user"].ids
            return ids[: self.closings.printed(ids)]
        return min(self.closings.runs, default=())

    @property
    def close_id(self) -> int | None:
        """The stop token that ends a turn which a user answers; None: the template prints none."""
        return self.turn_close[-1] if self.turn_close else None

    def _render(self, messages: Sequence[Message], tools: Any, generate: bool) -> str:
        check(messages)
        form = self.facts.arguments_form
        shown = [self._content(message, index) for index, message in enumerate(messages)]
        return self._jinja.render(
            [with_arguments(message, form, fallback=self._note_arguments) for message in shown],
            tools=tools,
            add_generation_prompt=generate,
            variables=self.variables,
        )

    def _content(self, message: Message, index: int) -> Message:
        """A message with its content in the form that is printed."""
        role = message["role"]
        if role not in self._roles:
            self._roles[role] = learn(self._prober, role, calls=self.facts.calls) is not False
        if not self._roles[role] and any(map(str.strip, texts(message))):
            raise refusal(index, role, here=False)
        if role not in self.facts.prints_parts:
            message = with_string_content(message, index)
        return with_parts(message) if role in self._prober.wrapped else message

    def check_printed(self, messages: Sequence[Message], first: int, text: str) -> None:
        """Check that a render shows the contents of new messages.

        Args:
            messages: a whole history, marked as `text` is.
            first: the first new message.
            text: with the generation prompt; what stood before the new messages may be left out.

        Raises:
            TemplateError: the template left one out, whatever is said in it (Gemma 4 prints no tool result
                that answers no call).
        """
        index = unprinted(messages, first, text, self._render_or_none)
        if index is not None:
            raise refusal(index, messages[index]["role"], here=True)

    def _render_or_none(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages, self.tools, True)
        except TemplateError:
            return None

    def _note_arguments(self, arguments: str) -> None:
        if not self.unreadable_arguments:
            log.warning(
                "chat template %.12s: tool-call arguments that are no JSON object are rendered as the value "
                "of one, under `arguments`: %s",
                self._jinja.fingerprint,
                arguments,
            )
        self.unreadable_arguments += 1

    def _probe_render(self, messages: Sequence[Message], generate: bool) -> str:
        return self._jinja.render(
            messages, tools=self.tools, add_generation_prompt=generate, variables=self.variables
        )


def _names(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    names: list[str] = []
    for index, tool in enumerate(cast("Sequence[Any]", tools or ())):
        function = (
            cast("Mapping[str, Any]", tool).get("function", tool) if isinstance(tool, Mapping) else None
        )
        if not isinstance(function, Mapping):
            raise TemplateError(f"tools[{index}] must be a JSON schema of a function, got {tool!r:.80}")
        name = cast("Mapping[str, Any]", function).get("name")
        if not isinstance(name, str):
            raise TemplateError(f"tools[{index}] has no name of a function: {tool!r:.80}")
        names.append(name)
    return names


def _no_strip(tokenizer: Tokenizer) -> Refusal | None:
    if tokenizer.splits_at_specials:
        return None
    return Refusal("the tokenizer does not encode the pieces between control tokens as it encodes the whole")
