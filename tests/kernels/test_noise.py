"""The counter-based generator against Random123's published vectors, and the Gumbel values made of it."""

import math

import pytest
import torch
from scipy import stats

from specdec.kernels.noise import ACCEPT, DRAFT, PICK, RESIDUAL, gumbel, gumbel_at, ref
from specdec.kernels.noise.ref import philox

# https://github.com/DEShawResearch/random123, tests/kat_vectors, philox 4x32 10 rounds
KNOWN_ANSWERS = [
    ('00000000 00000000 00000000 00000000', '00000000 00000000', '6627e8d5 e169c58d bc57ac4c 9b00dbd8'),
    ('ffffffff ffffffff ffffffff ffffffff', 'ffffffff ffffffff', '408f276d 41c83b0e a20bc7c6 6d5451fd'),
    ('243f6a88 85a308d3 13198a2e 03707344', 'a4093822 299f31d0', 'd16cfe09 94fdcceb 5001e420 24126ea1'),
]
SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def python_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The algorithm in Python integers, which cannot wrap."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def python_gumbel(seed: int, position: int, token: int, stream: int) -> float:
    counter = (token // 4, position, stream, 0)
    word = python_philox(counter, (seed % 2**32, (seed >> 32) % 2**32))[token % 4]
    uniform = min((word + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


@pytest.mark.parametrize(('counter', 'key', 'expected'), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert python_philox(words(counter), words(key)) == words(expected)
    found = philox(tuple(torch.tensor([w]) for w in words(counter)), tuple(torch.tensor([w]) for w in words(key)))
    assert tuple(w.item() for w in found) == words(expected)


@pytest.mark.parametrize('stream', [PICK, ACCEPT, RESIDUAL, DRAFT])
def test_values_follow_the_documented_layout(stream: int) -> None:
    """Key: the seed's low and high words. Counter: (id // 4, position, stream, 0); output id % 4."""
    positions = torch.tensor([0, 1, 2, 77, 2**31, 131071])
    found = gumbel(SEEDS, positions, 11, stream)
    assert found.dtype == torch.float32
    assert found.shape == (6, 11)
    for r, (seed, position) in enumerate(zip(SEEDS.tolist(), positions.tolist())):
        for token in range(11):
            expected = python_gumbel(seed % 2**64, position, token, stream)
            # the smallest values come from u near 1, where fp32 keeps few digits of the distance to 1
            assert found[r, token].item() == pytest.approx(expected, rel=1e-5, abs=2e-5 if expected > -1.5 else 1e-2)


@pytest.mark.parametrize('vocabulary', [1, 3, 4, 5, 130])
def test_gumbel_at_is_gumbel_gathered(vocabulary: int) -> None:
    positions = torch.arange(6) * 1000
    whole = gumbel(SEEDS, positions, vocabulary)
    ids = torch.randint(vocabulary, (6, 9))
    assert torch.equal(gumbel_at(SEEDS, positions, ids), whole.gather(1, ids))
    assert whole.shape == (6, vocabulary)


def test_a_larger_vocabulary_changes_no_value() -> None:
    positions = torch.arange(6)
    assert torch.equal(gumbel(SEEDS, positions, 50)[:, :7], gumbel(SEEDS, positions, 7))


def test_rows_are_independent_of_the_batch() -> None:
    positions = torch.arange(6)
    whole = gumbel(SEEDS, positions, 40)
    for r in range(6):
        assert torch.equal(gumbel(SEEDS[r : r + 1], positions[r : r + 1], 40)[0], whole[r])


def test_seed_position_id_and_stream_all_matter() -> None:
    position, seed = torch.tensor([5]), torch.tensor([9])
    base = gumbel(seed, position, 200)
    others = [gumbel(seed + 1, position, 200), gumbel(seed, position + 1, 200), gumbel(seed + 2**32, position, 200)]
    others += [gumbel(seed, position, 200, stream) for stream in (ACCEPT, RESIDUAL, DRAFT)]
    for other in others:
        assert (base == other).float().mean() < 0.05


def test_distribution() -> None:
    values = gumbel(torch.arange(64) * 7919, torch.arange(64), 4096).flatten().double()
    assert values.isfinite().all()
    assert abs(values.mean().item() - 0.5772156649) < 0.01
    assert abs(values.var().item() - math.pi**2 / 6) < 0.02
    uniform = (-(-values).exp()).exp()
    assert stats.kstest(uniform[::8].numpy(), 'uniform').pvalue > 1e-3


def test_argmax_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    picks = (logits + gumbel(torch.zeros(20000, dtype=torch.int64), torch.arange(20000), 5)).argmax(-1)
    expected = logits.double().softmax(0) * 20000
    assert stats.chisquare(torch.bincount(picks, minlength=5).numpy(), expected.numpy()).pvalue > 1e-3


def test_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    monkeypatch.setattr(ref, 'philox', lambda _counter, _key: (extremes[:, None],) * 4)
    values = gumbel(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), 4)[:, 0]
    assert values.isfinite().all()
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    assert values[0].item() == pytest.approx(33 * math.log(2), rel=1e-6), 'small u, the large values, keep 32 bits'
    assert values[-1].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
