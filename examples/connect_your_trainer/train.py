"""Connect your trainer: whole groups over the bridge, a GRPO step, a checkpoint. Plain torch."""

import argparse
import json
from pathlib import Path

import torch
from trainer_bridge import Collator, ReceiverConfig, SampleDataset, SampleReceiver
from trainer_bridge.batch import token_logprobs

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bind", default="tcp://127.0.0.1:5557")
parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and samples")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--group-size", type=int, default=4)
args = parser.parse_args()

# Your model goes here: token ids [rows, tokens] to logits [rows, tokens, vocabulary].
model = torch.nn.Embedding(32, 32)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
collator = Collator(weights="rollout", advantages="grpo")
checkpoint, half_written = args.out / "checkpoint.pt", args.out / "checkpoint.tmp"

config = ReceiverConfig(group_size=args.group_size, commit_on="checkpoint")
with SampleReceiver(args.bind, out=args.out / "samples", config=config) as receiver:
    dataset = SampleDataset(receiver, collator.pad, groups=2, deadline_s=60.0)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["dataset"])
        step = saved["step"]
    print(json.dumps({"listening": receiver.address, "step": step}), flush=True)
    steps = iter(dataset)
    while step < args.steps:
        batches = [batch.torch() for batch in next(steps)]  # weights add up to 1 over all of them
        for batch in batches:
            ratio = torch.exp(token_logprobs(model(batch.token_ids), batch) - batch.logprobs)
            gain = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
            (-gain * batch.weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dataset.commit()  # in the weights, and so in the state that is saved with them
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state["dataset"] = dataset.state_dict()
        torch.save(state, half_written)  # our own file, read with weights_only: the wire has no pickle
        half_written.replace(checkpoint)
        dataset.checkpoint_saved(state["dataset"])  # now the workers may forget it
        receiver.publish(weights_version=step)
        said = {"step": step, "reward": batch.rewards.mean().item(), "ratio": ratio.mean().item()}
        print(json.dumps(said), flush=True)
