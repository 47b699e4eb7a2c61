"""Drafts drawn from q, tested by p / q, replaced from what p has beyond q: the law is p, whatever q is."""

import pytest
import torch
from torch import Tensor

from specdec.plan import Stage
from specdec.spec_decode.logits import PROBABILISTIC, LogitRows, Sampling
from specdec.spec_decode.proposers.draws import DraftSampling, distributions, draw_rows
from specdec.spec_decode.rejection_sampler import Verdict, verify
from tests.helpers.statistics import chi_square_p
from tests.spec_decode.test_logits import LAW, LOGITS, params, settings_of

COUNT = 200_000
V, K = len(LAW), 2
STAGES = Stage.NOISE | Stage.FILTERS | Stage.DRAFT_NOISE | Stage.RATIO
NEXT = LOGITS.flip(0)  # what follows the first token, whichever it was
DRAFTS: dict[str, Tensor] = {
    'the target itself': LOGITS,
    'flat': torch.zeros(V),
    'against it': -2 * LOGITS,
    'sure of the likeliest': 20.0 * (LOGITS.max() == LOGITS),
    'sure of the unlikeliest': 20.0 * (LOGITS.min() == LOGITS),
    'random': torch.randn(V, generator=torch.Generator().manual_seed(3)),
}


def many(settings: Sampling, count: int) -> Sampling:
    return Sampling(
        **{n: getattr(settings, n).expand(count, *getattr(settings, n).shape[1:]) for n in Sampling.__slots__}
    )


def rounds(draft: Tensor, count: int = COUNT, seed: int = 77, **changes: float) -> tuple[Verdict, Tensor]:
    """Independent steps of two drafts each, at positions far apart; the verdict and the drafts [n, 2]."""
    asked = settings_of(params(seed=seed, **changes))
    sampling = many(asked, count)
    kinds = torch.full((count,), PROBABILISTIC)
    lengths = 10 * torch.arange(count)
    filters = sampling.filters(0)
    drawing = DraftSampling(kinds, sampling.seeds, sampling.temperature, filters, keeps=True)
    logits = draft.expand(count, K, V)
    drafts = draw_rows(logits, drawing, lengths, None)
    q = distributions(logits, drawing, None, V)
    requests = torch.arange(count).repeat_interleave(K + 1)
    positions = (lengths[:, None] + 1 + torch.arange(K + 1)).flatten()
    rows = LogitRows(requests, (K + 1) * torch.arange(count + 1), positions, drafts, torch.full((count,), K))
    target = torch.stack([LOGITS, NEXT, LOGITS]).repeat(count, 1)
    sampling = Sampling(**{n: getattr(sampling, n) for n in Sampling.__slots__} | {'draft_sampling': kinds})
    return verify(target, rows, sampling, STAGES, None, q), drafts


@pytest.mark.parametrize('name', DRAFTS)
def test_the_law_of_every_token(name: str) -> None:
    verdict, drafts = rounds(DRAFTS[name])
    first, following = LAW, NEXT.softmax(-1)
    assert chi_square_p(verdict.tokens[:, 0], first) > 1e-3
    for token in range(V):  # whatever came first, accepted or not, the second token follows its own law
        accepted = (verdict.counts > 1) & (verdict.tokens[:, 0] == token)
        if accepted.sum() > 1000:
            assert chi_square_p(verdict.tokens[accepted, 1], following) > 1e-3
    both = verdict.counts == 3
    if both.sum() > 1000:
        assert chi_square_p(verdict.tokens[both, 2], LAW) > 1e-3
    accepted = verdict.counts > 1
    assert torch.equal(verdict.tokens[accepted, 0], drafts[accepted, 0])
    q = DRAFTS[name].softmax(-1)
    rate = float(torch.minimum(q, LAW).sum())
    assert abs(float(accepted.float().mean()) - rate) < 5e-3


def test_drafts_follow_q() -> None:
    _, drafts = rounds(DRAFTS['random'])
    q = DRAFTS['random'].softmax(-1)
    assert chi_square_p(drafts[:, 0], q) > 1e-3
    assert chi_square_p(drafts[:, 0] * V + drafts[:, 1], torch.outer(q, q).flatten()) > 1e-3


@pytest.mark.parametrize('name', DRAFTS)
def test_a_bias_of_two_percent_is_found(name: str) -> None:
    """One draft in fifty accepted whatever its chance: as if the test were skipped now and then."""
    verdict, drafts = rounds(DRAFTS[name])
    tokens = verdict.tokens[:, 0].clone()
    tokens[::50] = drafts[::50, 0]
    biased = name != 'the target itself'  # there a draft is as good as a pick
    assert (chi_square_p(tokens, LAW) < 1e-3) == biased


@pytest.mark.parametrize('filters', [{'top_k': 3}, {'top_p': 0.6}, {'temperature': 0.5, 'min_p': 0.3}])
def test_filters_act_on_both_sides(filters: dict[str, float]) -> None:
    verdict, _ = rounds(DRAFTS['random'], **filters)
    heat = filters.get('temperature', 1.0)
    scaled = (LOGITS / heat).softmax(-1)
    ranked = scaled.sort(descending=True)
    kept = torch.zeros(V, dtype=torch.bool)
    number = {'top_k': 3, 'top_p': 3}.get(next(iter(filters)), int((scaled >= 0.3 * scaled.max()).sum()))
    kept[ranked.indices[:number]] = True
    assert chi_square_p(verdict.tokens[:, 0], torch.where(kept, scaled, 0)) > 1e-3


def test_a_redrawn_position_gets_fresh_noise() -> None:
    """The same position behind another anchor: drafts are independent, picks are the same."""
    asked = many(settings_of(params(seed=5)), 4000)
    kinds = torch.full((4000,), PROBABILISTIC)
    drawing = DraftSampling(kinds, asked.seeds, asked.temperature, None, keeps=False)
    lengths = 10 * torch.arange(4000)
    near = draw_rows(DRAFTS['flat'].expand(4000, 2, V), drawing, lengths, None)
    far = draw_rows(DRAFTS['flat'].expand(4000, 2, V), drawing, lengths + 1, None)
    pairs = near[:, 1] * V + far[:, 0]  # both at position length + 2
    assert chi_square_p(pairs, torch.ones(V * V)) > 1e-3
    coupled = DraftSampling(torch.ones_like(kinds), asked.seeds, asked.temperature, None, keeps=False)
    near = draw_rows(DRAFTS['flat'].expand(4000, 2, V), coupled, lengths, None)
    far = draw_rows(DRAFTS['flat'].expand(4000, 2, V), coupled, lengths + 1, None)
    assert torch.equal(near[:, 1], far[:, 0])
