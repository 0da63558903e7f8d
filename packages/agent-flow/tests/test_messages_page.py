"""The page of a rollout without tokens: what its messages say, and nothing that a browser would run."""

from agent_flow.messages_page import render_messages


def page(*messages):
    return render_messages(messages, title="task <1>", facts={"reward": "<b>1</b>"})


def test_what_was_said_is_on_it():
    call = {"function": {"name": "bash", "arguments": '{"command": "ls -l > \\"list\\""}'}}
    text = page(
        {"role": "system", "content": "You work."},
        {"role": "user", "content": [{"type": "text", "text": "Do it."}, {"type": "image_url", "n": 1}]},
        {"role": "assistant", "content": None, "reasoning_content": "I look first.", "tool_calls": [call]},
        {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
    )
    for said in ("You work.", "Do it.", "image_url", "I look first.", "bash: ls -l &gt; &quot;list&quot;"):
        assert said in text
    assert "<h1>task &lt;1&gt;</h1>" in text
    assert "<dt>reward<dd>&lt;b&gt;1&lt;/b&gt;" in text
    assert text.count("<article>") == 4


def test_what_is_no_message_of_chat_completions_is_shown_as_it_is():
    text = page(
        {"content": {"text": "</pre><script>alert(1)</script>"}},
        {"role": 3, "tool_calls": "none", "content": 7},
        {"tool_calls": [{"name": "other"}, {"function": {"name": "bash", "arguments": "{not json"}}, 5]},
        {"tool_calls": [{"function": {"name": "bash", "arguments": "[1]"}}]},
    )
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "bash {not json" in text
    assert "&quot;name&quot;: &quot;other&quot;" in text
