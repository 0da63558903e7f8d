import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from token_tracking import ChatTemplate, Conversation
from token_tracking.testing import BASH_TOOL, completion, trl_template

README = Path(__file__).parents[1] / "README.md"
CODE = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def recipe(number: int) -> dict:
    names: dict = {}
    exec(CODE[number], names)
    return names


@contextmanager
def server(answer) -> Iterator[str]:
    """An HTTP server that answers each POST with `answer(path, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def waiting(qwen3) -> Conversation:
    conversation = Conversation(ChatTemplate.compile(qwen3, trl_template("qwen3"), tools=[BASH_TOOL]))
    conversation.advance([{"role": "user", "content": "hi"}])
    return conversation


def test_the_readmes_example_runs():
    result = subprocess.run([sys.executable, "-c", CODE[0]], capture_output=True, text=True, check=True)
    assert "'content': 'hello'" in result.stdout
    assert "1 of 1 prompts equal to their full render" in result.stdout


def test_the_recipe_for_an_openai_like_server(qwen3):
    def answer(path, body):  # as vLLM's /v1/completions answers with return_token_ids
        assert (path, body["return_token_ids"], body["max_tokens"]) == ("/v1/completions", True, 8)
        assert (body["top_p"], body["top_k"], body["min_p"]) == (1.0, -1, 0.0)
        ids = qwen3.encode("hello<|im_end|>")
        choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "stop"}
        return {"choices": [choice | {"logprobs": {"token_logprobs": [-0.5] * len(ids)}}]}

    conversation = waiting(qwen3)
    with server(answer) as url:
        message = recipe(1)["ask"](url, conversation, max_tokens=8)
    assert message == {"role": "assistant", "content": "hello"}
    assert conversation.branches[0].ledger.logprobs[-2:].tolist() == [-0.5, -0.5]
    (sample,) = conversation.samples(
        rollout_id="0" * 32, group_id="0" * 32, task_id="t", reward=1.0, status="completed", source="sampled"
    )
    sample.require_logprobs()


def test_the_recipe_for_sglang_goes_on_after_aborts(qwen3):
    pieces = [
        ("", "abort", "r/6"),
        ("hel", "abort", "r/6"),
        ("", "abort", "r/7"),
        ("lo<|im_end|>", "stop", "r/7"),
    ]
    prompts = []

    def answer(path, body):  # as SGLang's /generate answers; a call that waits in the queue is aborted empty
        assert (path, body["return_logprob"]) == ("/generate", True)
        text, reason, version = pieces[len(prompts)]
        prompts.append(body["input_ids"])
        ids = qwen3.encode(text)
        meta = {
            "finish_reason": {"type": reason},
            "weight_version": version,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "output_token_logprobs": [[-0.25, i, None] for i in ids],
        }
        return {"output_ids": ids, "meta_info": meta}

    conversation = waiting(qwen3)
    assert conversation.waiting
    with server(answer) as url:
        message = recipe(2)["generate"](url, conversation, lambda text: int(text.partition("/")[2]))
    assert message == {"role": "assistant", "content": "hello"}
    assert not conversation.waiting
    assert prompts == [prompts[0], prompts[0], *[prompts[0] + qwen3.encode("hel")] * 2]
    turn = conversation.branches[0].turns[0]
    assert [(s.finish_reason, s.weight_version) for s in turn.segments] == [("abort", 6), ("stop", 7)]


def test_the_recipe_for_log_probabilities_names_the_kind():
    draw = np.random.default_rng(5)
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0])

    def ask(temperature, top_k):  # an engine whose log-probabilities are the model's own
        scaled = logits / temperature
        if top_k > 0:
            scaled = np.where(np.argsort(np.argsort(-scaled)) < top_k, scaled, -np.inf)
        chances = np.exp(scaled - np.logaddexp.reduce(scaled))
        token = int(draw.choice(len(logits), p=chances))
        return token, float(logits[token] - np.logaddexp.reduce(logits))

    verdict = recipe(4)["logprob_kind"](ask)
    assert (verdict.basis, verdict.logprob_kind) == ("raw", "raw")


def test_the_recipe_for_a_trainer_gives_the_masks(qwen3):
    conversation = waiting(qwen3)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    first = completion(conversation, call, logprob=-0.5)
    added = [{"role": "tool", "content": "a.py"}]
    conversation.record(first)
    conversation.add(added)
    second = completion(conversation, "one file", logprob=-0.25)
    turns = [
        ([{"role": "user", "content": "hi"}], first.output_ids, first.logprobs),
        (added, second.output_ids, second.logprobs),
    ]
    (sample,) = recipe(3)["masked"](conversation.template, turns, 1.0)
    wanted = np.concatenate([first.output_ids, second.output_ids])
    assert sample.token_ids[sample.loss_mask == 1].tolist() == wanted.tolist()
    history = [{"role": "user", "content": "hi"}, conversation.messages[1], *added]
    prompt = conversation.template.render(history, add_generation_prompt=True)
    assert qwen3.decode(sample.token_ids[: sample.turns[-1].start].tolist()) == prompt
