"""Which nodes are vocabulary-sized, and along which dimension.

A :class:`Layout` says of a node: its rows are those of a *row space*, enumerated in row-major order over the dimensions
other than ``vocab``; ``vocab`` is the dimension that runs over the vocabulary, or None for one value a row.  Layouts
spread from the heads, forwards along the uses and backwards to the operands (the one-hot of a log-softmax's backward
descends from ``full``, not from a head), by one rule per operation (:mod:`inductor_grpo.rules`), until nothing changes.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch.fx as fx

from .graph import Size, aten, hint, is_one, is_tensor, right_aligned, shape, target_of


class Layout(NamedTuple):
    """Row space (a class of spaces that are known to be one) and vocabulary dimension of a node."""

    space: int
    vocab: int | None


class Group(NamedTuple):
    """One value for each ``length`` consecutive rows of a row space."""

    space: int
    length: Size


class Layouts:
    """The layouts of one graph; ``vocabulary`` is the smallest vocabulary of its heads."""

    def __init__(self) -> None:
        self._layouts: dict[fx.Node, Layout] = {}
        self._groups: dict[fx.Node, Group] = {}
        self._parents: list[int] = []
        self._queue: collections.deque[fx.Node] = collections.deque()
        self.conflicts: dict[fx.Node, tuple[str, str]] = {}
        """Nodes that no layout describes: rejection code and the reason."""
        self.vocabulary = 0

    # Row spaces

    def new_space(self) -> int:
        """A row space of its own."""
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, space: int) -> int:
        """The representative of a row space."""
        while self._parents[space] != space:
            space = self._parents[space]
        return space

    def unite(self, a: int, b: int) -> None:
        """Declares two row spaces to be one."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parents[max(a, b)] = min(a, b)

    # Layouts

    def __contains__(self, node: object) -> bool:
        return node in self._layouts

    def __getitem__(self, node: fx.Node) -> Layout:
        layout = self._layouts[node]
        return Layout(self.find(layout.space), layout.vocab)

    def get(self, node: object) -> Layout | None:
        """The layout of a node, or None."""
        return self[node] if isinstance(node, fx.Node) and node in self._layouts else None

    def nodes(self) -> set[fx.Node]:
        """The nodes that have a layout."""
        return set(self._layouts)

    def group(self, node: object) -> Group | None:
        """The group of a node with one value a group of rows, or None."""
        group = self._groups.get(node) if isinstance(node, fx.Node) else None
        return None if group is None else Group(self.find(group.space), group.length)

    def set_group(self, node: fx.Node, group: Group) -> None:
        """Notes that a node has one value a group of rows."""
        self._groups[node] = group

    def space_of(self, node: fx.Node) -> int | None:
        """The row space of a node, also of one with a value a group; None for a node from outside."""
        known = self.get(node) or self.group(node)
        return None if known is None else known.space

    def drop(self, nodes: set[fx.Node]) -> None:
        """Forgets the layouts of some nodes."""
        for node in nodes:
            self._layouts.pop(node, None)
            self._groups.pop(node, None)
            self.conflicts.pop(node, None)

    def set(self, node: object, space: int, vocab: int | None) -> None:
        """Gives a node a layout (a tensor computed in the graph; others are ignored) and queues what follows from
        it."""
        if target_of(node) is None or not is_tensor(node):
            return
        assert isinstance(node, fx.Node)
        if node.target is aten.full.default:
            return  # a constant has no rows of its own: unrelated regions may share it
        sizes = shape(node)
        if vocab is not None:
            vocab %= max(1, len(sizes))
            if is_one(sizes[vocab]):
                vocab = None
        known = self._layouts.get(node)
        if known is None:
            self._layouts[node] = Layout(space, vocab)
            self._queue.append(node)
        elif known.vocab != vocab:
            self.conflict(node, "LAYOUT", "two of its uses disagree on which dimension is the vocabulary")
        else:
            self.unite(known.space, space)

    def move(self, node: fx.Node, space: int) -> None:
        """Gives a row value to another row space of the same rows: it combines values of both."""
        self._layouts[node] = Layout(space, None)

    def conflict(self, node: fx.Node, code: str, reason: str) -> None:
        """Notes that a node cannot be streamed."""
        self.conflicts.setdefault(node, (code, reason))

    def rows(self, node: fx.Node, vocab: int | str | None = "own") -> list[Size]:
        """The sizes of a node without its vocabulary dimension."""
        dim = self[node].vocab if vocab == "own" else vocab
        return [s for i, s in enumerate(shape(node)) if i != dim]

    def columns(self, node: fx.Node) -> Size:
        """Size of the vocabulary dimension; 1 for a row value."""
        vocab = self[node].vocab
        return 1 if vocab is None else shape(node)[vocab]

    def is_wide(self, node: object) -> bool:
        """Vocabulary-sized: a node of the region that must not exist in memory (a few columns a row are allowed)."""
        layout = self.get(node)
        return layout is not None and layout.vocab is not None and hint(shape(node)[layout.vocab]) * 4 > self.vocabulary

    def drain(self) -> list[fx.Node]:
        """Nodes whose rules must be applied (again) because a layout next to them is new."""
        if not self._queue:
            return []
        node = self._queue.popleft()
        around = [node, *node.users, *node.all_input_nodes]
        around += [part for user in node.users if not is_tensor(user) for part in user.users]
        return [n for n in around if n.op == "call_function"]


def aligned_rows(sizes: list[Size], rank: int, vocab: int | None) -> list[Size]:
    """Row sizes of an operand, right-aligned to ``rank`` dimensions, without dimension ``vocab``."""
    return [s for i, s in enumerate(right_aligned(sizes, rank)) if i != vocab]
