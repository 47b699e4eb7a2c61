"""The bundled heads against the reference: context from taps in any portions, rejected rows and reused slots."""

import pytest
import torch
from torch import Tensor

from specdec.layers.cache_specs import CacheRoom
from specdec.models.deepseek_v4.draft import BundledDspark
from tests.helpers import deepseek_v4 as v4
from tests.models.deepseek_v4.conftest import Case

LENGTHS = (3, v4.WINDOW, v4.WINDOW + 1, 150)


@pytest.fixture(scope='module')
def draft(case: Case) -> BundledDspark:
    return v4.load_draft(case.folder, v4.load_target(case.folder))


class Context:
    """Rings of two requests, slots 1 and 2, filled with NaN where nothing was absorbed."""

    def __init__(self, draft: BundledDspark) -> None:
        self.draft, self.slots = draft, torch.tensor([1, 2])
        self.rings = draft.cache_spec().allocate(CacheRoom(1, 128, 3), torch.device('cpu'))
        for ring in self.rings.windows:
            ring.rows.fill_(float('nan'))

    @torch.inference_mode()
    def absorb(self, taps: list[Tensor], starts: list[int]) -> None:
        counts = torch.tensor([len(rows) for rows in taps])
        positions = torch.cat([torch.arange(start, start + len(rows)) for start, rows in zip(starts, taps)])
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self.draft.absorb(torch.cat(taps), positions, offsets, self.slots, self.rings)

    @torch.inference_mode()
    def propose(self, anchors: Tensor, lengths: list[int], k: int = v4.BLOCK) -> tuple[Tensor, Tensor | None]:
        hidden = self.draft.block(anchors, torch.tensor(lengths), self.slots, self.rings)[:, :k]
        tokens, previous = self.draft.chain(self.draft.logits(hidden), hidden, anchors)
        return tokens, self.draft.acceptance(hidden, previous)


def check(case: Case, context: Context, lengths: list[int]) -> None:
    anchors = torch.stack([case.ids[r, n] for r, n in enumerate(lengths)])
    tokens, sure = context.propose(anchors, lengths)
    assert sure is not None
    for r, n in enumerate(lengths):
        with torch.no_grad():
            wanted, _, confidence = case.heads.propose(case.model, case.taps[r : r + 1, :n], anchors[r : r + 1])
        assert torch.equal(tokens[r], wanted[0])
        torch.testing.assert_close(sure[r], confidence[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize('length', LENGTHS)
def test_whole_context(case: Case, draft: BundledDspark, length: int):
    context, lengths = Context(draft), [length, length + 7]
    context.absorb([case.taps[r, :n] for r, n in enumerate(lengths)], [0, 0])
    check(case, context, lengths)


def test_context_in_steps_with_rejected_rows(case: Case, draft: BundledDspark):
    generator = torch.Generator().manual_seed(6)
    context, lengths = Context(draft), [9, 40]
    context.absorb([case.taps[r, :n] for r, n in enumerate(lengths)], [0, 0])
    for _ in range(25):
        parts = []
        rights = torch.randint(1, 7, (2,), generator=generator).tolist()
        for r, (start, right) in enumerate(zip(lengths, rights)):
            rows = case.taps[r, start : start + 6].clone()
            rows[right:] = 3 * torch.randn(rows[right:].shape, generator=generator)
            parts.append(rows)
        context.absorb(parts, lengths)
        lengths = [n + right for n, right in zip(lengths, rights)]
        check(case, context, lengths)


def test_fewer_drafts_are_the_first_of_the_block(case: Case, draft: BundledDspark):
    context = Context(draft)
    context.absorb([case.taps[r, :30] for r in range(2)], [0, 0])
    everything, sure = context.propose(case.ids[:, 30], [30, 30])
    for k in range(1, v4.BLOCK):
        tokens, part = context.propose(case.ids[:, 30], [30, 30], k)
        assert sure is not None
        assert part is not None
        assert torch.equal(tokens, everything[:, :k])
        torch.testing.assert_close(part, sure[:, :k])


def test_the_window_is_as_wide_as_it_should_be(case: Case, draft: BundledDspark):
    """W positions of context, anchored at the block's start: the oldest counts, what lies before does not."""

    def sureness(changed: int | None) -> Tensor:
        context, taps = Context(draft), case.taps[:, :50].clone()
        if changed is not None:
            taps[:, changed] += 1
        context.absorb(list(taps), [0, 0])
        found = context.propose(case.ids[:, 50], [50, 50])[1]
        assert found is not None
        return found

    assert torch.equal(sureness(50 - v4.WINDOW - 1), sureness(None))
    assert not torch.equal(sureness(50 - v4.WINDOW), sureness(None))


def test_a_checkpoint_without_confidence_head(case: Case, tmp_path):
    tensors = v4.target_tensors(case.model) | v4.draft_tensors(case.heads)
    del tensors[f'mtp.{v4.STAGES - 1}.confidence_head.proj.weight']
    folder = v4.write(tmp_path / 'unsure', v4.bundled_config(), tensors)
    context = Context(v4.load_draft(folder, v4.load_target(folder)))
    context.absorb([case.taps[r, :20] for r in range(2)], [0, 0])
    assert context.propose(case.ids[:, 20], [20, 20])[1] is None
