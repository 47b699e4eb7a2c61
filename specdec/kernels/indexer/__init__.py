"""The lightning indexer: which compressed entries a row attends to.

Formulas: docs/deepseek_v4.md, section "Indexer".
"""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)


def choose_entries(
    queries: Tensor, weights: Tensor, pages: Tensor, entries: Tensor, visible: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k best of each row's entries -> (flat entries [T, k], visible [T, k]).

    Score of entry j: sum_h weights[t, h] relu(queries[t, h] . key_j), queries [T, h, w], weights [T, h] fp32 (signed);
    keys lie in pages [P, n, w] at the flat `entries` [T, E], of which `visible` [T, E] count. Equal scores: the earlier
    entry. Where a row sees fewer than k, the rest is not visible. k < E.
    """
    return _implementation(queries.device.type, 'choose_entries')(queries, weights, pages, entries, visible, k)
