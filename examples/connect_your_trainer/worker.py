"""A stand-in for your workers: groups of random rollouts, sampled uniformly, rewarded for even tokens."""

import argparse
import secrets
import tempfile

import numpy as np
from token_tracking import Sample, Turn
from trainer_bridge import SampleSender, SenderConfig

VOCABULARY = 32

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--to", default="tcp://127.0.0.1:5557")
parser.add_argument("--spool", help="folder that outlives this process; default: a temporary one")
parser.add_argument("--groups", type=int, default=40)
parser.add_argument("--group-size", type=int, default=4)
args = parser.parse_args()

rng = np.random.default_rng(1)


def rollout(group_id: str, prompt: int = 4) -> Sample:
    """A prompt and one sampled turn of 8 to 24 tokens."""
    n = prompt + int(rng.integers(8, 25))
    sampled = np.arange(n) >= prompt
    token_ids = rng.integers(0, VOCABULARY, n, dtype=np.int32)
    logprob = -np.log(VOCABULARY)
    return Sample(
        rollout_id=secrets.token_hex(16),
        group_id=group_id,
        task_id="even tokens",
        token_ids=token_ids,
        loss_mask=sampled.astype(np.uint8),
        logprobs=np.where(sampled, logprob, np.nan).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        prompt_length=prompt,
        turns=(
            Turn(
                start=prompt,
                end=n,
                finish_reason="stop",
                logprob_kind="raw",
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                min_p=0.0,
            ),
        ),
        reward=float(np.mean(token_ids[prompt:] % 2 == 0)),
        status="completed",
        source="sampled",
        policy_run="even-tokens",
    )


with tempfile.TemporaryDirectory() as temporary:
    spool = args.spool or temporary
    # Stored by the receiver is enough for this worker to end; by default a sender waits for the commit.
    with SampleSender(args.to, spool=spool, config=SenderConfig(settle="stored")) as sender:
        for _ in range(args.groups):
            group_id = secrets.token_hex(16)
            for _ in range(args.group_size):
                sender.send(rollout(group_id))
        sender.wait_settled(timeout_s=60.0)
        print(sender.stats().acknowledged, "rollouts stored by the trainer")
