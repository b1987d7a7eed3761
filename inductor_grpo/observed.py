"""Outputs that are only observed: metrics beside the loss that nobody differentiates, though anybody may.

In the joint graph each has a tangent, and the gradients depend on all of them.  The pass writes the gradients twice: by
the loss's tangent alone, in one pass (:mod:`inductor_grpo.one_pass`), and by all of them, in two.  ``unless`` chooses
between the two; when the programs are known, it becomes part of the call of the second, which then only runs where it
is needed (:mod:`inductor_grpo.by_use`).
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch.fx as fx

from .depth import TANGENT_DEPTH
from .draft import Unless
from .exits import Contribution, Exit
from .graph import GraphBuilder, target_of
from .layout import Layouts
from .ops import unless


def stand_in(
    builder: GraphBuilder, layouts: Layouts, exit: fx.Node, twin: fx.Node, factor: fx.Node, others: list[fx.Node]
) -> None:
    """What reads ``exit`` outside of the region reads its ``twin`` times ``factor``, unless one of the tangents
    ``others`` is not zero."""
    region = [user for user in exit.users if layouts.is_wide(user)]
    chosen = builder.call(unless, twin, factor, others, exit)
    exit.replace_all_uses_with(chosen, delete_user_cb=lambda user: user is not chosen and user not in region)


def in_step(graph: fx.Graph, exits: list[Exit]) -> None:
    """Puts the gradients of the forward in the order of those of the backward: of a sum that stands for several, the
    first has it all."""
    of = {choice.args[0]: choice.args[3] for choice in graph.nodes if target_of(choice) is unless}
    places = {exit.node: place for place, exit in enumerate(exits)}
    exits.sort(key=lambda exit: places.get(cast(fx.Node, of.get(exit.node)), places[exit.node]))


def choose_by_use(graph: fx.Graph, exits: list[Exit]) -> None:
    """Lets the programs of a backward stand behind those of the forward.  Where programs do not correspond, the
    gradients are those of two passes, and the others are no exits any more."""
    of = {exit.node: exit for exit in exits}
    choices = [n for n in graph.nodes if target_of(n) is unless]
    backwards: dict[int, list[tuple[fx.Node, Contribution, Contribution]]] = {}
    for choice in choices:
        pair = _pair(*(of.get(cast(fx.Node, choice.args[place])) for place in (0, 3)))
        if pair is not None:
            backwards.setdefault(id(pair[1].draft), []).append((choice, *pair))
    made: set[fx.Node] = set()
    for found in backwards.values():
        (choice, first, second), *_ = found
        forward, backward = first.draft, second.draft
        places = {(theirs.place, ours.place) for _, ours, theirs in found}
        ready = dict(places)
        used = {c.place for exit in exits for c in exit.contributions if c.draft is backward}
        if used == set(ready) and len(places) == len(ready) and all(ours.draft is forward for _, ours, _ in found):
            forward.key = hashlib.sha256(forward.program("float32").to_text().encode()).hexdigest()[:16]
            forward.spare |= set(ready.values())
            backward.unless = Unless(forward, ready, cast(fx.Node, choice.args[1]), cast(Any, choice.args[2]))
            made |= {cast(fx.Node, choice.args[0]) for choice, _, _ in found}
    in_vain = {choice.args[0] for choice in choices} - made
    for choice in choices:
        choice.replace_all_uses_with(cast(fx.Node, choice.args[3]))
        graph.erase_node(choice)
    exits[:] = [exit for exit in exits if exit.node not in in_vain or exit.node.users]


def _pair(ready: Exit | None, complete: Exit | None) -> tuple[Contribution, Contribution] | None:
    """The outputs behind a gradient in forward and backward, where each is one output and they are alike."""
    if ready is None or complete is None or ready.kind != complete.kind:
        return None
    if len(ready.contributions) != 1 or len(complete.contributions) != 1:
        return None
    ours, theirs = ready.contributions[0], complete.contributions[0]
    alike = (ours.path, ours.piece, ours.adds) == (theirs.path, theirs.piece, theirs.adds)
    by_depth = ours.draft.depth < TANGENT_DEPTH <= theirs.draft.depth
    return (ours, theirs) if alike and by_depth and _output(ours) == _output(theirs) else None


def _output(contribution: Contribution) -> tuple[object, ...]:
    output = contribution.draft.outputs[contribution.place]
    return output.kind, output.columns, output.dtype
