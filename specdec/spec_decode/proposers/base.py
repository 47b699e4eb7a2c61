"""The seam between a host and a drafting method: plain tensors in, plain tensors out.

A host (the embedded engine, or LMDeploy through its plug-in) calls `absorb` after every step, for every committed
token of every request, and `propose` when somebody will draft. Next: dflash.py and dspark.py, which fill it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specdec.layers.cache_specs import CacheSpec
from specdec.spec_decode.proposers.draws import DraftSampling


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What a step hands to the proposer. T rows, B requests; the first B - P only absorb, the last P also draft.

    `taps` [T, m * Ht], `positions` [T], `entries` [T]: the rows, and the cache entries of their context.
    `row_offsets` [B + 1], `committed` [B]: of request r's rows the first committed[r] are accepted; rows behind may be
    written, since they lie beyond `lengths` and are overwritten before that grows over them. `slots` [B]: each
    request's own while it runs, 0 nobody's, for state that is not paged. `anchors` [P]: the tokens just emitted;
    `lengths` [P]: their positions; `page_table` [P, W]: pages that hold positions below them.
    `cache`: what the proposer's spec allocated. `sampling` of the P; None: every draft is the likeliest token.
    """

    taps: Tensor
    positions: Tensor
    entries: Tensor
    row_offsets: Tensor
    committed: Tensor
    slots: Tensor
    anchors: Tensor
    lengths: Tensor
    page_table: Tensor
    page_size: int
    cache: Any
    sampling: DraftSampling | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """tokens [P, K] target ids; survival [P, K] fp32 or None: the chance that drafts 1..k are all accepted, which
    depends for draft k on the drafts before it and never on draft k itself. q [P, K, V] fp32 over target ids: what the
    drafts were drawn from, where the step's sampling keeps it.
    """

    tokens: Tensor
    survival: Tensor | None
    q: Tensor | None = None


class Proposer(Protocol):
    """`taps`: target layers whose output it reads, 0-based, -1 the embedding. `num_drafts`: K, tokens per proposal.

    `has_confidence`: its proposals tell their survival.
    """

    taps: tuple[int, ...]
    num_drafts: int
    has_confidence: bool

    def cache_spec(self) -> CacheSpec | None: ...

    def absorb(self, step: DraftStep) -> None: ...

    def propose(self, step: DraftStep) -> Proposal: ...
