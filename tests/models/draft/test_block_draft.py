"""The block draft as a function of its context: nothing else may move it. Numbers: tests/models/test_golden.py."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.cache_specs import PagedCache
from specdec.models.draft.block_draft import BlockDraft
from specdec.spec_decode.proposers.base import DraftStep
from tests.helpers.engines import DRAFTS, World
from tests.helpers.models import PagedRequests, Piece

LENGTHS = (9, 1, 14, 4)
ANCHORS = torch.tensor([3, 49, 17, 3])  # 49 is the mask id itself


@pytest.fixture(scope='module')
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp('drafts'))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Requests of LENGTHS committed tokens with random taps, absorbed."""

    draft: BlockDraft
    proposer: Any
    requests: PagedRequests
    cache: PagedCache

    def step(self, members: list[int], width: int | None = None) -> DraftStep:
        none = torch.empty(0, dtype=torch.int64)
        return DraftStep(
            taps=torch.empty(0),
            positions=none,
            entries=none,
            row_offsets=none,
            committed=none,
            slots=none,
            anchors=ANCHORS[members],
            lengths=torch.tensor([LENGTHS[r] for r in members]),
            page_table=self.requests.table[members, :width],
            page_size=self.requests.page_size,
            cache=self.cache,
        )


def make_taps(draft: BlockDraft, request: int) -> Tensor:
    generator = torch.Generator().manual_seed(request)
    return torch.randn(LENGTHS[request] + 3, draft.fusion.shape[1], generator=generator)


def make_setting(world: World, name: str, chunk: int = 99, page_size: int = 4, behind: int = 0) -> Setting:
    """`chunk`: rows absorbed at once; `behind`: rejected rows absorbed behind each chunk."""
    models = world.models(name)
    proposer: Any = models.proposer
    draft = proposer.draft
    requests = PagedRequests(page_size, tuple(length + 8 for length in LENGTHS))
    cache = requests.cache(draft)
    for request, length in enumerate(LENGTHS):
        taps = make_taps(draft, request)
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            rows = requests.rows([Piece(request, (0,) * (count + behind), chunk=True)])
            rejected = torch.full((behind, taps.shape[1]), 3.0)
            draft.absorb(torch.cat([taps[start : start + count], rejected]), rows.positions, rows.slots, cache)
            requests.commit(request, count)
    return Setting(draft, proposer, requests, cache)


def block(setting: Setting, members: list[int], width: int | None = None) -> Tensor:
    return setting.proposer.block(setting.step(members, width))


@pytest.mark.parametrize('name', DRAFTS)
@torch.inference_mode()
def test_a_batch_is_its_members(world: World, name: str) -> None:
    setting = make_setting(world, name)
    together, proposal = block(setting, [0, 1, 2, 3]), setting.proposer.propose(setting.step([0, 1, 2, 3]))
    for r in range(4):
        torch.testing.assert_close(together[r : r + 1], block(setting, [r]), atol=1e-5, rtol=1e-5)
        assert torch.equal(proposal.tokens[r : r + 1], setting.proposer.propose(setting.step([r])).tokens)


@pytest.mark.parametrize('name', DRAFTS)
@torch.inference_mode()
def test_how_context_arrived_does_not_matter(world: World, name: str) -> None:
    """One by one, in chunks, with rejected rows behind each chunk, in small pages or one large one."""
    whole = block(make_setting(world, name), [0, 1, 2, 3])
    for changes in ({'chunk': 1}, {'chunk': 3, 'behind': 4}, {'page_size': 1}, {'page_size': 64}):
        other = block(make_setting(world, name, **changes), [0, 1, 2, 3])
        torch.testing.assert_close(other, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('name', DRAFTS)
@torch.inference_mode()
def test_every_context_row_in_reach_matters_and_no_other(world: World, name: str) -> None:
    setting = make_setting(world, name)
    base = block(setting, [0])
    windows = [window for _, window, _ in setting.draft.rules]
    reach = LENGTHS[0] if None in windows else max(w for w in windows if w) - 1
    entries = setting.requests.page_size * setting.requests.table[0].repeat_interleave(4) + torch.arange(4).repeat(
        setting.requests.table.shape[1]
    )
    for position in range(LENGTHS[0] + 3):
        saved = [pages.clone() for pages in (*setting.cache.k, *setting.cache.v)]
        for pages in setting.cache.v:
            pages.flatten(0, 1)[entries[position]] += 5.0
        moved = not torch.equal(block(setting, [0]), base)
        for pages, before in zip((*setting.cache.k, *setting.cache.v), saved):
            pages.copy_(before)
        assert moved == (LENGTHS[0] - reach <= position < LENGTHS[0]), position


@pytest.mark.parametrize('name', DRAFTS)
@torch.inference_mode()
def test_the_block_leaves_no_trace(world: World, name: str) -> None:
    setting = make_setting(world, name)
    before = [pages.clone() for pages in (*setting.cache.k, *setting.cache.v)]
    setting.proposer.propose(setting.step([0, 1, 2, 3]))
    assert all(torch.equal(a, b) for a, b in zip(before, (*setting.cache.k, *setting.cache.v)))


@pytest.mark.parametrize('name', DRAFTS)
@torch.inference_mode()
def test_fewer_proposals_are_the_first_of_all(world: World, name: str) -> None:
    """The block runs as trained whatever K is: K only limits what is used of it."""
    setting = make_setting(world, name)
    most = setting.draft.config.num_proposals
    whole = type(setting.proposer)(setting.draft, most).propose(setting.step([0, 1, 2]))
    assert whole.tokens.shape == (3, most)
    for count in range(1, most):
        part = type(setting.proposer)(setting.draft, count).propose(setting.step([0, 1, 2]))
        assert torch.equal(part.tokens, whole.tokens[:, :count])
        assert (part.survival is None) == (whole.survival is None)
        if part.survival is not None and whole.survival is not None:
            torch.testing.assert_close(part.survival, whole.survival[:, :count])


@pytest.mark.parametrize('name', [n for n in DRAFTS if n.startswith('dspark')])
@torch.inference_mode()
def test_survivals_fall_and_are_probabilities(world: World, name: str) -> None:
    setting = make_setting(world, name)
    survival = setting.proposer.propose(setting.step([0, 1, 2, 3])).survival
    assert survival is not None
    assert survival.dtype == torch.float32
    assert ((survival > 0) & (survival < 1)).all()
    assert (survival.diff(dim=1) <= 0).all()


@torch.inference_mode()
def test_a_narrow_page_table_is_enough(world: World) -> None:
    """Columns behind the context are not read."""
    setting = make_setting(world, 'dflash_fill_in')
    assert torch.equal(block(setting, [1, 3], width=1), block(setting, [1, 3]))


@torch.inference_mode()
def test_mask_embedding_replaces_slots_not_ids(world: World) -> None:
    """An anchor that happens to be the mask id keeps its own embedding; every later row takes the override."""
    draft: Any = world.models('dflash_fill_in').proposer
    changed = copy_of(draft.draft, input_scale=1.0)
    changed.mask_embedding = torch.full((changed.config.decoder.hidden_size,), 0.5)
    rows = changed._inputs(torch.tensor([changed.config.mask_id, 3]))
    table = changed.embedding(torch.tensor([changed.config.mask_id, 3]))
    assert torch.equal(rows[:, 0], table)
    assert rows[:, 1:].eq(0.5).all()
    changed.mask_embedding = None
    rows = changed._inputs(torch.tensor([3]))
    assert torch.equal(rows[0, 1:], table[:1].expand(changed.config.block_rows - 1, -1))


def copy_of(draft: BlockDraft, **changes: Any) -> BlockDraft:
    changed = copy.copy(draft)
    changed.config = dataclasses.replace(draft.config, **changes)
    return changed


@torch.inference_mode()
def test_scales_and_softcap(world: World) -> None:
    proposer: Any = world.models('dflash_fill_in').proposer
    draft, hidden = proposer.draft, torch.randn(2, 3, proposer.draft.config.decoder.hidden_size)
    plain = draft.logits(hidden)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(copy_of(draft, output_multiplier=0.5).logits(hidden), plain * 0.5)
    capped = copy_of(draft, output_multiplier=0.5, softcap=2.0).logits(hidden)
    torch.testing.assert_close(capped, (plain * 0.5 / 2).tanh() * 2)
    assert capped.abs().max() <= 2
    anchors = torch.tensor([3, 5])
    scaled = copy_of(draft, input_scale=3.0)._inputs(anchors)
    torch.testing.assert_close(scaled, 3 * draft._inputs(anchors))


@torch.inference_mode()
def test_reduced_ids_are_offsets(world: World) -> None:
    proposer: Any = world.models('dspark_fill_in_d2t').proposer
    draft = proposer.draft
    assert draft.target_ids(torch.tensor([0, 1, 19])).tolist() == [0, 2, 38]
    setting = make_setting(world, 'dspark_fill_in_d2t')
    assert setting.proposer.propose(setting.step([0, 1, 2, 3])).tokens.remainder(2).eq(0).all()


def test_draft_pages_are_the_draft_layers(world: World) -> None:
    draft = make_setting(world, 'dflash_fill_in').draft
    spec = draft.cache_spec()
    decoder = draft.config.decoder
    assert (spec.name, spec.num_layers, spec.kv_heads, spec.head_dim) == (
        'draft',
        decoder.num_layers,
        decoder.num_kv_heads,
        decoder.head_dim,
    )
