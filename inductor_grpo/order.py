"""One order for what a chunk program computes, whatever order the walk through the graph found it in.

The pieces of a loop are the same program over other rows.  The walk may reach the outputs of one piece in another order
than those of the next; their texts can only be compared in an order that depends on the values alone.
"""

from __future__ import annotations

import hashlib

import torch.fx as fx

from .draft import Draft, RowInput
from .graph import map_args, shape, value


def in_order(draft: Draft) -> tuple[Draft, list[int]]:
    """The same program with its outputs, calls and inputs in the order of its values; and for each output of ``draft``
    the new place."""
    prints = _prints(draft)
    outputs = draft.outputs
    order = sorted(range(len(outputs)), key=lambda i: (outputs[i].kind, prints[outputs[i].value], i))
    ordered = Draft(draft.rows, draft.depth, draft.origin)
    new = ordered.absorb(draft, order=order)
    return ordered, [new[order.index(i)] for i in range(len(order))]


def _prints(draft: Draft) -> dict[fx.Node, str]:
    """What each node of the body computes, as a digest in which row inputs are known by their kind alone."""
    rows, whole = list(draft.row_inputs), list(draft.whole_inputs)
    found: dict[fx.Node, str] = {}

    def of_row(row: RowInput) -> str:
        return f"row {value(row.node).dtype} {shape(row.node)[-1]}"

    for node in draft.graph.nodes:
        if node.op == "placeholder":
            found[node] = node.name
            continue
        source, place = (*node.args, None, None)[:2]
        text = ""
        if isinstance(source, fx.Node) and source.op == "placeholder" and isinstance(place, int):
            if source.name == "rows":
                text = of_row(rows[place])
            elif source.name == "whole":
                text = f"whole {whole[place].name}"
            elif source.name == "logits":
                projection = list(draft.projections)[place]
                text = f"logits {of_row(rows[projection.hidden])} {whole[projection.weight].name}"
        if not text:
            args, kwargs = map_args(node, lambda a: found[a])
            text = f"{node.target} {args} {kwargs}"
        found[node] = hashlib.sha256(text.encode()).hexdigest()
    return found
