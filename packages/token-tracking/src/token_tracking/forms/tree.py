"""`PrefixTree`: samples that begin alike, with every shared token once, for trainers with tree attention."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.sample import Sample, Turn

Hang = tuple[int | None, int]
"""The earlier sample that a sample's own tokens hang on (None: it is a root), and at which token."""


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens that one or more sequences go through whole."""

    start: int
    """First token, an index into the tree's arrays."""
    end: int
    parent: int | None
    """Index of the node before it; it is smaller than its own. None: a root."""
    position: int
    """Position of the first token in every sequence that goes through the node."""
    sample: int
    """Index of the sample whose tokens these are: its loss mask, log-probabilities and versions. Other
    channels, such as routed experts, are that sample's rows from `position` on."""


class TreeLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sample's sequence ends, and what a trainer needs to weight its tokens."""

    node: int
    rollout_id: str
    group_id: str
    attempt: int
    part: int
    parts: int
    reward: float | None
    in_loss: bool
    in_baseline: bool


class PrefixTree(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Samples as one forest; arrays of shape `[n]` in depth-first order, a parent before its children.

    A token may attend to the tokens of its own node before it and to all of the nodes above it.
    """

    nodes: tuple[TreeNode, ...]
    leaves: tuple[TreeLeaf, ...]
    """One per sample, in their order."""
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    """1 where a token is trained, in whichever sample; it stands here once."""
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    turns: tuple[Turn, ...]
    """The trained turns; `start` and `end` are indices into the tree's arrays. No node cuts one."""
    kept_ids: npt.NDArray[np.int32] | None = None
    kept_offsets: npt.NDArray[np.int64] | None = None
    """As in `Sample`. None: no sample has them."""

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Position of each token in its sequence, int32 `[n]`."""
        runs = [np.arange(n.position, n.position + n.end - n.start, dtype=np.int32) for n in self.nodes]
        return np.concatenate([np.empty(0, np.int32), *runs])

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with loss mask 1: the sum over the samples."""
        return int(np.count_nonzero(self.loss_mask))

    def sequence(self, sample: int) -> npt.NDArray[np.intp]:
        """Indices into the tree's arrays that give the sequence of a sample back."""
        runs: list[npt.NDArray[np.intp]] = []
        at: int | None = self.leaves[sample].node
        while at is not None:
            node = self.nodes[at]
            runs.append(np.arange(node.start, node.end))
            at = node.parent
        return np.concatenate(runs[::-1])


def hang(samples: Sequence[Sample]) -> list[Hang]:
    """Where the own tokens of each sample begin.

    A token is shared if its id and all before it are equal, and it is not trained in this sample: tokens that
    two samples train are two tokens, whatever their ids. No turn is cut.
    """
    hangs: list[Hang] = []
    for index, sample in enumerate(samples):
        trained = np.flatnonzero(sample.loss_mask)
        limit = int(trained[0]) if trained.size else len(sample)
        on, at = max(
            ((other, _common(samples[other], sample, limit)) for other in range(index)),
            key=lambda found: found[1],
            default=(None, 0),
        )
        while on is not None and (at := _uncut(samples[on], at)) <= hangs[on][1]:
            on = hangs[on][0]
        hangs.append((on, at))
    return hangs


def _common(other: Sample, sample: Sample, limit: int) -> int:
    limit = min(limit, len(other))
    differ = np.flatnonzero(other.token_ids[:limit] != sample.token_ids[:limit])
    return int(differ[0]) if differ.size else limit


def _uncut(sample: Sample, at: int) -> int:
    return next((turn.start for turn in sample.turns if turn.start < at < turn.end), at)


def prefix_tree(samples: Sequence[Sample]) -> PrefixTree:
    """The samples of a rollout, or of a whole group, with every shared token once.

    Check each sample first (`Sample.require_logprobs`, `in_loss`): the tree holds the tokens of all.

    Args:
        samples: as `Conversation.samples` gives them, or as they came to the trainer. Not empty ones.
    """
    hangs = hang(samples)
    cuts = [{len(sample)} for sample in samples]
    hung: dict[Hang, list[int]] = {}
    for index, (on, at) in enumerate(hangs):
        hung.setdefault((on, at), []).append(index)
        if on is not None:
            cuts[on].add(at)
    nodes: list[TreeNode] = []
    ends: list[int] = [0] * len(samples)
    # Sample, first token and parent of runs still to place; the last one is next.
    waiting: list[tuple[int, int, int | None]] = [
        (root, 0, None) for root in reversed(hung.get((None, 0), []))
    ]
    while waiting:
        index, start, parent = waiting.pop()
        end = min((cut for cut in cuts[index] if cut > start), default=start)
        if end > start:
            at = nodes[-1].end if nodes else 0
            nodes.append(
                TreeNode(start=at, end=at + end - start, parent=parent, position=start, sample=index)
            )
            parent = len(nodes) - 1
        ends[index] = parent or 0
        waiting += [(child, end, parent) for child in reversed(hung.get((index, end), []))]
        if end > start and end < len(samples[index]):
            waiting.append((index, end, parent))
    return _filled(samples, nodes, ends)


def _filled(samples: Sequence[Sample], nodes: Sequence[TreeNode], ends: Sequence[int]) -> PrefixTree:
    spans = [(samples[node.sample], node.position, node.position + node.end - node.start) for node in nodes]
    turns = tuple(
        msgspec.structs.replace(turn, start=turn.start + node.start - low, end=turn.end + node.start - low)
        for node, (sample, low, high) in zip(nodes, spans, strict=True)
        for turn in sample.turns
        if low <= turn.start and turn.end <= high and bool(sample.loss_mask[turn.start : turn.end].any())
    )
    counts = [np.empty(0, np.int64)]
    kept = [np.empty(0, np.int32)]
    for sample, low, high in spans:
        if sample.kept_ids is None or sample.kept_offsets is None:
            counts.append(np.zeros(high - low, np.int64))
        else:
            counts.append(np.diff(sample.kept_offsets[low : high + 1]))
            kept.append(sample.kept_ids[sample.kept_offsets[low] : sample.kept_offsets[high]])
    with_sets = any(sample.kept_ids is not None for sample in samples)
    return PrefixTree(
        nodes=tuple(nodes),
        leaves=tuple(_leaf(sample, end) for sample, end in zip(samples, ends, strict=True)),
        token_ids=np.concatenate([np.empty(0, np.int32), *(s.token_ids[a:b] for s, a, b in spans)]),
        loss_mask=np.concatenate([np.empty(0, np.uint8), *(s.loss_mask[a:b] for s, a, b in spans)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(s.logprobs[a:b] for s, a, b in spans)]),
        versions=np.concatenate([np.empty(0, np.int32), *(s.versions[a:b] for s, a, b in spans)]),
        turns=turns,
        kept_ids=np.concatenate(kept) if with_sets else None,
        kept_offsets=np.concatenate([[0], np.cumsum(np.concatenate(counts))]) if with_sets else None,
    )


def _leaf(sample: Sample, node: int) -> TreeLeaf:
    return TreeLeaf(
        node=node,
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        attempt=sample.attempt,
        part=sample.part,
        parts=sample.parts,
        reward=sample.reward,
        in_loss=sample.in_loss,
        in_baseline=sample.in_baseline,
    )
