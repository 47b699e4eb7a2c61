import random

import pytest
from tokenizers import Tokenizer as RawTokenizer

from specdec.engine.tokenizer import Tokenizer
from specdec.errors import CheckpointError, ConfigError, RequestError
from specdec.messages import ChatTemplateConfig
from tests.helpers.tokenizers import byte_level_folder, metaspace_folder

TEXTS = [
    'The quick brown fox',
    '  leading, trailing  and   inner spaces\n\n\tand lines\n',
    '你好,世界。今天天气很好。',
    '안녕하세요 세계',
    '😀😀👩‍👩‍👧 naïve café \u0928\u092e\u0938\u094d\u0924\u0947',
    'mixed <|im_start|>user\n<think>x</think><|im_end|> text',
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return byte_level_folder(tmp_path_factory.mktemp('byte_level'))


@pytest.fixture(scope='module')
def tokenizer(folder):
    return Tokenizer.load(folder)


@pytest.fixture(scope='module')
def raw(folder):
    return RawTokenizer.from_file(str(folder / 'tokenizer.json'))


@pytest.fixture(scope='module')
def metaspace(tmp_path_factory):
    return Tokenizer.load(metaspace_folder(tmp_path_factory.mktemp('metaspace')))


def pieces(detokenizer, ids, sizes):
    """Pushes the ids in pieces of these sizes (repeated) and returns the texts, the flush last."""
    texts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*texts, detokenizer.flush()]


@pytest.mark.parametrize('skip', [True, False])
@pytest.mark.parametrize('sizes', [(1,), (2,), (3, 1, 8), (1000,)], ids=str)
@pytest.mark.parametrize('text', TEXTS)
def test_pieces_add_up_to_the_whole_and_show_no_half_characters(tokenizer, raw, text, sizes, skip):
    ids = tokenizer.encode(text)
    got = pieces(tokenizer.detokenizer(skip), ids, sizes)
    assert ''.join(got) == raw.decode(ids, skip_special_tokens=skip)
    assert not any('\ufffd' in piece for piece in got)


@pytest.mark.parametrize('skip', [True, False])
def test_random_ids_decode_like_the_whole(tokenizer, raw, skip):
    rng = random.Random(0)
    for _ in range(400):
        ids = [rng.randrange(raw.get_vocab_size() + 3) for _ in range(rng.randrange(40))]
        sizes = [rng.randrange(1, 9) for _ in range(5)]
        expected = raw.decode(ids, skip_special_tokens=skip)
        assert ''.join(pieces(tokenizer.detokenizer(skip), ids, sizes)) == expected
        assert tokenizer.decode(ids, skip) == expected


def test_random_unicode_round_trip(tokenizer):
    rng = random.Random(1)
    ranges = [(0x20, 0x250), (0x4E00, 0x9FFF), (0x1F300, 0x1F700)]
    for _ in range(300):
        points = [rng.randrange(*rng.choice(ranges)) for _ in range(rng.randrange(1, 20))]
        ids = tokenizer.encode(''.join(map(chr, points)))
        got = pieces(tokenizer.detokenizer(), ids, [rng.randrange(1, 5) for _ in range(3)])
        assert ''.join(got) == tokenizer.decode(ids)
        assert not any('\ufffd' in piece for piece in got)


def test_half_a_character_shows_at_the_very_end_only(tokenizer, raw):
    ids = tokenizer.encode('a🎉')
    assert len(ids) > 2, 'an emoji that the tokenizer was not trained on takes several tokens'
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids[:-1]) == 'a'
    assert detokenizer.copy().push(ids[-1:]) == '🎉'
    assert detokenizer.flush() == raw.decode(ids[:-1])[1:] == '\ufffd'
    assert detokenizer.flush() == ''


def test_many_tokens_take_linear_time(tokenizer):
    half = tokenizer.encode('🎉')[0]
    detokenizer = tokenizer.detokenizer()
    text = ''.join(detokenizer.push((half,)) for _ in range(100_000)) + detokenizer.flush()
    assert text == '\ufffd' * 100_000


@pytest.mark.parametrize('sizes', [(1,), (2,), (3, 1, 8)], ids=str)
@pytest.mark.parametrize('text', ['The quick 😀 你好 fox', ' two  spaces', '你好你好', 'fox'])
def test_other_decoders_stream_too(metaspace, text, sizes):
    ids = metaspace.encode(text)
    got = pieces(metaspace.detokenizer(), ids, sizes)
    assert ''.join(got) == metaspace._backend.decode(ids) == text
    assert not any('\ufffd' in piece for piece in got)


def test_other_decoders_give_out_endless_half_characters(metaspace):
    half = metaspace.encode('😀')[1]
    detokenizer = metaspace.detokenizer()
    assert len(''.join(detokenizer.push((half,)) for _ in range(100)) + detokenizer.flush()) == 100


def test_special_tokens_are_skipped_on_demand(metaspace):
    ids = metaspace.encode('The<|im_end|>fox')
    assert metaspace.decode(ids) == 'The fox'
    assert metaspace.decode(ids, skip_special_tokens=False) == 'The<|im_end|> fox'
    assert metaspace.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False) == 'The<|im_end|>fox'


def test_bytes_and_text_of_single_tokens(tokenizer):
    ids = tokenizer.encode('é😀<|im_end|>')
    assert b''.join(map(tokenizer.token_bytes, ids)) == 'é😀<|im_end|>'.encode()
    assert tokenizer.token_text(ids[-1]) == '<|im_end|>'


def test_chat_template(tokenizer):
    messages = [{'role': 'system', 'content': None}, {'role': 'user', 'content': [{'type': 'text', 'text': 'hi'}]}]
    text = '<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special=False)
    assert tokenizer.render_chat(messages, enable_thinking=False) == text + '<think>\n\n</think>\n\n'


@pytest.mark.parametrize(
    ('template', 'read', 'not_read'),
    [
        ('{% if a is defined and not a %}{{ b }}{% endif %}', ['a', 'b'], ['c', 'defined']),
        ('{% if not a is defined %}{% set a = 1 %}{% endif %}{{ a }}', ['a'], []),
        ('{% set a = 1 %}{{ a }}{# c #}c', [], ['a', 'c']),
        ('{% generation %}{{ a }}{% endgeneration %}', ['a'], ['b']),  # not plain Jinja: what it mentions
    ],
)
def test_variables_that_a_chat_template_reads(tmp_path, template, read, not_read):
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, chat_template=template))
    assert all(map(tokenizer.template_reads, read))
    assert not any(map(tokenizer.template_reads, not_read))


@pytest.mark.parametrize(
    'message',
    [
        'hi',
        {'content': 'hi'},
        {'role': 'user', 'content': 3},
        {'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'http://x'}}]},
        {'role': 'user', 'content': ['hi']},
    ],
)
def test_bad_messages_are_refused(tokenizer, message):
    with pytest.raises(RequestError, match='messages='):
        tokenizer.render_chat([message])


def test_chat_template_can_be_replaced(folder, tmp_path):
    file = tmp_path / 'template.jinja'
    file.write_text("{{ messages[-1]['content'] }}!")
    for given in (str(file), file.read_text()):
        tokenizer = Tokenizer.load(folder, ChatTemplateConfig(given))
        assert tokenizer.render_chat([{'role': 'user', 'content': 'hi'}]) == 'hi!'
    with pytest.raises(ConfigError, match='neither Jinja text nor a readable file'):
        Tokenizer.load(folder, ChatTemplateConfig(str(tmp_path / 'none.jinja')))
    with pytest.raises(ConfigError, match='is no Jinja'):
        Tokenizer.load(folder, ChatTemplateConfig('{% for %}'))


def test_template_that_refuses_is_the_requests_fault(folder):
    tokenizer = Tokenizer.load(folder, ChatTemplateConfig("{{ raise_exception('no such role') }}"))
    with pytest.raises(RequestError, match='no such role'):
        tokenizer.render_chat([{'role': 'user', 'content': 'hi'}])


def test_no_template(tmp_path):
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match='no chat template'):
        tokenizer.render_chat([{'role': 'user', 'content': 'hi'}])


def test_unreadable_folders(tmp_path):
    with pytest.raises(CheckpointError, match='is no folder'):
        Tokenizer.load(tmp_path / 'none')
    with pytest.raises(CheckpointError, match=r'has no tokenizer\.json; add it'):
        Tokenizer.load(tmp_path)
    (tmp_path / 'tokenizer.json').write_text('{"truncated')
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match='cannot be read'):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize('text', ['\ud800', 'a\udfffb'])
def test_lone_surrogates_are_refused(tokenizer, text):
    with pytest.raises(RequestError, match='surrogate'):
        tokenizer.encode(text)
