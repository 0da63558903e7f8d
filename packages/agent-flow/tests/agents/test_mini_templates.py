"""mini-swe-agent's own functions, with templates that are compiled once."""

import gc

import jinja2
import pytest
from agent_flow.agents.mini_scaffold import import_scaffold

OUTPUT = {"output": "a\nb", "returncode": 1, "exception_info": "late"}
TEMPLATE = "<code>{{output.returncode}}</code>{% if output.exception_info %}!{% endif %}{{output.output}}"
ACTIONS = [{"command": "ls", "tool_call_id": "call_0"}]


@pytest.fixture
def mini(tmp_path):
    return import_scaffold(tmp_path)


def without_time(messages):
    for message in messages:
        del message["extra"]["timestamp"]
    return messages


def test_what_they_give_is_what_the_module_gives(mini):
    from minisweagent.models.utils import actions_text, actions_toolcall

    def formatted(toolcall, text):
        given = {"outputs": [OUTPUT], "observation_template": TEMPLATE}
        return without_time(
            toolcall.format_toolcall_observation_messages(actions=ACTIONS, **given)
        ) + without_time(text.format_observation_messages(given["outputs"], observation_template=TEMPLATE))

    assert formatted(mini.toolcall, mini.text) == formatted(actions_toolcall, actions_text)
    assert actions_toolcall.Template is actions_text.Template is jinja2.Template
    assert mini.toolcall.BASH_TOOL is actions_toolcall.BASH_TOOL


def test_an_answer_that_cannot_be_read_is_the_scaffolds_own_error(mini):
    from minisweagent.exceptions import FormatError

    for _ in range(2):
        with pytest.raises(FormatError) as caught:
            mini.toolcall.parse_toolcall_actions([], format_error_template="{{error}} ({{finish_reason}})",
                                                 template_kwargs={"finish_reason": "length"})  # fmt: skip
        assert caught.value.messages[0]["content"].endswith("at least one tool call. (length)")
    with pytest.raises(jinja2.UndefinedError):
        mini.toolcall.parse_toolcall_actions([], format_error_template="{{of_nobody}}")


def test_a_template_is_compiled_once(mini):
    template = TEMPLATE + "{# of this test #}"

    def format_one():
        mini.toolcall.format_toolcall_observation_messages(
            actions=ACTIONS, outputs=[OUTPUT], observation_template=template
        )

    def templates():
        gc.collect()
        return sum(isinstance(one, jinja2.Template) for one in gc.get_objects())

    before = templates()
    for _ in range(5):
        format_one()
    assert templates() == before + 1
