import random

import pytest

from specdec.engine.stops import RepetitionStop, StopStrings, TextStream
from specdec.engine.tokenizer import ByteDetokenizer


def characters(token_id: int) -> bytes:
    """A tokenizer for these tests: an id is a byte."""
    return bytes((token_id,))


def stream(stops, include=False, min_tokens=0):
    return TextStream(ByteDetokenizer(characters), StopStrings(stops, include), min_tokens)


def reference(text: str, stops: list[str], include: bool, min_end: int = 0) -> tuple[str, int | None]:
    """By definition: (text, end of the stop string), trying every end in order and the longest stop string first."""
    for end in range(max(1, min_end), len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            start = end - max(map(len, hits))
            return (text[:end] if include else text[:start]), end
    return text, None


def run(text_stream, data: bytes, sizes):
    """(pieces of text, number of tokens, stopped)."""
    texts, num_tokens, start, turn = [], 0, 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        piece = text_stream.push(tuple(data[start : start + size]))
        texts.append(piece.text)
        num_tokens += piece.num_tokens
        if piece.stopped:
            return [*texts, text_stream.finish()], num_tokens, True
        start, turn = start + size, turn + 1
    return [*texts, text_stream.finish()], num_tokens, False


@pytest.mark.parametrize('include', [False, True])
def test_equals_the_definition_whatever_the_steps(include):
    rng = random.Random(0)
    for _ in range(3000):
        text = ''.join(rng.choice('abc') for _ in range(rng.randrange(1, 24)))
        stops = [''.join(rng.choice('abc') for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        min_tokens = rng.choice([0, 0, 1, 5, 12])
        expected, end = reference(text, stops, include, min_tokens)
        sizes = [rng.randrange(1, 8) for _ in range(4)]
        texts, num_tokens, stopped = run(stream(stops, include, min_tokens), text.encode(), sizes)
        assert (''.join(texts), stopped) == (expected, end is not None), (text, stops, sizes, min_tokens)
        assert num_tokens == (end or len(text))


@pytest.mark.parametrize('position', range(8))
def test_stop_string_at_every_position_of_a_step(position):
    text = 'x' * (8 + position) + 'STOP' + 'tail'
    texts, num_tokens, stopped = run(stream(['STOP']), text.encode(), (8,))
    assert (''.join(texts), num_tokens, stopped) == ('x' * (8 + position), 12 + position, True)


def test_no_piece_of_a_stop_string_leaks():
    text_stream = stream(['</answer>'])
    shown = [text_stream.push((byte,)).text for byte in b'yes</answ']
    assert shown == ['y', 'e', 's', '', '', '', '', '', '']
    assert text_stream.push(b' ').text == '</answ '
    assert text_stream.push(b'</ans').text == ''
    assert text_stream.finish() == '</ans'
    assert text_stream.finish() == ''


@pytest.mark.parametrize('length', [1, 5, 23, 24, 25])
def test_short_answers_are_given_out_whole(length):
    text = 'a' * length
    texts, num_tokens, stopped = run(stream(['a' * 26]), text.encode(), (4,))
    assert (''.join(texts), num_tokens, stopped) == (text, length, False)


def test_first_complete_stop_string_wins():
    assert run(stream(['abcd', 'bc']), b'xabcd', (5,)) == (['xa', ''], 4, True)
    assert run(stream(['bc', 'xabc']), b'yxabc', (1,))[1:] == (5, True)
    assert ''.join(run(stream(['bc', 'xabc']), b'yxabc', (1,))[0]) == 'y'


def test_characters_of_several_tokens():
    data = 'ab好。停止tail'.encode()
    for size in range(1, 8):
        texts, num_tokens, stopped = run(stream(['停止']), data, (size,))
        assert (''.join(texts), stopped) == ('ab好。', True)
        assert num_tokens == len('ab好。停止'.encode())


def test_minimum_number_of_tokens():
    texts, num_tokens, _ = run(stream(['b'], min_tokens=4), b'abababab', (3,))
    assert (''.join(texts), num_tokens) == ('aba', 4)
    texts, num_tokens, _ = run(stream(['ab'], min_tokens=4), b'aabab', (8,))
    assert (''.join(texts), num_tokens) == ('aab', 5)


def test_half_a_character_at_the_end_is_flushed():
    text_stream = stream(['stop'])
    assert text_stream.push('st好'.encode()[:-1]).text == ''
    assert text_stream.finish() == 'st\ufffd'


def test_without_stop_strings_everything_passes():
    assert run(stream([]), b'anything', (3,)) == (['any', 'thi', 'ng', ''], 8, False)


# ------------------------------------------------------------------------------------------------------ repetitions
def repeated(data: bytes, size: int, threshold: int, min_tokens: int = 0) -> int | None:
    """By definition: how many tokens there are when the last `size` have occurred `threshold` times."""
    for end in range(max(size, min_tokens), len(data) + 1):
        last = data[end - size : end]
        if sum(data[i : i + size] == last for i in range(end - size + 1)) >= threshold:
            return end
    return None


@pytest.mark.parametrize('sizes', [(1,), (3, 1, 5), (100,)])
@pytest.mark.parametrize('min_tokens', [0, 9])
def test_a_repetition_ends_the_text_at_its_last_token(sizes, min_tokens):
    dice = random.Random(1)
    for _ in range(200):
        data = bytes(dice.choice(b'ab') for _ in range(dice.randint(0, 24)))
        size, threshold = dice.randint(1, 3), dice.randint(2, 4)
        found = TextStream(ByteDetokenizer(characters), StopStrings(()), min_tokens, RepetitionStop(size, threshold))
        texts, num_tokens, stopped = run(found, data, sizes)
        expected = repeated(data, size, threshold, min_tokens)
        assert stopped == (expected is not None)
        assert num_tokens == (len(data) if expected is None else expected)
        assert ''.join(texts).encode() == data[:num_tokens]


def test_the_earliest_end_wins():
    def ended(data: bytes):
        found = TextStream(ByteDetokenizer(characters), StopStrings(['xy']), 0, RepetitionStop(2, 2))
        return run(found, data, (100,))

    assert ended(b'ababxy') == (['abab', ''], 4, True)
    assert ended(b'abxyab') == (['ab', ''], 4, True)
    assert ended(b'abxabx') == (['abxab', ''], 5, True)  # what was held back for the string is shown


def test_no_repetition_without_size_or_threshold():
    for size, threshold in ((0, 0), (0, 3), (3, 0)):
        assert not RepetitionStop(size, threshold).is_active
