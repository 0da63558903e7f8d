import asyncio
import logging
import time

from jinja2 import Template
from pydantic import BaseModel
from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError

from sweagent.exceptions import CostLimitExceededError, FormatError
from sweagent.tools.tools import ToolConfig
from sweagent.types import StepOutput


class _BlockedActionError(Exception):
    pass


class _RetryWithOutput(Exception):  # noqa: N818
    pass


class _RetryWithoutOutput(Exception):  # noqa: N818
    pass


class _ExitForfeit(Exception):  # noqa: N818
    pass


class _TotalExecutionTimeExceeded(Exception):  # noqa: N818
    pass


WORDS = {
    "###SWE-AGENT-RETRY-WITH-OUTPUT###": _RetryWithOutput,
    "###SWE-AGENT-RETRY-WITHOUT-OUTPUT###": _RetryWithoutOutput,
    "###SWE-AGENT-EXIT-FORFEIT###": _ExitForfeit,
}


class TemplateConfig(BaseModel):
    system_template: str = ""
    instance_template: str = ""
    next_step_template: str = "Observation: {{observation}}"
    next_step_no_output_template: str = "No output."
    shell_check_error_template: str = "Syntax errors: {{bash_stdout}} {{bash_stderr}}"
    command_cancelled_timeout_template: str = "'{{command}}' took more than {{timeout}} seconds."
    max_observation_length: int = 100_000


class DefaultAgentConfig(BaseModel):
    name: str = "main"
    templates: TemplateConfig = TemplateConfig()
    tools: ToolConfig = ToolConfig()
    history_processors: list = []
    model: dict
    max_requeries: int = 3


class _Hooks:
    def __getattr__(self, name):
        return lambda **values: None


class DefaultAgent:
    def __init__(self, *, templates, tools, history_processors, model, max_requeries=3, name="main"):
        self.templates = templates
        self.tools = tools
        self.history_processors = history_processors
        self.model = model
        self.max_requeries = max_requeries
        self.name = name
        self.logger = logging.getLogger("scaffold")
        self.history, self._trajectory, self.info = [], [], {}
        self._chook = _Hooks()
        self._env = self._problem_statement = self.traj_path = None
        self._n_consecutive_timeouts = 0
        self._total_execution_time = 0.0

    @property
    def trajectory(self):
        return self._trajectory

    @property
    def messages(self):
        messages = [item for item in self.history if item["agent"] == self.name]
        for processor in self.history_processors:
            messages = processor(messages)
        return messages

    def _get_format_dict(self, **kwargs):
        return dict(
            command_docs=self.tools.config.command_docs,
            **kwargs,
            problem_statement=self._problem_statement.get_problem_statement(),
            repo=self._env.repo.repo_name,
            **self._problem_statement.get_extra_fields(),
        )

    def _append_history(self, item):
        self.history.append(item)

    def _append(self, role, template, message_type, **kwargs):
        ids = kwargs.pop("tool_call_ids", None)
        content = Template(template).render(**self._get_format_dict(**kwargs))
        item = {"role": role, "content": content, "agent": self.name, "message_type": message_type}
        self._append_history({**item, **({"tool_call_ids": ids, "role": "tool"} if ids else {})})

    def setup(self, env, problem_statement, output_dir=None):
        self._env, self._problem_statement = env, problem_statement
        self.tools.install(env)
        self.info = {}
        env.set_env_variables({"PROBLEM_STATEMENT": problem_statement.get_problem_statement()})
        self._append("system", self.templates.system_template, "system_prompt")
        state = self.tools.get_state(env)
        self._append("user", self.templates.instance_template, "observation", **state)

    def run(self, env, problem_statement, output_dir=None):
        self.setup(env=env, problem_statement=problem_statement, output_dir=output_dir)
        step = StepOutput()
        while not step.done:
            step = self.step()
            self.save_trajectory()

    def save_trajectory(self):
        raise AssertionError("nothing is to be written")

    def step(self):
        step = self.forward_with_handling(self.messages)
        self.add_step_to_history(step)
        self.info["submission"] = step.submission
        self.info["exit_status"] = step.exit_status
        self.info["model_stats"] = self.model.stats.model_dump()
        self.add_step_to_trajectory(step)
        return step

    def add_step_to_trajectory(self, step):
        self.trajectory.append({"state": step.state, "response": step.output, "query": step.query})

    def add_step_to_history(self, step):
        answer = {"role": "assistant", "content": step.output, "tool_calls": step.tool_calls}
        self._append_history({**answer, "agent": self.name, "message_type": "action"})
        templates = self.templates
        shown = templates.next_step_template if step.observation.strip() else None
        self._append(
            "user",
            shown or templates.next_step_no_output_template,
            "observation",
            observation=step.observation,
            tool_call_ids=step.tool_call_ids,
            **step.state,
        )

    def forward(self, history):
        if self._total_execution_time > self.tools.config.total_execution_timeout:
            raise _TotalExecutionTimeExceeded
        step = StepOutput(query=list(history))
        try:
            output = self.model.query(history)
            step.output = output["message"]
            step.thought, step.action = self.tools.parse_actions(output)
            if output.get("tool_calls") is not None:
                step.tool_calls = output["tool_calls"]
                step.tool_call_ids = [call["id"] for call in step.tool_calls]
            return self.handle_action(step)
        except Exception as error:
            error.step = step
            raise

    def forward_with_handling(self, history):
        for _ in range(self.max_requeries):
            try:
                return self.forward(history)
            except (FormatError, _BlockedActionError, BashIncorrectSyntaxError) as error:
                history = self.get_model_requery_history(
                    self.tools.config.format_error_template,
                    output=error.step.output,
                    exception_message=str(error),
                )
            except _ExitForfeit:
                return self._leave("exit_forfeit")
            except CostLimitExceededError:
                return self._leave("exit_cost")
            except Exception:
                return self._leave("exit_error")
        return self._leave("exit_format")

    def get_model_requery_history(self, template, *, output, **kwargs):
        content = Template(template).render(**kwargs, **self._get_format_dict())
        answer = {"role": "assistant", "content": output, "agent": self.name}
        return [*self.messages, answer, {"role": "user", "content": content, "agent": self.name}]

    def _leave(self, status):
        step = StepOutput(thought=status, output=status, exit_status=status, done=True)
        return self.attempt_autosubmission_after_error(step)

    def attempt_autosubmission_after_error(self, step):
        if not asyncio.run(self._env.deployment.is_alive(timeout=10)):
            return step
        command = "git add -A && git diff --cached > /root/model.patch"
        try:
            self._env.execute_command(command, check=True, cwd=f"/{self._env.repo.repo_name}")
        except Exception:
            self.logger.exception("autosubmission failed")
        return self.handle_submission(step, force_submission=True)

    def handle_submission(self, step, *, observation="", force_submission=False):
        if not force_submission and not self.tools.check_for_submission_cmd(observation or step.observation):
            return step
        try:
            patch = self._env.read_file("/root/model.patch", encoding="utf-8", errors="backslashreplace")
        except Exception:
            return step
        step.submission = patch if patch.strip() else None
        step.observation = patch
        if not step.exit_status:
            step.exit_status = "submitted"
        elif step.submission:
            step.exit_status = f"submitted ({step.exit_status})"
        step.done = True
        return step

    def handle_action(self, step):
        if self.tools.should_block_action(step.action):
            raise _BlockedActionError
        if step.action.strip() == "exit":
            step.done, step.observation, step.exit_status = True, "Exited", "exit_command"
            return step
        config, began = self.tools.config, time.perf_counter()
        try:
            step.observation = self._env.communicate(step.action, timeout=config.execution_timeout)
            self._n_consecutive_timeouts = 0
        except CommandTimeoutError:
            self._n_consecutive_timeouts += 1
            if self._n_consecutive_timeouts >= config.max_consecutive_execution_timeouts:
                raise
            self._env.interrupt_session()
            step.observation = Template(self.templates.command_cancelled_timeout_template).render(
                command=step.action, timeout=config.execution_timeout
            )
        self._total_execution_time += time.perf_counter() - began
        step.state = self.tools.get_state(self._env)
        for word, kind in WORDS.items():
            if word in step.observation:
                step.observation = step.observation.replace(word, "")
                raise kind
        return self.handle_submission(step)
