"""Rows repeated, reordered, dropped, paired, and cut into chunks by hand."""

from __future__ import annotations

import torch

from tests.corpus.odd.registry import N, V, also, case, head, log_prob, pick
from tests.corpus.spellings import ids, normal

TWICE = torch.tensor([0, 0, 5, 5, 12, 0])


@case("streamed")
def chosen_rows_with_duplicates(h, w, y):
    z = (h @ w.t())[TWICE]
    return log_prob(z, y[:6]), z.square().sum(-1)


@case("MIXES_ROWS")
def chosen_rows_and_a_mixture_of_them(h, w, y):
    log_probs = (h @ w.t())[TWICE].log_softmax(-1)
    return log_probs[:, 3], log_probs.logsumexp(0)


@case("NO_ROW_RULE")
def rows_tiled_three_times(h, w, y):
    return log_prob((h @ w.t()).repeat(3, 1), y.repeat(3))


@case("MIXES_ROWS")
def rows_repeated_in_place(h, w, y):
    return log_prob((h @ w.t()).repeat_interleave(2, 0), y.repeat_interleave(2))


@case("MIXES_ROWS")
def four_temperatures_by_expanding(h, w, y):
    z = (h @ w.t())[:, None].expand(-1, 4, -1)
    return (z / torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None]).logsumexp(-1)


@case("MIXES_ROWS")
def rows_flipped(h, w, y):
    return log_prob((h @ w.t()).flip(0), y)


@case("MIXES_ROWS")
def rows_and_vocabulary_flipped(h, w, y):
    return (h @ w.t()).flip(0, 1).log_softmax(-1)[:, 0]


@case("NO_ROW_RULE")
def rows_sorted(h, w, y):
    return (h @ w.t()).sort(0).values.logsumexp(-1)


# ---------------------------------------------------------------- one row against another


@case("streamed")
def divergence_from_the_previous_row(h, w, y):
    log_probs = (h @ w.t()).log_softmax(-1)
    return (log_probs[1:].exp() * (log_probs[1:] - log_probs[:-1])).sum(-1)


@case("MIXES_ROWS")
def divergence_from_the_flipped_rows(h, w, y):
    log_probs = (h @ w.t()).log_softmax(-1)
    return (log_probs.exp() * (log_probs - log_probs.flip(0))).sum(-1)


@case("LAYOUT")
def divergence_from_the_indexed_rows(h, w, y):
    log_probs = (h @ w.t()).log_softmax(-1)
    return (log_probs.exp() * (log_probs - log_probs[torch.arange(N - 1, -1, -1)])).sum(-1)


@case("streamed", head(3, batch=3))
def divergence_from_the_transposed_batch(h, w, y):
    log_probs = (h @ w.t()).log_softmax(-1)
    return (log_probs.exp() * (log_probs - log_probs.transpose(0, 1))).sum(-1)


@case("MIXES_ROWS", head(3, batch=3))
def divergence_of_all_pairs(h, w, y):
    log_probs = (h @ w.t()).log_softmax(-1).flatten(0, 1)
    return (log_probs.exp()[:, None] * (log_probs[:, None] - log_probs[None])).sum(-1)


@case("NO_ROW_RULE", head(5, batch=2))
def products_of_all_pairs(h, w, y):
    p = (h @ w.t()).flatten(0, 1).softmax(-1)
    return p @ p.t(), torch.einsum("nv,nv->n", p, p)


@case("streamed")
def normalised_by_another_row(h, w, y):
    z = h @ w.t()
    lse = z.logsumexp(-1)
    return pick(z[1:] - lse[:-1, None], y[1:]), (z - lse.flip(0)[:, None]).square().sum(-1)


@case("streamed", head(batch=2))
def guidance_of_two_halves(h, w, y):
    with_prompt, without = (h @ w.t()).chunk(2, 0)
    return log_prob(without + 1.5 * (with_prompt - without), y[:1])


@case("streamed", head(batch=2))
def contrastive_decoding(h, w, y):
    expert, amateur = (h @ w.t()).unbind(0)
    return log_prob(expert.log_softmax(-1) - 0.5 * amateur.log_softmax(-1), y[0])


@case("streamed", head(batch=4))
def preference_pairs_in_two_halves(h, w, y):
    chosen, rejected = log_prob(h @ w.t(), y).sum(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


# ---------------------------------------------------------------- several candidates a row


def three(y):
    return [y, (y + 1) % V, (y + 2) % V]


@case("streamed")
def candidates_by_gather(h, w, y):
    return (h @ w.t()).log_softmax(-1).gather(1, torch.stack(three(y), 1))


@case("LAYOUT")
def candidates_by_index_first(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(N), torch.stack(three(y))]


@case("LAYOUT")
def candidates_by_index_last(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(N)[:, None], torch.stack(three(y), 1)]


@case("LAYOUT", head(1))
def candidates_by_index_of_one_row(h, w, y):
    return (h @ w.t()).log_softmax(-1)[torch.arange(1), torch.tensor([3, 5, 7])]


# ---------------------------------------------------------------- chunks by hand


@case("streamed")
def overlapping_chunks_of_the_hidden(h, w, y):
    return torch.cat([log_prob(h[i : i + 5] @ w.t(), y[i : i + 5]) for i in range(0, 12, 3)])


@case("streamed")
def chunks_with_weights_of_their_own(h, w, y):
    parts = [-log_prob(h[i : i + 4] @ w.t(), y[i : i + 4]).sum() * (i + 1) for i in range(0, N, 4)]
    return sum(parts)


@case("streamed", also(lambda: normal(N, seed=4), lambda: ids(N, high=2, seed=5)))
def chunks_masked_by_different_dtypes(h, w, y, first, second):
    masks = (first[:6] > 0, second[6:])
    return torch.cat([(x @ w.t() * ~m[:, None]).logsumexp(-1) for x, m in zip((h[:6], h[6:]), masks)])


@case("streamed MIXES_ROWS", also(lambda: normal(N, 1, seed=4), lambda: normal(N, V, seed=5)))
def chunks_scaled_by_a_column_and_by_a_matrix(h, w, y, column, matrix):
    scaled = (h[:6] @ w.t() * column[:6], h[6:] @ w.t() * matrix[6:])
    return torch.cat([z.logsumexp(-1) for z in scaled])
