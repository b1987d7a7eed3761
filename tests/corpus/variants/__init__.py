"""How RL frameworks spell hidden -> log-probability or entropy -> loss; each one written for this project.

``VARIANTS[id]`` is a :class:`~tests.corpus.variants.registry.Variant`.
"""

from tests.corpus.variants import entropy, kl, logprob, logprob_more, near, policy, sequence
from tests.corpus.variants.registry import VARIANTS, Variant

__all__ = ["VARIANTS", "Variant", "entropy", "kl", "logprob", "logprob_more", "near", "policy", "sequence"]
