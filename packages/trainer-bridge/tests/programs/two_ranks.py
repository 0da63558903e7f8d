"""Two data-parallel ranks, here as threads; as processes, each runs its own half."""

import threading

from trainer_bridge import Collator, RankReceiver, SampleReceiver, SampleSender
from trainer_bridge.testing import make_rollout

losses: list[float] = []


def train(step):
    for batch in Collator().pad(step):  # this rank's share, weighted and compared as part of the whole step
        loss = (batch.weights * 1.0).sum()  # gradients averaged over ranks (DDP, FSDP): times step.world
        losses.append(loss)
    step.commit()  # on rank 0 it waits for the others


def rank_1(address):
    with RankReceiver(address, rank=1, world=2) as receiver:
        train(receiver.next_batch(groups=2))


with SampleReceiver() as receiver, SampleSender(receiver.address) as sender:
    other = threading.Thread(target=rank_1, args=[receiver.address])
    other.start()
    for group in range(2):
        sender.send_group([make_rollout(4 * group + n, group=group)[0] for n in range(4)])
    train(receiver.next_batch(groups=2, deadline_s=40.0, world=2))
    other.join()
    print(sum(losses))  # weights of all ranks together: 1.0
