"""The lightning indexer: which compressed entries a row attends to.

Formulas: docs/deepseek_v4.md, section "Indexer".
"""

from torch import Tensor

from specdec.kernels.compressor import Entries
from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


def choose_entries(queries: Tensor, weights: Tensor, pages: Tensor, entries: Entries, k: int) -> Entries:
    """The k < E best entries of each row, best first, or as many as it sees.

    Score of entry j: sum_h weights[t, h] relu(queries[t, h] . key_j); queries [T, h, w], weights [T, h] fp32, signed,
    keys in pages [P, n, w]. Equal scores: the earlier entry.
    """
    return _implementation(queries.device.type, 'choose_entries')(queries, weights, pages, entries, k)
