"""Small tokenizers as checkpoint folders have them, made on the spot: byte-level BPE, and SentencePiece-like BPE."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
    '{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}'
)
SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
ADDED_TOKENS = ('<think>', '</think>')  # added, but not special: as in Qwen3
CORPUS = [
    'def main(argument):\n    return argument + 1\n',
    'The quick brown fox jumps over the lazy dog. ' * 3,
    '你好,世界。今天天气很好。',
    '안녕하세요 세계',
    'naïve café 😀😀👩‍👩‍👧',
]


def byte_level_folder(folder: Path, vocab_size: int = 400, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes a byte-level BPE tokenizer with Qwen3's special tokens and returns the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ADDED_TOKENS])
    return _write(tokenizer, folder, chat_template)


def metaspace_folder(folder: Path) -> Path:
    """Writes a BPE tokenizer that marks spaces and falls back to bytes, and returns the folder."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    byte_tokens = [f'<0x{byte:02X}>' for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=['<unk>', *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator([text.replace(' ', '▁') for text in CORPUS[:2]], trainer)
    data = json.loads(tokenizer.to_str())
    data['added_tokens'] = [token for token in data['added_tokens'] if token['content'] == '<unk>']
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return _write(tokenizer, folder, CHAT_TEMPLATE)


def _write(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|im_end|>'}
    if chat_template is not None:
        config['chat_template'] = chat_template
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return folder
