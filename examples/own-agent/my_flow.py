"""A game over several turns: the model guesses a number and is told whether to go higher or lower."""

import re

from agent_flow.plain_flow import PlainFlow
from agent_flow.reward import Reward

GUESS = re.compile(r"<guess>\s*(-?\d+)\s*</guess>")


class Guess(PlainFlow):
    class Config(PlainFlow.Config):
        max_guesses: int = 6

    async def converse(self, rollout, model):
        secret = rollout.task.row["secret"]
        messages = self.opening(rollout.task)
        for _ in range(self.config.max_guesses):
            reply = await model.ask(messages)
            said = GUESS.search(reply["content"] or "")
            if said and int(said[1]) == secret:
                return
            hint = "no <guess>" if not said else "higher" if int(said[1]) < secret else "lower"
            messages += [reply, {"role": "user", "content": hint}]
        rollout.exit_status = "LimitsExceeded"


def efficient(episode):
    """1 for the first guess, less for each further one."""
    said = GUESS.findall(episode.text)
    found = bool(said) and int(said[-1]) == episode.task.row["secret"]
    reward = 1.0 / episode.turns if found else 0.0
    return Reward(reward=reward, details={"guesses": episode.turns, "found": found})
