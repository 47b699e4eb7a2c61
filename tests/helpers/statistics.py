"""Chi-square: do these draws follow that law?"""

from collections.abc import Sequence

import torch
from scipy.stats import chisquare
from torch import Tensor

ENOUGH = 5.0  # expected draws per class, below which classes are pooled


def chi_square_p(draws: Sequence[int] | Tensor, probabilities: Tensor) -> float:
    """The p-value of draws [n] under a law [V]. A draw of probability zero gives 0."""
    law = probabilities.double()
    counts = torch.bincount(torch.as_tensor(draws), minlength=len(law)).double()
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law / law.sum() * counts.sum()
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    large = int((expected >= ENOUGH).sum())
    rest = expected[large:].sum()
    while large > 1 and 0 < rest < ENOUGH:  # the tail is one class, and takes in large ones until it is large itself
        large -= 1
        rest = expected[large:].sum()
    pooled = [counts[:large], expected[:large]]
    if rest > 0:
        pooled = [torch.cat([x[:large], x[large:].sum()[None]]) for x in (counts, expected)]
    return float(chisquare(*(x.numpy() for x in pooled)).pvalue)
