"""Drafts against the numbers of the reference packages: every case folder found in $SPECDEC_GOLDEN, both cycles.

A folder is as a user would have it on disk; make_golden.py can write other sets. fp32, 2e-4 absolute, tokens exactly.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.engine.build import build_engine
from specdec.errors import CheckpointError
from specdec.layers.cache_specs import PagedCache
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams, SpeculativeConfig
from specdec.models.checkpoint import read_draft, read_target
from specdec.models.configs import DraftConfig
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.target import TargetModel
from specdec.spec_decode.proposers import PROPOSERS
from specdec.spec_decode.proposers.base import DraftStep
from tests.helpers.models import PagedRequests, Piece, load_draft, load_target

TOLERANCE = 2e-4
ROOT = Path(os.environ['SPECDEC_GOLDEN']) if os.environ.get('SPECDEC_GOLDEN') else None
CASES = [] if ROOT is None else sorted(path.parent for path in ROOT.glob('*/expected.safetensors'))
REFUSED = [] if ROOT is None else sorted(path.parent for path in ROOT.glob('refused/*/config.json'))
REASONS = {
    'dflash2': 'DFlash 2',
    'domino': 'domino',
    'moe_draft': 'num_experts',
    'architectures_null': 'architectures',
    'conflicting_block_size': 'block_size',
}
NOTHING = [pytest.param(None, marks=pytest.mark.skip(reason='SPECDEC_GOLDEN names no folder with cases'))]

pytestmark = pytest.mark.golden


def name(folder: Path | None) -> str:
    return 'none' if folder is None else folder.name


def read_or_skip(folder: Path) -> DraftConfig:
    try:
        return read_draft(folder, read_target(folder.parent / 'target'))
    except CheckpointError as error:
        if 'DFlash 2' in str(error):
            pytest.skip(str(error))
        raise


@dataclass(slots=True)
class Session:
    """One request whose target and draft keep their caches in the same pages, as in the engine."""

    target: TargetModel
    draft: BlockDraft
    requests: PagedRequests
    target_cache: PagedCache
    draft_cache: PagedCache

    @classmethod
    def start(cls, folder: Path, page_size: int) -> 'Session':
        taps = read_or_skip(folder).taps
        target = load_target(folder.parent / 'target', taps)
        draft = load_draft(folder, folder.parent / 'target', target)
        requests = PagedRequests(page_size, (80,))
        return cls(target, draft, requests, requests.cache(target), requests.cache(draft))

    def feed(self, ids: Tensor, rejected: Tensor, chunk: bool) -> Tensor:
        """Run ids and, behind them, rejected rows; absorb all, commit ids -> the committed rows' taps."""
        rows = self.requests.rows([Piece(0, tuple(torch.cat([ids, rejected]).tolist()), chunk)])
        output = self.target.forward(rows, self.target_cache)
        assert output.taps is not None
        self.draft.absorb(output.taps, rows.positions, rows.slots, self.draft_cache)
        self.requests.commit(0, len(ids))
        return output.taps[: len(ids)]

    def step(self, anchor: Tensor) -> DraftStep:
        """The proposer's input once everything up to the anchor is absorbed."""
        none = torch.empty(0, dtype=torch.int64)
        return DraftStep(
            taps=torch.empty(0),
            positions=none,
            entries=none,
            row_offsets=torch.tensor([0, 0]),
            committed=torch.tensor([0]),
            slots=torch.tensor([1]),
            anchors=anchor,
            lengths=torch.tensor(self.requests.lengths),
            page_table=self.requests.table,
            page_size=self.requests.page_size,
            cache=self.draft_cache,
        )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def check_cycle(session: Session, expected: dict[str, Tensor], prefix: str) -> None:
    config, draft = session.draft.config, session.draft
    anchor = expected[f'{prefix}anchor']
    step = session.step(anchor)
    proposer = PROPOSERS[config.kind](draft, config.num_proposals)
    hidden = proposer.block(step)
    assert step.lengths.tolist() == expected[f'{prefix}positions'][:1].tolist()
    assert expected[f'{prefix}block_ids'].tolist() == [int(anchor)] + [config.mask_id] * (config.block_rows - 1)
    assert_close(hidden[0], expected[f'{prefix}hidden'])
    assert_close(draft.logits(hidden)[0], expected[f'{prefix}logits'])
    proposal = proposer.propose(step)
    assert torch.equal(proposal.tokens[0], expected[f'{prefix}proposal'])
    if f'{prefix}chain_tokens' in expected:
        check_heads(session, expected, prefix, hidden, proposer.proposal_rows(hidden), proposer.first_row)
    if f'{prefix}confidence_logits' in expected:
        assert proposal.survival is not None
        assert_close(proposal.survival[0], expected[f'{prefix}confidence_logits'].sigmoid().cumprod(0))


def check_heads(
    session: Session, expected: dict[str, Tensor], prefix: str, hidden: Tensor, rows: Tensor, first_row: int
) -> None:
    draft, corrected = session.draft, []

    def keep(_k: int, logits: Tensor) -> Tensor:
        corrected.append(logits[0])
        return logits.argmax(-1)

    assert draft.markov is not None
    lead = hidden[:, 0] if first_row else None
    tokens, previous = draft.markov.chain(draft.logits(rows), rows, lead, expected[f'{prefix}anchor'], keep)
    assert torch.equal(tokens[0], expected[f'{prefix}chain_tokens'])
    assert_close(torch.stack(corrected), expected[f'{prefix}chain_logits'])
    if f'{prefix}confidence_logits' in expected:
        assert draft.confidence is not None
        found = draft.confidence.logits(rows, draft.markov.embed(previous))
        assert_close(found[0], expected[f'{prefix}confidence_logits'])


@pytest.mark.parametrize('page_size', [4, 64])
@pytest.mark.parametrize('folder', CASES or NOTHING, ids=name)
@torch.inference_mode()
def test_both_cycles(folder: Path, page_size: int) -> None:
    session = Session.start(folder, page_size)
    expected = load_file(folder / 'expected.safetensors')
    prompt, accepted = expected['prompt'], int(expected['accepted'])
    assert_close(session.feed(prompt, prompt[:0], chunk=True), expected['taps'])
    check_cycle(session, expected, '')

    proposal, committed = expected['proposal'], expected['committed'][len(prompt) :]
    rejected = proposal[accepted:] if accepted == int(expected['natural_accepted']) else proposal
    assert_close(session.feed(committed, rejected, chunk=False), expected['cycle2_taps'])
    check_cycle(session, expected, 'cycle2_')


@pytest.mark.parametrize('chunk', [1, 5])
@pytest.mark.parametrize('folder', CASES or NOTHING, ids=name)
@torch.inference_mode()
def test_chunked_prompt_drafts_as_a_whole_one(folder: Path, chunk: int) -> None:
    session = Session.start(folder, 4)
    expected = load_file(folder / 'expected.safetensors')
    for part in expected['prompt'].split(chunk):
        session.feed(part, part[:0], chunk=True)
    check_cycle(session, expected, '')


@pytest.mark.parametrize('prefill', [7, 512])
@pytest.mark.parametrize('folder', CASES or NOTHING, ids=name)
def test_engine(folder: Path, prefill: int) -> None:
    """The greedy continuation, and the acceptance of the first block, through the engine."""
    kind = read_or_skip(folder).kind
    expected = load_file(folder / 'expected.safetensors')
    config = PytorchEngineConfig(
        block_size=4, device_type='cpu', session_len=96, max_batch_size=2, max_prefill_token_num=prefill
    )
    engine = build_engine(str(folder.parent / 'target'), config, SpeculativeConfig(kind, str(folder)))
    count = len(expected['generate_greedy'])
    engine.add(EngineRequest(1, tuple(expected['prompt'].tolist()), SamplingParams(max_new_tokens=count)))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == expected['generate_greedy'].tolist()
    first = next(output for output in outputs if output.decode)
    assert first.drafted == len(expected['proposal']) or engine.info.num_drafts < len(expected['proposal'])
    assert len(first.token_ids) - 1 == min(int(expected['natural_accepted']), first.drafted)


@pytest.mark.parametrize('folder', REFUSED or NOTHING, ids=name)
def test_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_draft(folder)
    assert '\n' not in str(error.value)
    assert REASONS.get(folder.name, '') in str(error.value)
