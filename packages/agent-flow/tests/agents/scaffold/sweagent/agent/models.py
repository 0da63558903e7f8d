from pydantic import BaseModel


class InstanceStats(BaseModel):
    instance_cost: float = 0
    tokens_sent: int = 0
    tokens_received: int = 0
    api_calls: int = 0
