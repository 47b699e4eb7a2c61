"""Is this text the target's own? And where it is not: was it a tie that a last bit may decide?

The rule (DESIGN, "What keeps it honest"): two runs may differ only where the target's own top-2 margin, of log p
+ noise when sampling, is below 1e-5, or where a top-k, top-p, min-p or router cut was decided by less than 1e-6; and
that at most once in 10,000 tokens. Margins come from a plain forward over the whole text. Nothing here uses the engine.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import softplus

from specdec.kernels.compressor import Entries
from specdec.kernels.indexer import choose_entries
from specdec.kernels.indexer.ref import scores
from specdec.kernels.moe import route_sqrt_softplus, route_top_k
from specdec.kernels.noise import gumbel
from specdec.kernels.paged_attention import RowLayout
from specdec.layers import moe
from specdec.layers.cache_specs import CacheRoom
from specdec.messages import SamplingParams
from specdec.models.deepseek_v4 import compressor as deepseek_v4_compressor
from specdec.models.deepseek_v4 import moe as deepseek_v4_moe
from specdec.models.target import Rows, TargetOutput
from tests.helpers.engines import PAGE, Models, Outcome, Settings, generate, make_engine, request

TIE = 1e-5
CUT = 1e-6
TOKENS_PER_EXCUSE = 10_000
REFERENCE_PAGE = 16


# -------------------------------------------------------------------------------------------- a plain forward
@dataclass(frozen=True, slots=True)
class Reference:
    """Logits [T, V] of a text in one forward, and the closest choice of experts or of a layer's entries that each row
    and those before it met [T].
    """

    logits: Tensor
    router_margins: Tensor


def reference(models: Models, text: Sequence[int]) -> Reference:
    margins = torch.full((len(text),), float('inf'))

    def note(values: Tensor, k: int) -> None:
        if k < values.shape[1]:
            ranked = values.sort(-1, descending=True).values
            gaps = torch.where(ranked[:, k].isfinite(), ranked[:, k - 1] - ranked[:, k], float('inf'))
            torch.minimum(margins, gaps, out=margins)

    def watched(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        note(logits.softmax(-1), k)
        return route_top_k(logits, k, renormalise)

    def watched_v4(
        logits: Tensor, bias: Tensor | None, experts: Tensor | None, k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        if bias is not None:
            note(softplus(logits).sqrt() + bias, k)
        return route_sqrt_softplus(logits, bias, experts, k, scale)

    def watched_entries(queries: Tensor, weights: Tensor, pages: Tensor, entries: Entries, k: int) -> Entries:
        note(scores(queries, weights, pages, entries), k)
        return choose_entries(queries, weights, pages, entries, k)

    with (
        mock.patch.object(moe, 'route_top_k', watched),
        mock.patch.object(deepseek_v4_moe, 'route_sqrt_softplus', watched_v4),
        mock.patch.object(deepseek_v4_compressor, 'choose_entries', watched_entries),
        torch.inference_mode(),
    ):
        logits = models.target.head(forward(models, text).hidden)
    return Reference(logits, margins.cummin(0).values)


def taps_of(models: Models, text: Sequence[int]) -> Tensor:
    """What a draft reads of a text [T, m * Ht]."""
    taps = forward(models, text).taps
    assert taps is not None
    return taps


@torch.inference_mode()
def forward(models: Models, text: Sequence[int]) -> TargetOutput:
    """The whole text as one prompt chunk, in pages of its own."""
    count = len(text)
    size = max(REFERENCE_PAGE, models.sources.target.page_multiple)
    pages = -(-count // size)
    cache = models.target.cache_spec().allocate(CacheRoom(pages + 1, size, 2), torch.device('cpu'))
    layout = RowLayout(
        row_offsets=torch.tensor([0, count]),
        contexts=torch.tensor([0]),
        page_table=torch.arange(1, pages + 1)[None],
        chunk_rows=(count,),
        tile_rows=1,
        page_size=size,
    )
    positions = torch.arange(count)
    return models.target.forward(
        Rows(torch.tensor(text), positions, positions + size, torch.tensor([1]), layout), cache
    )


# -------------------------------------------------------------------------------------------- what a row picks
@dataclass(frozen=True, slots=True)
class Decision:
    """A row's pick; by how much it won; by how much the closest filter was decided."""

    pick: int
    margin: float
    cut: float


def survivors(logits: Tensor, params: SamplingParams) -> tuple[Tensor, float]:
    """Log-probabilities [V] over temperature and filters in float64, -inf where cut off, and the closest cut.

    Written from the rule, not from the engine: temperature, top-k, top-p, min-p, each on the renormalised survivors
    of the one before, values equal to the last kept one staying.
    """
    logp = (logits.double() / params.temperature).log_softmax(-1)
    closest = float('inf')

    def keep_from(threshold: float) -> None:
        nonlocal logp, closest
        kept = logp >= threshold
        out = logp[~kept & logp.isfinite()]
        if len(out):
            closest = min(closest, float(logp[kept].min() - out.max()))
        logp = logp.masked_fill(~kept, float('-inf')).log_softmax(-1)

    if 0 < params.top_k < len(logp):
        keep_from(float(logp.sort(descending=True).values[params.top_k - 1]))
    if params.top_p < 1:
        ranked = logp.sort(descending=True).values
        mass = ranked.exp().cumsum(0)
        before = mass - ranked.exp()
        closest = min(closest, float((mass - params.top_p).abs().min()))
        keep_from(float(ranked[before < params.top_p].min()))
    if params.min_p > 0:
        gap = logp.exp() - params.min_p * logp.exp().max()
        closest = min(closest, float(gap.abs().min()))
        keep_from(float(logp[gap >= 0].min()))
    return logp, closest


def ruled(logits: Tensor, text: Sequence[int], prompt_length: int, params: SamplingParams) -> Tensor:
    """One row's logits [V] with every rule but a grammar, token by token over the text in front of it."""
    scores, output = logits.clone(), list(text[prompt_length:])
    for token, value in params.logit_bias:
        scores[token] += value
    for token in set(text):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    banned = list(params.banned_ids)
    if len(output) < params.min_new_tokens:
        banned += params.stop_ids
    banned += [w[-1] for w in params.bad_words if len(output) >= len(w) - 1 and output[1 - len(w) :] == list(w[:-1])]
    if params.allowed_ids:
        banned += set(range(len(logits))) - set(params.allowed_ids)
    if params.thinking_budget is not None and _thought(text, prompt_length, params) >= params.thinking_budget:
        banned += set(range(len(logits))) - {params.think_ids[1]}
    scores[banned] = float('-inf')
    return scores


def _thought(text: Sequence[int], prompt_length: int, params: SamplingParams) -> int:
    """Emitted tokens of the reasoning section that is open; -1 if none is."""
    opening, closing = params.think_ids
    count = 0 if params.reasoning_open else -1
    for token in text[prompt_length:]:
        if token == opening:
            count = 0
        elif token == closing:
            count = -1
        elif count >= 0:
            count += 1
    return count


def decide(
    logits: Tensor, draw_position: int, prompt_length: int, params: SamplingParams, text: Sequence[int] | None = None
) -> Decision:
    """The pick of one row [V] that draws the token at `draw_position` behind `text` (default: one without rules)."""
    if text is None:
        text = [params.stop_ids[0] if params.stop_ids else 0] * draw_position
    scores, cut = ruled(logits, text, prompt_length, params), float('inf')
    if params.temperature > 0:
        logp, cut = survivors(scores, params)
        seed = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        noise = gumbel(torch.tensor([seed]), torch.tensor([draw_position]), len(logits))[0]
        scores = logp + noise
    best = scores.double().sort(descending=True)
    margin = float(best.values[0] - best.values[1])
    return Decision(int(best.indices[0]), margin if margin == margin else float('inf'), cut)


# ---------------------------------------------------------------------------------------------------- the judge
@dataclass(slots=True, repr=False)
class Ledger:
    """Counts compared tokens and excused differences over a whole session."""

    tokens: int = 0
    excuses: list[str] = field(default_factory=list)
    _plain: dict[Any, Outcome] = field(default_factory=dict)

    def plain(self, models: Models, prompt: Sequence[int], max_new_tokens: int, **params: Any) -> Outcome:
        """The target's text without drafts, alone, and checked row by row against one forward over all of it."""
        key = (models.sources.target_folder, tuple(prompt), max_new_tokens, tuple(sorted(params.items())))
        if key not in self._plain:
            size = max(PAGE, models.sources.target.page_multiple)
            enough = Settings(session_len=len(prompt) + max_new_tokens, max_batch_size=1, page_size=size)
            [outcome] = generate(make_engine(models.plain(), enough), [request(prompt, max_new_tokens, **params)])
            self.check_against_forward(models, outcome)
            self._plain[key] = outcome
        return self._plain[key]

    def check_against_forward(self, models: Models, outcome: Outcome) -> None:
        """Every token is the pick of its row when the text is run as one prompt."""
        text, start = outcome.text, len(outcome.request.prompt_ids)
        whole = reference(models, text[:-1])
        for position in range(start, len(text)):
            decision = decide(whole.logits[position - 1], position, start, outcome.request.params, text[:position])
            if decision.pick != text[position]:
                self._excuse(
                    whole, position, decision, 'one forward', 'plain decoding', (decision.pick, text[position])
                )
                break
            self.tokens += 1

    def same(self, models: Models, expected: Outcome, found: Outcome) -> bool:
        """Fail unless the tokens are equal, or first differ at a tie; whether they were equal.

        Where they are equal the reasons to finish must be, too.
        """
        mine, theirs = found.token_ids, expected.token_ids
        differing = [i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b]
        if not differing:
            assert (len(mine), found.finish) == (len(theirs), expected.finish), (found, expected)
            self.tokens += len(mine)
            return True
        first = differing[0]
        self.tokens += first
        start = len(expected.request.prompt_ids)
        whole = reference(models, expected.text[: start + first])
        decision = decide(
            whole.logits[-1], start + first, start, expected.request.params, expected.text[: start + first]
        )
        self._excuse(whole, start + first, decision, 'plain', 'this run', (theirs[first], mine[first]))
        return False

    def _excuse(
        self, whole: Reference, position: int, decision: Decision, left: str, right: str, tokens: tuple[int, int]
    ) -> None:
        router = float(whole.router_margins[position - 1])
        message = (
            f'at position {position} {left} has {tokens[0]}, {right} {tokens[1]}; the target picks {decision.pick}'
            f' by {decision.margin:.2e}, closest cut {decision.cut:.2e}, closest router choice {router:.2e}'
        )
        assert decision.margin < TIE or decision.cut < CUT or router < CUT, message
        warnings.warn(f'excused: {message}', stacklevel=3)
        self.excuses.append(message)

    def close(self) -> None:
        allowed = max(1, self.tokens // TOKENS_PER_EXCUSE)
        assert len(self.excuses) <= allowed, f'{len(self.excuses)} excuses in {self.tokens} tokens'
