"""The training script at toy size: seconds on a CPU, and every folder it writes loads again."""

import dataclasses
import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.demo import demo_folder
from specdec.demo.data import HELD_OUT, read_corpus, train_tokenizer
from specdec.demo.folders import read_draft, read_target
from specdec.demo.generate import continue_text
from specdec.demo.measure import continuations, measure, propose
from specdec.demo.networks import block_mask
from specdec.demo.prompts import held_out_prompts
from specdec.demo.train import Recipe, dspark_loss, train

TOY = Recipe(
    vocab_size=320,
    hidden_size=32,
    head_dim=8,
    target_layers=3,
    target_intermediate=48,
    target_steps=60,
    target_batch=4,
    target_length=64,
    taps=(0, 1),
    draft_layers=1,
    draft_intermediate=48,
    draft_steps=40,
    draft_batch=4,
    real_rows=1,
    blocks_per_row=4,
    num_proposals=3,
    markov_rank=4,
    text_length=48,
    text_prompts=(16, 24),
    texts_per_prompt=8,
    texts_at_once=4,
    warmup_steps=5,
    measured_tokens=24,
)
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('sources')
    library = Path(sysconfig.get_path('stdlib'))
    for name in ('textwrap.py', 'heapq.py', 'bisect.py', 'copy.py'):
        (folder / name).write_text((library / name).read_text(encoding='utf-8'), encoding='utf-8')
    return folder


@pytest.fixture(scope='module')
def trained(sources, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp('trained')
    torch.set_num_threads(1)
    return out, train(TOY, read_corpus(sources), held_out_prompts()[:2], out, CPU)


def test_held_out_files_are_not_learned(sources):
    corpus = read_corpus(sources)
    assert set(corpus.training) == {'heapq.py', 'bisect.py', 'copy.py'}
    assert set(corpus.held_out) == {'textwrap.py'}
    assert len(corpus.digest) == 64


def test_the_report_says_what_was_measured(trained):
    out, report = trained
    assert json.loads((out / 'training.json').read_text()) == json.loads(json.dumps(report))
    assert report['recipe'] == dataclasses.asdict(TOY)
    assert report['held_out_loss'] < math.log(TOY.vocab_size)
    for law in ('greedy', 'temperature_1'):
        for method in ('dflash', 'dspark'):
            figures = report['acceptance'][law][method]
            assert 1 <= figures['mean_accepted_length'] <= TOY.num_proposals + 1
            assert len(figures['position_rates']) == TOY.num_proposals


def test_transformers_loads_the_target_and_agrees(trained):
    out, _ = trained
    ids = torch.arange(40)[None] * 7 % TOY.vocab_size
    target = read_target(out / 'target', CPU)
    model = AutoModelForCausalLM.from_pretrained(out / 'target', dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(target.logits(target(ids)[0]), model(ids).logits, atol=1e-4, rtol=0)


def test_the_tokenizer_passes_code_through(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[0] / 'target')
    code = 'def f(x):\n    return x  # \u00e9\n'
    messages = [{'role': 'system', 'content': 'ignored'}, {'role': 'user', 'content': code}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == code
    parts = [{'role': 'user', 'content': [{'type': 'text', 'text': code}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == code
    ids = tokenizer(code)['input_ids']
    assert tokenizer.decode(ids) == code
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == code
    for token in ('<|im_start|>', '<|im_end|>', '<think>', '</think>', '<tool_call>', '</tool_call>', '<|mask|>'):
        assert len(tokenizer.encode(token)) == 1


def test_draft_folders_hold_their_dialects_tensors(trained):
    out, _ = trained
    dflash, dspark = (load_file(out / name / 'model.safetensors') for name in ('dflash', 'dspark'))
    heads = {'embed_tokens.weight', 'lm_head.weight', 'confidence_head.proj.weight', 'confidence_head.proj.bias'}
    heads |= {'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'}
    assert set(dspark) - set(dflash) == heads
    assert not set(dflash) - set(dspark)
    assert all(tensor.dtype == torch.bfloat16 for tensor in (*dflash.values(), *dspark.values()))
    table = load_file(out / 'target' / 'model.safetensors')['model.embed_tokens.weight']
    assert torch.equal(dspark['embed_tokens.weight'], table)
    assert torch.equal(dspark['lm_head.weight'], table)
    assert json.loads((out / 'dflash' / 'config.json').read_text())['dflash_config']['block_size'] == 4
    assert json.loads((out / 'dspark' / 'config.json').read_text())['block_size'] == 3


@pytest.mark.parametrize('method', ['dflash', 'dspark'])
def test_proposals_depend_on_the_committed_prefix_only(trained, method):
    out, _ = trained
    target, draft = read_target(out / 'target', CPU), read_draft(out / method, CPU)
    ids = torch.arange(30) * 11 % TOY.vocab_size
    other = torch.cat([ids[:13], (ids[13:] + 5) % TOY.vocab_size])
    starts = torch.tensor([5, 12])
    assert torch.equal(propose(target, draft, ids, starts), propose(target, draft, other, starts))


def test_block_mask_hides_anchor_tap_and_other_blocks():
    mask = block_mask(torch.tensor([[2, 0]]), length=4, rows=2)[0, 0]
    assert mask.shape == (4, 8)
    assert mask[0].tolist() == mask[1].tolist() == [True, True, False, False, True, True, False, False]
    assert mask[2].tolist() == mask[3].tolist() == [False] * 6 + [True, True]


def test_cached_decoding_follows_the_uncached_forward(trained):
    target = read_target(trained[0] / 'target', CPU)
    prompts = torch.arange(24).view(2, 12) * 5 % TOY.vocab_size
    lengths = torch.tensor([12, 7])
    new = continue_text(target, prompts, lengths, 9, torch.zeros(2), torch.Generator().manual_seed(0))
    for prompt, length, emitted in zip(prompts, lengths, new, strict=True):
        ids = torch.cat([prompt[:length], emitted])
        logits = target.logits(target(ids[None])[0])[0, length - 1 : -1]
        assert torch.equal(logits.argmax(-1), emitted)


def test_a_draft_that_agrees_costs_only_the_confidence_term(trained):
    draft = read_draft(trained[0] / 'dspark', CPU)
    block = torch.randint(TOY.vocab_size, (2, 3, TOY.num_proposals + 1))
    hidden = torch.randn(2, 3, TOY.num_proposals, TOY.hidden_size)
    label = torch.nn.functional.one_hot(block[:, :, 1:], TOY.vocab_size).float()
    sure = 1000 * label - draft.markov_bias(block[:, :, :-1])
    loss, _ = dspark_loss(draft, hidden, sure, block, label)
    confidence = draft.confidence_logits(hidden, block[:, :, :-1])
    weights = torch.exp(-torch.arange(TOY.num_proposals) / 4)
    expected = (torch.nn.functional.softplus(-confidence) * weights).sum() / (weights.sum() * 6)
    torch.testing.assert_close(loss, expected)


def test_texts_too_short_for_a_block_are_refused(trained):
    target, draft = read_target(trained[0] / 'target', CPU), read_draft(trained[0] / 'dspark', CPU)
    with pytest.raises(ValueError, match='shorter than one block'):
        measure(target, draft, [(torch.arange(10), 8)])


def test_sources_without_python_are_refused(tmp_path):
    with pytest.raises(ValueError, match='no Python files'):
        read_corpus(tmp_path)


def test_vocabulary_has_the_size_asked_for(sources):
    assert train_tokenizer(list(read_corpus(sources).training.values()), 300).get_vocab_size() == 300


def test_held_out_prompts_are_packaged():
    prompts = held_out_prompts()
    assert len(prompts) == len(HELD_OUT)
    assert {prompt.name.split(':')[0] for prompt in prompts} == set(HELD_OUT)
    assert all(prompt.text and not prompt.text.endswith('\n') for prompt in prompts)


def test_packaged_checkpoints_are_small():
    files = [path for name in ('target', 'dflash', 'dspark') for path in demo_folder(name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000


@pytest.mark.parametrize('method', ['dflash', 'dspark'])
def test_packaged_drafts_are_accepted(method):
    target, draft = read_target(demo_folder('target'), CPU), read_draft(demo_folder(method), CPU)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder('target'))
    prompt = next(prompt for prompt in held_out_prompts() if prompt.name.startswith('queue.py'))
    ids = tokenizer(prompt.text)['input_ids']
    texts = continuations(target, [ids], 64, 0.0, torch.Generator().manual_seed(0))
    assert measure(target, draft, texts).mean_accepted_length > 1.5


def test_unknown_demo_model_is_refused():
    with pytest.raises(ValueError, match='choose one of target, dflash, dspark'):
        demo_folder('eagle')
