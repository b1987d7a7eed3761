"""What to change: the cure of a rejection, by its code and the operation that caused it."""

from __future__ import annotations

CURES: dict[str, str] = {
    "NO_HEAD": "compile the head and the loss as one function, without a graph break between them",
    "TOO_SMALL": "lower grpo.min_logits_bytes (0 rewrites every head)",
    "UNPROFITABLE": "set a smaller grpo.chunk_bytes",
    "DISABLED": "take the option back",
    "LOGITS_GIVEN": "compile the head together with this loss, and pass it hidden states",
    "LOGITS_RETURNED": "return a value a token (the log-prob of its label, the entropy) instead",
    "NO_ROW_RULE": "apply it to values a token, after the log-probs are taken",
    "MIXES_ROWS": "reduce over the vocabulary (dim=-1) first, and mix the values of tokens afterwards",
    "RANDOM": "draw the numbers outside of the function and pass them in",
    "LAYOUT": "keep the vocabulary as a dimension of its own, the last one",
    "INTERNAL": "please report it with what TORCH_LOGS=+inductor_grpo prints",
}
"""For each rejection code, what helps in general."""

_NORMALISES = ("softmax", "log_softmax", "logsumexp")
_MOVES = ("flip", "roll", "index_select", "repeat", "repeat_interleave")
_SUMS = ("cumsum", "logcumsumexp", "cumprod", "sort", "topk", "cummax", "cummin")
_SENDS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_to_all_single", "broadcast")
_ADDS = ("all_reduce", "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
_DROPS = ("dropout", "bernoulli", "alpha_dropout")

_BY_OPERATION: dict[tuple[str, str], str] = {
    **{("MIXES_ROWS", op): f"normalise over the vocabulary: {op}(dim=-1)" for op in _NORMALISES},
    **{("MIXES_ROWS", op): f"apply {op} to the hidden states, before the head" for op in _MOVES},
    **{("MIXES_ROWS", op): f"apply {op} to values a token, after the log-probs are taken" for op in _SUMS},
    **{
        ("NO_ROW_RULE", op): "send values a token: of a part of the vocabulary the maximum, the sum of exponentials and"
        " the label's logit, of a part of the tokens their log-probs"
        for op in _SENDS
    },
    **{
        ("NO_ROW_RULE", op): "split the head over the vocabulary instead of hidden, or gather hidden and weight first"
        for op in _ADDS
    },
    **{("RANDOM", op): "apply dropout to the hidden states, before the head" for op in _DROPS},
}


def cure(code: str, op: str = "") -> str:
    """One imperative phrase."""
    return _BY_OPERATION.get((code, op), CURES[code])
