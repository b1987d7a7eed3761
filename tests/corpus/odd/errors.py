"""Indices that eager rejects, and those that it takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, case, labelled, log_prob, spoilt
from tests.corpus.spellings import ids, normal


@case("streamed", labelled(spoilt(77)), raises=True)
def banned_label_out_of_range(h, w, y):
    z = h @ w.t()
    z[torch.arange(N), y] = -1e9
    return z.logsumexp(-1)


@case("streamed", labelled(spoilt(77), lambda: normal(N, 99, seed=8)), raises=True)
def scattered_label_out_of_range_but_not_for_another_table(h, w, y, table):
    return (h @ w.t()).scatter(1, y[:, None], -1e9).logsumexp(-1), table.gather(1, y[:, None])


@case("streamed", labelled(spoilt(-100)), raises=True)
def gathered_label_negative(h, w, y):
    return log_prob(h @ w.t(), y)


@case("streamed", labelled(spoilt(V)), raises=True)
def cross_entropy_target_out_of_range(h, w, y):
    return F.cross_entropy(h @ w.t(), y)


@case("streamed", labelled(spoilt(V)), raises=True)
def one_hot_class_out_of_range(h, w, y):
    return (F.one_hot(y, V) * (h @ w.t()).log_softmax(-1)).sum(-1)


@case("streamed", labelled(spoilt(-3)), raises=True)
def one_hot_class_negative(h, w, y):
    return (F.one_hot(y, V) * (h @ w.t()).log_softmax(-1)).sum(-1)


@case("streamed", labelled(spoilt(V)), raises=True)
def indexed_label_out_of_range(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(N), y]


@case("streamed", labelled(lambda: torch.tensor([0, 5, 13])), raises=True)
def chosen_row_out_of_range(h, w, y):
    return (h @ w.t())[y].logsumexp(-1)


@case("nothing", labelled(lambda: ids(N).to(torch.uint8)), raises=True)
def index_that_is_a_mask_of_another_shape(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(N), y]


@case("streamed", labelled(lambda: ids(N).int()), raises=True, silent=True)
def cross_entropy_targets_of_32_bits(h, w, y):
    return F.cross_entropy(h @ w.t(), y)


@case("streamed", raises=True, silent=True)
def assertion_about_the_logits(h, w, y):
    z = h @ w.t()
    torch._assert_async((z.logsumexp(-1) > 1e9).all())
    return log_prob(z, y)


# ---------------------------------------------------------------- taken by eager


@case("streamed", labelled(spoilt(-3)))
def indexed_label_counted_from_the_end(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(N), y]


@case("streamed", labelled(lambda: torch.tensor([0, -5, -13])))
def chosen_rows_counted_from_the_end(h, w, y):
    return (h @ w.t())[y].logsumexp(-1)


@case("streamed", labelled(lambda: ids(N).int()))
def gathered_labels_of_32_bits(h, w, y):
    return log_prob(h @ w.t(), y)


@case("streamed", labelled(lambda: ids(N).int()))
def indexed_labels_of_32_bits(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(N), y]
