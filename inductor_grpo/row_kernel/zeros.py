"""When a gradient is zero in a whole row, told from the row's numbers before its last pass.

The gradients of a loss are sums of products of a wide value and a row's coefficient, such as ``(hot - p) * g``.  Where
the coefficients are zero and the wide factors finite, each element is exactly zero, and the row needs neither be read
again nor written.  Padding, masked and clipped tokens and groups without an advantage are such rows.

A wide factor is known to be finite where it is made of booleans, of numbers and of ``exp(y - r)`` with a row value r
for which ``max(y) - r`` is small, as in a softmax.  Other factors give no condition, and no row is left out.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.fx as fx

from ..graph import aten, prims
from .recognise import VIEWS, RowPlan, through_views

LARGEST_NUMBER = 1e6
"""Magnitude up to which a row's number may be a factor of what is to be finite."""
LARGEST_EXPONENT = 1.0
"""Those of a softmax are at most 0 before they are rounded."""
_LARGEST_PRODUCT = {torch.float16: 6e4}
_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
_SAME = (*VIEWS, prims.convert_element_type.default, aten.neg.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)


class Condition(NamedTuple):
    """What must hold for row values: that the one is ``zero``; that it is ``small``, at most :data:`LARGEST_NUMBER` in
    magnitude; that the first, a maximum, ``falls`` below :data:`LARGEST_EXPONENT` when the others are subtracted in
    turn.  What is subtracted from any element of a row comes to no more then, since rounding is monotone, and it is
    no nan: that would take a nan or +inf in the row, or a subtracted -inf, and then the maximum does not fall."""

    kind: Literal["zero", "small", "falls"]
    values: tuple[fx.Node, ...]


def zero_when(plan: RowPlan, out: fx.Node) -> list[Condition] | None:
    """Conditions under which all elements that ``out`` has in a row are zero; None where there are none to test."""
    found = _Conditions(plan).zero(out)
    return None if found is None else list(dict.fromkeys(found))


class _Conditions:
    def __init__(self, plan: RowPlan) -> None:
        self.wide = plan.wide
        reductions = [r for some in plan.passes for r in some if r.kind == "max"]
        self.maxima = {through_views(r.source): r.node for r in reductions}

    def zero(self, x: Any) -> list[Condition] | None:
        if not isinstance(x, fx.Node):
            return [] if x == 0 else None
        if x not in self.wide:
            return [Condition("zero", (x,))] if x.meta["val"].dtype.is_floating_point else None
        if x.target in _SAME:
            return self.zero(x.args[0])
        if x.kwargs:
            return None
        if x.target in _SUMS:
            return _both(self.zero(x.args[0]), self.zero(x.args[1]))
        if x.target is aten.where.self:
            return _both(self.zero(x.args[1]), self.zero(x.args[2]))
        if x.target in _PRODUCTS:
            for a, b in (x.args, x.args[::-1]):
                factor = self.bounded(b)
                if factor is not None and (found := _both(self.zero(a), factor[0])) is not None:
                    return found
        return None

    def bounded(self, x: Any) -> tuple[list[Condition], float] | None:
        """Conditions under which each element is finite, and a bound of their magnitudes."""
        if not isinstance(x, fx.Node):
            return ([], abs(x)) if math.isfinite(x) else None
        dtype = x.meta["val"].dtype
        if dtype == torch.bool:
            return [], 1
        if not dtype.is_floating_point:
            return None
        found = self._bounded_value(x)
        return found if found is not None and found[1] <= _LARGEST_PRODUCT.get(dtype, 1e30) else None

    def _bounded_value(self, x: fx.Node) -> tuple[list[Condition], float] | None:
        if x not in self.wide:
            return [Condition("small", (x,))], LARGEST_NUMBER
        if x.target is aten.exp.default:
            falls = self._falls(x.args[0])
            return None if falls is None else ([falls], math.exp(LARGEST_EXPONENT) * 1.01)
        if x.target in _SAME:
            return self.bounded(x.args[0])
        if x.target in _SUMS or x.target in _PRODUCTS or x.target is aten.where.self:
            if x.kwargs or len(x.args) > 3:
                return None
            a, b = map(self.bounded, x.args[-2:])
            if a is None or b is None:
                return None
            size = a[1] * b[1] if x.target in _PRODUCTS else a[1] + b[1]
            return a[0] + b[0], size
        return None

    def _falls(self, x: Any) -> Condition | None:
        """For an exponent ``y - r - s`` of which the maximum of y is known."""
        x, subtracted = through_views(x), []
        while x not in self.maxima:
            if not isinstance(x, fx.Node) or x.target is not aten.sub.Tensor or x.kwargs or len(x.args) != 2:
                return None
            if not isinstance(x.args[1], fx.Node) or x.args[1] in self.wide:
                return None
            if x.meta["val"].dtype.itemsize < 4:
                return None  # rounding would matter
            subtracted.append(x.args[1])
            x = through_views(x.args[0])
        return Condition("falls", (self.maxima[x], *subtracted[::-1]))


def _both(a: list[Condition] | None, b: list[Condition] | None) -> list[Condition] | None:
    return None if a is None or b is None else a + b


__all__ = ["LARGEST_EXPONENT", "LARGEST_NUMBER", "Condition", "zero_when"]
