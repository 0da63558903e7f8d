"""Small templates of every awkward kind: each is compiled, or named, and never silently wrong."""

import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from token_tracking import ChatTemplate, Conversation, GenerationRecord, TemplateError
from token_tracking.backends.hf import HFTokenizer
from token_tracking.testing import BASH_TOOL, completion

Message = dict[str, Any]
NOW = datetime(2026, 3, 1, tzinfo=UTC)
OPEN, CLOSE, GENERATE = "<|im_start|>", "<|im_end|>\n", "<|im_start|>assistant\n"
PAIRS = (
    "assistant -> user",
    "user -> user",
    "calls -> tool",
    "tool -> tool",
    "tool -> user",
    "calls -> user",
)
USERS = PAIRS[:2]
RESULTS = ("calls -> tool", "tool -> tool", "assistant -> tool")
ALL = (*PAIRS, "assistant -> tool")

CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}"
)


def chat(
    *,
    before: str = "",
    first: str = "",
    user: str = "{{ m.content }}",
    said: str = "{{ m.content or '' }}",
    tool: str = "{{ m.content }}",
    header: str = "{{ m.role }}\n",
    close: str = CLOSE,
    after: str = "",
    generate: str = GENERATE,
) -> str:
    """A template of messages between `<|im_start|>` and `<|im_end|>`, with some of its parts replaced."""
    return (
        f"{before}{{% for m in messages %}}{first}{OPEN}{header}"
        f"{{% if m.role == 'assistant' %}}{said}{CALLS}{{% elif m.role == 'tool' %}}{tool}{{% else %}}{user}"
        f"{{% endif %}}{close}{{% endfor %}}{after}{{% if add_generation_prompt %}}{generate}{{% endif %}}"
    )


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A template and what must be found of it."""

    source: str
    program: Sequence[str] = ALL
    """The pairs that are compiled; all others are left to renders."""
    why: str = ""
    """Words in the reason why others are left to renders, or in the road of those that are compiled."""
    stable: str = "tool user"
    """Roles that change nothing before them."""
    tools: int = 1
    kwargs: dict[str, Any] = {}


KINDS = {
    "plain": Kind(source=chat()),
    # Closings that depend on what follows.
    "results in one block": Kind(
        source=chat(
            header="{{ m.role }}\n"
            "{% if m.role == 'tool' and loop.previtem.role != 'tool' %}<results>{% endif %}",
            close="{% if m.role == 'tool' and loop.nextitem and loop.nextitem.role == 'tool' %}<|im_end|>"
            "{% elif m.role == 'tool' %}</results><|im_end|>{% else %}" + CLOSE + "{% endif %}",
        )
    ),
    "no end token after the last message": Kind(
        source=chat(close="{% if not (loop.last and m.role == 'assistant') %}" + CLOSE + "{% endif %}")
    ),
    "calls end in a token of their own": Kind(
        source=chat(close="{% if m.tool_calls %}<|endoftext|>{% else %}" + CLOSE + "{% endif %}")
    ),
    "a block that ends with the last result": Kind(
        source=chat(
            before="{% set ns = namespace(left=0) %}",
            first="{% if m.tool_calls %}{% set ns.left = m.tool_calls | length %}{% endif %}"
            "{% if m.role == 'tool' %}{% set ns.left = ns.left - 1 %}{% endif %}",
            close="{% if m.role == 'tool' and ns.left == 0 %}</all>{% endif %}" + CLOSE,
        ),
        program=(*USERS, "calls -> user"),
        why="does not end with the delta's text",
        stable="user",
    ),
    # Numbers and state.
    "numbers its messages": Kind(
        source=chat(header="{{ m.role }} {{ loop.index }}\n"), program=(), why="does not end with"
    ),
    "counts its messages first": Kind(
        source=chat(before="{{ messages | length }} messages\n"), stable="", program=ALL
    ),
    "counts user turns": Kind(
        source=chat(
            before="{% set ns = namespace(n=0) %}",
            first="{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}",
            user="[{{ ns.n }}] {{ m.content }}",
        ),
        program=RESULTS,
        why="does not end with",
        stable="tool",
    ),
    "reminds every eighth message": Kind(
        source=chat(first="{% if loop.index % 8 == 0 %}<remember>{% endif %}"), program=(), why="does not end"
    ),
    "reminds once after twenty messages": Kind(
        source=chat(generate="{% if messages | length > 20 %}<long>{% endif %}" + GENERATE), program=()
    ),
    "reminds once after thirty-one messages, counted in halves": Kind(
        source=chat(generate="{% if (messages | length) // 2 > 15 %}<long>{% endif %}" + GENERATE), program=()
    ),
    "a role's first message is announced": Kind(
        source=chat(
            before="{% set ns = namespace(seen=false) %}",
            first="{% if m.role == 'tool' and not ns.seen %}<outputs>{% set ns.seen = true %}{% endif %}",
        ),
        program=(*USERS, "calls -> user"),
        stable="user",
    ),
    "the first user is printed otherwise": Kind(
        source=chat(user="{% if loop.index0 <= 1 and m.role == 'user' %}[task] {% endif %}{{ m.content }}")
    ),
    "the last user is printed otherwise": Kind(
        source=chat(
            before="{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
            user="{% if loop.index0 == ns.last %}[now] {% endif %}{{ m.content }}",
        ),
        program=(*RESULTS, "tool -> user", "calls -> user"),
        stable="tool",
    ),
    "old results are cut": Kind(
        source=chat(
            tool="{% if messages | length - loop.index > 6 %}[old]{% else %}{{ m.content }}{% endif %}"
        ),
        program=(*USERS, "calls -> user"),
        why="not printed alike",
        stable="",
    ),
    # Where names come from.
    "prints the call id": Kind(
        source=chat(tool="## Return of {{ m.tool_call_id }}\n{{ m.content }}"),
    ),
    "prints the result's name, at both ends": Kind(
        source=chat(tool="<{{ m.name }}>{{ m.content }}</{{ m.name }}>")
    ),
    "looks the name up by call id": Kind(
        source=chat(
            before="{% set ns = namespace(name='') %}",
            tool="{% set ns.name = '?' %}{% for o in messages %}{% for c in o.tool_calls or [] %}"
            "{% if c.id == m.tool_call_id %}{% set ns.name = c.function.name %}{% endif %}{% endfor %}"
            "{% endfor %}"
            "{{ ns.name }}: {{ m.content }}",
        ),
        program=PAIRS,
        stable="",  # the same id in a later turn renames the earlier result
    ),
    "prints the name of the last call": Kind(
        source=chat(
            before="{% set ns = namespace(name='none') %}",
            first="{% if m.tool_calls %}{% set ns.name = m.tool_calls[-1].function.name %}{% endif %}",
            tool="functions.{{ ns.name }}: {{ m.content }}",
        ),
        program=PAIRS,
    ),
    "prints a user's name": Kind(
        source=chat(header="{{ m.name if m.role == 'user' and m.name else m.role }}\n")
    ),
    "prints whole messages": Kind(
        source=chat(user="{{ m | tojson }}", tool="{{ m | tojson }}"),
        program=(),
        why="depends on further fields",
    ),
    "a turn with a prefix flag is left open": Kind(
        source=chat(close="{% if not m.prefix %}" + CLOSE + "{% endif %}")
    ),
    "an empty list of calls is not no calls": Kind(
        source=chat(close="{% if 'tool_calls' in m %}<|endoftext|>{% else %}" + CLOSE + "{% endif %}")
    ),
    # How contents are printed.
    "strips": Kind(source=chat(user="{{ m.content | trim }}", tool="{{ m.content | trim }}")),
    "strips one side": Kind(source=chat(user="{{ m.content.rstrip() }}", tool="{{ m.content.lstrip() }}")),
    "results as JSON": Kind(source=chat(tool="{{ {'output': m.content} | tojson }}")),
    "in capitals": Kind(source=chat(user="{{ m.content | upper }}"), program=RESULTS, stable="tool"),
    "cut at 200 characters": Kind(
        source=chat(tool="{{ m.content[:200] }}"), program=(*USERS, "calls -> user"), stable="user"
    ),
    "nothing for empty contents": Kind(
        source=chat(tool="{% if m.content %}{{ m.content }}{% else %}(none){% endif %}"),
        program=(*USERS, "calls -> user"),
        stable="user",
    ),
    "a switch at the end of a content": Kind(
        source=chat(user="{{ m.content }}{% if not m.content.endswith('/nothink') %} /think{% endif %}"),
        why="renders where a content has '/nothink'",
    ),
    "a switch in a content, any case": Kind(
        source=chat(generate="{% if '/fast' in messages[-1].content | lower %}<fast>{% endif %}" + GENERATE),
        why="renders where a content has '/fast'",
        stable="",
    ),
    "a switch in the system text": Kind(
        source=chat(
            generate=GENERATE + "{% if '/no_think' in messages[0].content %}<think></think>{% endif %}"
        ),
        program=(),
        why="depends on '/no_think' earlier in the conversation",
    ),
    "a switch in the turn": Kind(
        source=chat(
            close="{% if m.role == 'assistant' and m.content and '[wait]' in m.content %}<|endoftext|>"
            "{% else %}" + CLOSE + "{% endif %}"
        ),
        why="'[wait]'",
    ),
    "a content of two strings": Kind(
        source=chat(
            user="{% if m.content.startswith('<a>') and m.content.endswith('</a>') %}[a]{% endif %}"
            "{{ m.content }}"
        ),
        why="'</a>'",
    ),
    "a turn's thinking is cut out of its content": Kind(
        source=chat(said="{{ (m.content or '').split('</think>')[-1] }}")
    ),
    # Where the system text, the date, tools and variables go.
    "system text in the first user message": Kind(
        source="{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        + chat(
            user="{% if loop.index0 <= 1 and m.role == 'user' %}{{ system }}\n\n{% endif %}{{ m.content }}"
        )
        .replace("<|im_start|>{{ m.role }}", "{% if m.role != 'system' %}<|im_start|>{{ m.role }}", 1)
        .replace(CLOSE + "{% endfor %}", CLOSE + "{% endif %}{% endfor %}", 1),
    ),
    "system text at the end": Kind(
        source=chat(
            after="{% if messages[0].role == 'system' %}<sys>{{ messages[0].content }}</sys>{% endif %}"
        ),
        program=(),
    ),
    "a date": Kind(source=chat(before="Today is {{ strftime_now('%d %B %Y') }}.\n")),
    "the number of tools": Kind(
        source=chat(after="{% if tools and tools | length > 1 %}<many>{% endif %}"), tools=2, stable=""
    ),
    "further variables": Kind(
        source=chat(generate=GENERATE + "{% if fast %}<fast>{% endif %}<{{ effort }}>"),
        stable="",
        kwargs={"fast": True, "effort": "low"},
    ),
    # Generation prompts.
    "no generation prompt after a result": Kind(
        source=chat(generate="{% if messages[-1].role != 'tool' %}" + GENERATE + "{% endif %}")
    ),
    "a generation prompt for each role": Kind(
        source=chat(generate=GENERATE + "[to {{ messages[-1].role }}]"), stable=""
    ),
    # Refusals.
    "users and assistants alternate": Kind(
        source=chat(
            before="{% set ns = namespace(turn=0) %}",
            first="{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
            "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
            "{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}",
        ),
        program=("assistant -> user", "calls -> tool", "tool -> tool", "assistant -> tool"),
        why="the template refuses it",
    ),
    "ids of nine letters and digits": Kind(
        source=chat(
            first="{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
            "{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}"
        )
    ),
    "no control token at all": Kind(
        source="{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n"
        + CALLS
        + "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        program=(),
        why="no control token stands first",
    ),
}


@pytest.fixture(scope="session")
def kinds(qwen3: HFTokenizer) -> Callable[[str], ChatTemplate]:
    """A template by its name, compiled once."""

    @functools.cache
    def compile_kind(name: str) -> ChatTemplate:
        kind = KINDS[name]
        tools = [BASH_TOOL] * kind.tools
        return ChatTemplate.compile(qwen3, kind.source, tools=tools, template_kwargs=kind.kwargs, now=NOW)

    return compile_kind


@pytest.mark.parametrize("name", KINDS)
def test_what_is_compiled_and_what_is_left_to_renders(name: str, kinds: Callable[[str], ChatTemplate]):
    kind, template = KINDS[name], kinds(name)
    learnt = template.describe()
    joints = [pair for pair in learnt["joints"] if not pair.endswith("generate")]
    assert sorted(joints) == sorted(kind.program)
    assert kind.why in " ".join(learnt["roads"].values())
    assert template.program is None or " ".join(sorted(template.program.stable)) == kind.stable
    if template.program is not None:
        assert set(learnt["roads"]) == set(ALL)


HARD = (
    "",
    "ok",
    "a </think> b",
    "/nothink",
    "say /NoThink",
    "/FAST",
    "[wait]",
    "<a>x</a>",
    "\n\n x \n",
    "<|im_end|>\n<|im_start|>user\n",
    "/no_think",
    "\u4e16\u754c \U0001f642 e\u0301",
    '"quoted" \\ \ufdd0',
    "l" * 230,
)
TEXT = st.sampled_from(HARD) | st.text(max_size=12)
STEP = st.tuples(
    st.sampled_from(
        [
            "user",
            "users",
            "tool",
            "tools",
            "tool user",
            "calls user",
            "lone tool",
            "tools fewer",
            "tools crossed",
        ]
    ),
    TEXT,
    TEXT,
    st.sampled_from(["", "fields", "absent", "none"]),
)
ROUNDS = st.tuples(st.booleans(), TEXT, st.lists(STEP, min_size=1, max_size=6))


def turn(step: tuple[str, str, str, str], number: int) -> tuple[Message, list[Message]]:
    """An assistant message and what answers it."""
    kind, said, heard, fields = step
    message: Message = {"role": "assistant", "content": said}
    count = 0 if kind in ("user", "users", "lone tool") else 3 if kind.startswith("tools") else 1
    if count:
        names = ("bash", "View_File", "search.web")
        message["tool_calls"] = [
            {
                "id": f"call{number:02d}q{n:02d}",
                "type": "function",
                "function": {"name": names[n], "arguments": '{"b":   1, "a": "x"}'},
            }
            for n in range(count)
        ]
    elif fields == "none":
        message["tool_calls"] = []
    answers: list[Message] = []
    places = {"tools fewer": [0, 1], "tools crossed": [2, 0, 1], "calls user": []}.get(kind, range(count))
    for place in [0] if kind == "lone tool" else places:
        result = {"role": "tool", "content": heard, "tool_call_id": f"call{number:02d}q{place:02d}"}
        if fields != "absent":
            result["name"] = ("bash", "View_File", "search.web")[place]
        answers.append(result)
    users = 2 if kind == "users" else kind in ("user", "tool user", "calls user")
    answers += [{"role": "user", "content": heard + str(n or "")} for n in range(users)]
    if fields == "fields":
        message |= {"prefix": True}
        answers = [answer | {"name": "bob", "more": 1} for answer in answers]
    return message, answers


def sample(
    template: ChatTemplate, messages: list[Message], message: Message, new: list[Message]
) -> list[int]:
    """What a model would have sampled: what the template prints of the message, and the token after it."""
    control = template.control("escape")
    prompt = template.render_marked(messages, control, generate=True)
    try:
        shown = template.render_marked([*messages, message], control, generate=False)
        full = template.render_marked([*messages, message, *new], control, generate=True)
    except TemplateError:
        shown = full = ""
    said = shown[len(prompt) :].removesuffix(template.facts.end_of(message) or "")
    if not shown.startswith(prompt):
        said = control.mark(message["content"])
    ids = control.encode(said or "x")
    after = full[len(prompt) + len(said) :] if full.startswith(prompt + said) else ""
    first = next(control.find(after), (1, 1))
    stop = template.tokenizer.token_to_id(after[slice(*first)]) if first[0] == 0 else template.close_id
    return ids if stop is None or stop not in template.stop_ids else [*ids, stop]


def names_refusal(conversation: Conversation, messages: list[Message]) -> bool:
    """Messages that the template refuses are an error; or the report says so, where nothing was rendered."""
    try:
        conversation.advance(messages)
        output = np.array([*conversation.template.tokenizer.encode("x")], np.int32)
        prompt = conversation.prompt_ids()
        conversation.record(GenerationRecord(prompt_ids=prompt, output_ids=output, finish_reason="length"))
    except TemplateError:
        return True
    return "refused" in conversation.report().prompts[-1].problem


def run(template: ChatTemplate, start: tuple[bool, str, list[tuple[str, str, str, str]]]) -> None:
    """A conversation, in which each prompt is compared with a render of its own."""
    system, first, steps = start
    messages: list[Message] = [{"role": "system", "content": first}] if system else []
    messages.append({"role": "user", "content": first})
    conversation, control = Conversation(template), template.control("escape")
    decode, special = template.tokenizer.decode, template.tokenizer.special_ids
    for number, step in enumerate([*steps, ("user", "end", "end", "")]):
        try:
            text = template.render_marked(messages, control, generate=True)
        except TemplateError:
            assert names_refusal(conversation, messages)
            break
        conversation.advance(messages)
        ids = conversation.prompt_ids().tolist()
        wanted = control.encode(text)
        exact = decode(ids) == decode(wanted)
        if exact:
            assert [i for i in ids if i in special] == [i for i in wanted if i in special]
        message, new = turn(step, number)
        sampled = np.array(sample(template, messages, message, new), np.int32)
        stopped = int(sampled[-1]) in template.stop_ids
        conversation.record(
            GenerationRecord(
                prompt_ids=conversation.prompt_ids(),
                output_ids=sampled,
                finish_reason="stop" if stopped else "length",
            ),
            message,
        )
        if not exact:
            # Held otherwise than it would be printed now: allowed if it is named.
            named = conversation.report()
            assert named.rewrites or named.cross_stops or named.cut_off, (decode(ids), decode(wanted))
        messages = [*messages, message, *new]
    problems = [check.problem for check in conversation.report().prompts if check.problem]
    # What was never rendered may be refused when it is: the report has the template's words.
    assert all("the chat template refused" in problem for problem in problems), problems


@pytest.mark.parametrize("name", KINDS)
@given(start=ROUNDS)
@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
def test_no_prompt_is_silently_wrong(name: str, start: Any, kinds: Callable[[str], ChatTemplate]):
    run(kinds(name), start)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@given(start=ROUNDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_prompt_is_silently_wrong_at_length(name: str, start: Any, kinds: Callable[[str], ChatTemplate]):
    run(kinds(name), start)


@pytest.mark.parametrize("counted", ["> 20", "== 41", "% 17 == 0", "> 500"])
def test_a_count_of_messages_far_into_a_conversation_is_found(qwen3, counted: str):
    """Beyond the lengths that every template is tried with: the template's own number says where to look."""
    source = f"""{{% if messages|length {counted} %}}<|im_start|>system
many<|im_end|>
{{% endif %}}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}
{{{{ m.content }}}}<|im_end|>
{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}"""
    template = ChatTemplate.compile(qwen3, source)
    conversation = Conversation(template)
    conversation.advance([{"role": "user", "content": "q"}])
    for number in range(24):
        conversation.record(completion(conversation, f"a{number}"))
        conversation.advance([*conversation.messages, {"role": "user", "content": f"u{number}"}])
        text = template.render(conversation.messages, add_generation_prompt=True)
        assert conversation.prompt_ids().tolist() == qwen3.encode(text)
    assert (template.program is None) == (counted == "> 500")
