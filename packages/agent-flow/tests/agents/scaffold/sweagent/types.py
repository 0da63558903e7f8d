from typing import Any

from pydantic import BaseModel


class StepOutput(BaseModel):
    query: list[dict] = []
    thought: str = ""
    action: str = ""
    output: str = ""
    observation: str = ""
    execution_time: float = 0.0
    done: bool = False
    exit_status: int | str | None = None
    submission: str | None = None
    state: dict[str, str] = {}
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_ids: list[str] | None = None
    extra_info: dict[str, Any] = {}

    def to_template_format_dict(self):
        own = {"tool_calls", "tool_call_ids", "state"}
        return {**self.model_dump(exclude=own), **self.state}
