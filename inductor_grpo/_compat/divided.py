"""Sizes that are equal because of what a trace assumed about their parts.

``logp.view(8, -1)`` of ``u1`` tokens is ``[8, u1 // 8]``, and the trace assumes that ``u1 == 8 * (u1 // 8)``; where two
such tensors meet, that ``u1 // 8 == u2 // 8``.  torch keeps these as assertions of the graph and does not conclude that
``u1 == u2``.
"""

from __future__ import annotations

import weakref
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from . import fxgraph

Rules = dict[sympy.Expr, sympy.Expr]

_known: weakref.WeakKeyDictionary[Any, tuple[int, Rules]] = weakref.WeakKeyDictionary()


def equal(env: Any, a: Any, b: Any) -> bool:
    """Whether two sizes, numbers or expressions of ``env``, are equal in every call that passes its assertions."""
    rules = _rules(env)
    return bool(rules) and sympy.expand(_written(sympy.sympify(a), rules) - _written(sympy.sympify(b), rules)) == 0


def _written(expr: sympy.Expr, rules: Rules) -> sympy.Expr:
    """``expr`` with each symbol that is a multiple written as the number times its quotient."""
    for _ in range(4):  # a quotient can be that of another one
        following = expr.xreplace(rules)
        if following == expr:
            break
        expr = following
    return expr


def _rules(env: Any) -> Rules:
    count = sum(map(len, env.deferred_runtime_asserts.values())) + len(env.guards)
    known = _known.get(env)
    if known is None or known[0] != count:
        equations = [env.replace(expr) for expr in [*fxgraph.assertions(env), *(guard.expr for guard in env.guards)]]
        known = (count, _solved([e for e in equations if isinstance(e, sympy.Eq)]))
        _known[env] = known
    return known[1]


def _solved(equations: list[sympy.Eq]) -> Rules:
    rules: Rules = {}
    for equation in equations:
        for whole, parts in ((equation.lhs, equation.rhs), (equation.rhs, equation.lhs)):
            quotients = [q for q in parts.atoms(FloorDiv) if q.args[0] == whole]
            if not whole.is_Symbol or len(quotients) != 1 or parts != quotients[0].args[1] * quotients[0]:
                continue
            if not quotients[0].args[1].is_Integer:
                continue
            quotient = sympy.Symbol(f"({quotients[0]})", integer=True, nonnegative=True)
            rules |= {quotients[0]: quotient, whole: quotients[0].args[1] * quotient}
    if not rules:
        return rules
    for equation in equations:
        left, right = _written(equation.lhs, rules), _written(equation.rhs, rules)
        factor = sympy.gcd(left, right)
        left, right = sympy.cancel(left / factor), sympy.cancel(right / factor)
        if left.is_Symbol and right.is_Symbol and left != right:
            rules[right] = left
    return rules
