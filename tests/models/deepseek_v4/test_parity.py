"""The target against transformers in fp32: logits and taps, whatever way the rows arrive."""

import pytest
import torch
from torch import Tensor

from specdec.models.deepseek_v4.target import DeepseekV4Target
from tests.helpers import deepseek_v4 as v4
from tests.models.deepseek_v4.conftest import LENGTH, Case


@pytest.fixture(scope='module')
def target(case: Case) -> DeepseekV4Target:
    return v4.load_target(case.folder)


def check(case: Case, request: int, start: int, result: tuple[Tensor, Tensor]) -> None:
    logits, taps = result
    wanted = case.logits[request, start : start + len(logits)]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(taps, case.taps[request, start : start + len(taps)], rtol=0, atol=1e-4)


def part(case: Case, request: int, start: int, count: int) -> tuple[int, int, Tensor]:
    return request, start, case.ids[request, start : start + count]


def draw(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def test_whole_prompts(case: Case, target: DeepseekV4Target):
    steps = v4.Steps(target, 5, requests=2, pages=3)
    for request, result in enumerate(steps(chunks=[part(case, r, 0, LENGTH) for r in range(2)])):
        check(case, request, 0, result)


@pytest.mark.parametrize('page_size', [128, 256])
def test_ragged_chunks(case: Case, target: DeepseekV4Target, page_size: int):
    """Chunks of any length, each request at its own pace, one of them in steps without the other."""
    generator = torch.Generator().manual_seed(page_size)
    steps, done = v4.Steps(target, 5, 2, 3, page_size), [0, 0]
    while min(done) < LENGTH:
        sizes = [min(draw(generator, 0, 37), LENGTH - n) for n in done]
        parts = [part(case, r, done[r], size) for r, size in enumerate(sizes) if size]
        if not parts:
            continue
        for (request, start, ids), result in zip(parts, steps(chunks=parts)):
            check(case, request, start, result)
            done[request] += len(ids)


def test_token_by_token(case: Case, target: DeepseekV4Target):
    steps = v4.Steps(target, 0, 2, 3)
    for t in range(LENGTH // 2):
        for request, result in enumerate(steps(decodes=[part(case, r, t, 1) for r in range(2)])):
            check(case, request, t, result)


@pytest.mark.parametrize(('num_drafts', 'prefill'), [(1, 126), (3, 5), (5, 126), (7, 90)])
def test_verify_steps_with_rejected_tails(case: Case, target: DeepseekV4Target, num_drafts: int, prefill: int):
    """Any number of the drafted rows is wrong; their traces in rings and pages must not be seen by anyone later."""
    generator = torch.Generator().manual_seed(100 * num_drafts + prefill)
    steps, lengths = v4.Steps(target, num_drafts, 2, 3), [prefill, prefill + 3]
    steps(chunks=[part(case, r, 0, n) for r, n in enumerate(lengths)])
    while max(lengths) + num_drafts + 1 <= LENGTH:
        parts, rights = [], []
        for request, start in enumerate(lengths):
            rows, right = draw(generator, 1, num_drafts + 1), draw(generator, 1, num_drafts + 1)
            ids = case.ids[request, start : start + rows].clone()
            ids[right:] = torch.randint(2, v4.VOCABULARY, ids[right:].shape, generator=generator)
            parts.append((request, start, ids))
            rights.append(min(right, rows))
        for (request, start, _), right, result in zip(parts, rights, steps(decodes=parts)):
            check(case, request, start, (result[0][:right], result[1][:right]))
            lengths[request] = start + right


@pytest.mark.slow
@pytest.mark.parametrize('num_drafts', [2, 5, 7])
@pytest.mark.parametrize('prefill', [*range(123, 135), *range(251, 263)])
def test_around_every_boundary(case: Case, target: DeepseekV4Target, num_drafts: int, prefill: int):
    """Prompts that end near a multiple of 4 and of 128, then 30 tokens with random tails, in random chunks before."""
    generator = torch.Generator().manual_seed(1000 * num_drafts + prefill)
    steps, length = v4.Steps(target, num_drafts, 1, 3), 0
    while length < prefill:
        size = min(draw(generator, 1, 140), prefill - length)
        steps(chunks=[part(case, 0, length, size)])
        length += size
    while length < prefill + 30:
        ids = case.ids[0, length : length + num_drafts + 1].clone()
        right = draw(generator, 1, num_drafts + 1)
        ids[right:] = torch.randint(2, v4.VOCABULARY, ids[right:].shape, generator=generator)
        ((logits, taps),) = steps(decodes=[(0, length, ids)])
        check(case, 0, length, (logits[:right], taps[:right]))
        length += right


def test_chunks_and_verify_steps_together(case: Case, target: DeepseekV4Target):
    """A prompt arrives in chunks while another request decodes with wrong drafts, padding rows behind both."""
    generator = torch.Generator().manual_seed(4)
    steps, decoding, prompt = v4.Steps(target, 5, 2, 3), 20, 0
    steps(chunks=[part(case, 1, 0, decoding)])
    while prompt < LENGTH:
        size = min(draw(generator, 1, 25), LENGTH - prompt)
        right = draw(generator, 1, 6)
        ids = case.ids[1, decoding : decoding + 6].clone()
        ids[right:] = torch.randint(2, v4.VOCABULARY, ids[right:].shape, generator=generator)
        first, second = steps([part(case, 0, prompt, size)], [(1, decoding, ids)], padding=draw(generator, 0, 4))
        check(case, 0, prompt, first)
        check(case, 1, decoding, (second[0][:right], second[1][:right]))
        prompt, decoding = prompt + size, decoding + right


def test_a_slot_serves_one_request_after_another(case: Case, target: DeepseekV4Target):
    """What the tenant before left in rings and pages is as good as nothing."""
    steps = v4.Steps(target, 2, 2, 3)
    steps(chunks=[part(case, 0, 0, LENGTH)])
    (result,) = steps(chunks=[(0, 0, case.ids[1, :140])])
    check(case, 1, 0, result)
    for t in range(140, 150):
        (result,) = steps(decodes=[(0, t, case.ids[1, t : t + 1])])
        check(case, 1, t, result)


def test_one_row_less_in_a_ring_is_noticed(case: Case, target: DeepseekV4Target):
    """The sizes are the smallest that hold: caches made for one draft fewer than are verified go wrong."""
    generator = torch.Generator().manual_seed(8)
    steps, length, worst = v4.Steps(target, 3, 1, 3), 20, 0.0
    steps.num_drafts = 5  # rings of W + 3, where read-first order needs W + 4
    steps(chunks=[part(case, 0, 0, length)])
    while length + 6 <= 120:
        ids = case.ids[0, length : length + 6].clone()
        right = draw(generator, 1, 2)
        ids[right:] = torch.randint(2, v4.VOCABULARY, ids[right:].shape, generator=generator)
        ((logits, _),) = steps(decodes=[(0, length, ids)])
        worst = max(worst, (logits[:right] - case.logits[0, length : length + right]).abs().max().item())
        length += right
    assert worst > 0.1


def test_every_mechanism_shows(case: Case, target: DeepseekV4Target):
    """Parity means something only if the parts that could be wrong change the logits."""

    def effect(*values: Tensor) -> float:
        saved = [value.clone() for value in values]
        for value in values:
            value.zero_()
        ((logits, _),) = v4.Steps(target, 0, 1, 3)(chunks=[part(case, 0, 0, LENGTH)])
        for value, before in zip(values, saved):
            value.copy_(before)
        return (logits - case.logits[0]).abs().max().item()

    attentions = [block.attention for block in target.blocks]
    compressors = [attention.compressor for attention in attentions if attention.compressor]
    indexers = [attention.indexer for attention in attentions if attention.indexer]
    assert effect(*(attention.latent.sinks for attention in attentions)) > 0.1
    assert effect(*(compressor.bias for compressor in compressors)) > 0.1
    assert effect(*(indexer.compressor.bias for indexer in indexers)) > 0.1
    assert effect(*(block.experts.bias for block in target.blocks if block.experts.bias is not None)) > 0.1
    assert effect(*(block.experts.table for block in target.blocks if block.experts.table is not None)) > 0.1
    assert effect(*(block.attention_mix.mix.base for block in target.blocks)) > 0.1


def test_bf16_agrees_in_most_places(case: Case):
    """Half precision flips a discrete choice here and there; it must not do more."""
    steps = v4.Steps(v4.load_target(case.folder, torch.bfloat16), 5, 2, 3)
    agreed = []
    for request, (logits, _) in enumerate(steps(chunks=[part(case, r, 0, LENGTH) for r in range(2)])):
        agreed.append((logits.argmax(-1) == case.logits[request].argmax(-1)).float().mean())
    assert min(agreed) > 0.8
