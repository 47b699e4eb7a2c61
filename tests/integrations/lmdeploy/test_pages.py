"""Where rows go: never beyond the pages that LMDeploy gave, never into somebody else's, graphs' padding included."""

from typing import Any

import pytest
import torch

from specdec.integrations.lmdeploy.draft_runner import DraftRunner, HostRows
from tests.helpers.engines import prompt_ids
from tests.integrations.lmdeploy.host import Host, ask
from tests.integrations.lmdeploy.test_greedy import mixed, same


@pytest.mark.parametrize('draft', ['dspark_vanilla', 'dflash_fill_in'])
def test_padded_decode_steps(host: Host, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of captured steps, replayed by running them again: texts and drafts as without."""
    batches: set[tuple[int, int]] = set()

    def capture(run: Any) -> Any:
        run()
        return run

    def decode(self: DraftRunner, rows: HostRows) -> torch.Tensor:
        batches.add((len(rows.anchors), min(size for size in self.graphs if size >= len(rows.anchors))))
        return original(self, rows)

    with host.serve('dense', draft) as served:
        same(served.run(mixed()), host.plain('dense', mixed()))
        eager = sorted(served.accepted)
    original = DraftRunner.decode
    monkeypatch.setattr(DraftRunner, 'make_capture', staticmethod(lambda: capture))
    monkeypatch.setattr(DraftRunner, 'wants_graphs', lambda _: True)
    monkeypatch.setattr(DraftRunner, 'decode', decode)
    with host.serve('dense', draft, eager_mode=False) as served:
        same(served.run(mixed()), host.plain('dense', mixed()))
        assert sorted(served.accepted) == eager
    assert (3, 4) in batches, 'a batch that was padded'


@pytest.mark.parametrize('tokens', [3, 4])
def test_pages_suffice_when_every_draft_is_right(host: Host, tokens: int) -> None:
    """The case in which LMDeploy's own DFlash reads behind its block table: step after step is fully accepted."""
    asks = [ask(prompt_ids(n, seed=17), max_new_tokens=40, ignore_eos=True) for n in range(1, 60, 3)]
    plain = host.plain('dense', asks)
    with host.serve('dense', 'dspark_vanilla', tokens) as served:
        text: list[int] = []
        draft = served.proposer.draft

        def perfect(inputs: Any, extra: Any, cache_engine: Any) -> torch.Tensor:
            drafts = draft(inputs, extra, cache_engine)
            lengths = inputs.history_lengths + inputs.seq_length
            if inputs.is_decoding:
                lengths = lengths - extra.num_rejected_tokens
            size, table = 16, inputs.block_offsets[0]
            pages = table[torch.arange(int(lengths[0])) // size]
            assert (pages > 0).all(), 'context of committed rows has pages'
            length = int(lengths[0]) + 1
            ahead = (text[length : length + tokens] + [0] * tokens)[:tokens]
            return torch.tensor([ahead], dtype=drafts.dtype)

        served.proposer.draft = perfect
        for asked, outcome in zip(asks, plain):
            text[:] = [*asked.prompt, *outcome.token_ids]
            served.accepted.clear()
            assert served.run([asked])[0].token_ids == outcome.token_ids
            assert served.accepted[:-1] == [tokens] * (len(served.accepted) - 1)
