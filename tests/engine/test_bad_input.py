"""What cannot be served is refused in one line that names field, value and remedy, and harms nobody else.

Settings and checkpoints before work starts; requests one by one, while others go on unchanged.
"""

import json
import os
import queue
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec import ConfigError, GenerationConfig, PytorchEngineConfig, RequestError, SpeculativeConfig
from specdec.engine.build import build_engine
from specdec.engine.client import ThreadClient
from specdec.engine.live_request import resolve_sampling
from specdec.errors import CheckpointError, SpecdecError
from specdec.messages import EngineRequest, RequestOutput, SamplingParams
from tests.helpers import checkpoints as tiny
from tests.helpers.engines import (
    POSITIONS,
    VOCABULARY,
    Driver,
    Settings,
    World,
    drive,
    generate,
    make_engine,
    prompt_ids,
    request,
    write_target,
)
from tests.helpers.exactness import Ledger

SMALL = {'device_type': 'cpu', 'block_size': 4, 'max_batch_size': 2, 'session_len': 64}


def refused(error: type[SpecdecError], *words: str, match: Callable[[], Any]) -> SpecdecError:
    """The call fails in one line that has all these words in it."""
    with pytest.raises(error) as caught:
        match()
    text = str(caught.value)
    assert '\n' not in text
    assert len(text) < 500
    for word in words:
        assert word in text, f'{word!r} is not in: {text}'
    return caught.value


def build(target: Path | str, draft: Path | str | None = None, method: str = 'dflash', k: int | None = None, **changes):
    speculative = None if draft is None else SpeculativeConfig(method, str(draft), num_speculative_tokens=k)
    return build_engine(str(target), PytorchEngineConfig(**(SMALL | changes)), speculative)


def copied(folder: Path, place: Path, **changes: Any) -> Path:
    """A copy of a checkpoint folder with these keys of its config changed."""
    copy = Path(shutil.copytree(folder, place / 'copy'))
    config = json.loads((copy / 'config.json').read_text())
    (copy / 'config.json').write_text(json.dumps(config | changes))
    return copy


def test_the_folders_that_these_tests_break_are_good(world: World) -> None:
    engine = build(world.target_folder(), world.draft_folder('dspark_vanilla'), 'dspark')
    [outcome] = generate(engine, [request(prompt_ids(5), 20)])
    assert len(outcome.token_ids) == 20


# ---------------------------------------------------------------------------------------------------- checkpoints
def test_missing_folder(world: World, tmp_path: Path) -> None:
    missing = tmp_path / 'nowhere' / 'deep' / 'down'
    refused(ConfigError, 'model', str(missing), match=lambda: build(missing))
    refused(ConfigError, 'model', str(missing), match=lambda: build(world.target_folder(), missing))


def test_a_file_in_place_of_a_folder(world: World) -> None:
    file = world.target_folder() / 'model.safetensors'
    refused(ConfigError, 'model', str(file), match=lambda: build(file))


def test_empty_folder(world: World, tmp_path: Path) -> None:
    refused(CheckpointError, 'config.json', match=lambda: build(tmp_path))
    refused(CheckpointError, 'config.json', match=lambda: build(world.target_folder(), tmp_path))


@contextmanager
def other_user() -> Iterator[None]:
    """Root reads everything; for a while we are somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize('name', ['', 'config.json', 'model.safetensors'])
def test_unreadable_files(world: World, name: str) -> None:
    with tempfile.TemporaryDirectory() as public:
        Path(public).chmod(0o755)
        copy = copied(world.target_folder(), Path(public))
        for path in (copy, *copy.iterdir()):
            path.chmod(0o755)
        (copy / name).chmod(0)
        with other_user():
            refused(ConfigError, str(copy), match=lambda: build(copy))
        copy.chmod(0o755)


@pytest.mark.parametrize('content', ['', '{', '[]', '\x00\x01', '{"architectures": 3}'])
def test_config_that_is_no_config(world: World, tmp_path: Path, content: str) -> None:
    copy = copied(world.target_folder(), tmp_path)
    (copy / 'config.json').write_text(content)
    refused(CheckpointError, match=lambda: build(copy))


@pytest.mark.parametrize('names', [['LlamaForCausalLM'], [], ['Qwen3ForCausalLM', 'Qwen3ForCausalLM'], None])
def test_unknown_architecture(world: World, tmp_path: Path, names: list[str] | None) -> None:
    copy = copied(world.target_folder(), tmp_path, architectures=names)
    refused(CheckpointError, 'architectures', 'Qwen3ForCausalLM', match=lambda: build(copy))


def test_a_draft_as_a_target_and_a_target_as_a_draft(world: World) -> None:
    target, draft = world.target_folder(), world.draft_folder('dspark_vanilla')
    refused(CheckpointError, 'architectures', 'Qwen3DSparkModel', match=lambda: build(draft))
    refused(CheckpointError, 'architectures', 'Qwen3ForCausalLM', match=lambda: build(target, target))


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'hidden_size': 32}, 'hidden_size'),
        ({'vocab_size': 60}, 'vocab_size'),
        ({'num_hidden_layers': 3, 'layer_types': ['full_attention'] * 3}, 'num_target_layers'),
    ],
)
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
def test_a_draft_for_another_target(
    world: World, tmp_path: Path, draft: str, changes: dict[str, Any], field: str
) -> None:
    other = write_target(tmp_path / 'other', **changes)
    folder = world.draft_folder(draft)
    refused(CheckpointError, field, match=lambda: build(other, folder, draft.split('_')[0]))


@pytest.mark.parametrize('taps', [[1, 99], [-2, 3], [3, 1], [1, 1], []])
def test_layer_ids_out_of_range(world: World, tmp_path: Path, taps: list[int]) -> None:
    method = tiny.zlab_config({'target_layer_ids': taps})['dflash_config']
    copy = copied(world.draft_folder('dflash_fill_in'), tmp_path, dflash_config=method)
    refused(CheckpointError, 'target_layer_ids', match=lambda: build(world.target_folder(), copy))


@pytest.mark.parametrize('left', [0, 4, 40, 0.5, 0.999])
@pytest.mark.parametrize('which', ['target', 'draft'])
def test_truncated_weights(world: World, tmp_path: Path, which: str, left: float) -> None:
    source = world.target_folder() if which == 'target' else world.draft_folder('dflash_fill_in')
    copy = copied(source, tmp_path)
    file = copy / 'model.safetensors'
    data = file.read_bytes()
    file.write_bytes(data[: int(left * len(data)) if isinstance(left, float) else left])
    attempt = (lambda: build(copy)) if which == 'target' else (lambda: build(world.target_folder(), copy))
    refused(CheckpointError, str(file), 'truncated or damaged', match=attempt)


@pytest.mark.parametrize('change', ['missing', 'unexpected', 'misshapen'])
@pytest.mark.parametrize('which', ['target', 'draft'])
def test_tensors_are_accounted_for(world: World, tmp_path: Path, which: str, change: str) -> None:
    source = world.target_folder() if which == 'target' else world.draft_folder('dflash_fill_in')
    copy = copied(source, tmp_path)
    weights = load_file(copy / 'model.safetensors')
    name = next(name for name in weights if name.endswith('layers.1.mlp.up_proj.weight'))
    if change == 'missing':
        del weights[name]
    elif change == 'unexpected':
        name = f'{name}.twin'
        weights[name] = weights[name.removesuffix('.twin')].clone()
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, copy / 'model.safetensors')
    attempt = (lambda: build(copy)) if which == 'target' else (lambda: build(world.target_folder(), copy))
    refused(CheckpointError, name, match=attempt)


@pytest.mark.parametrize(('draft', 'method'), [('dflash_fill_in', 'dspark'), ('dspark_vanilla', 'dflash')])
def test_wrong_method_for_the_checkpoint(world: World, draft: str, method: str) -> None:
    right = draft.split('_')[0]
    folder = world.draft_folder(draft)
    error = refused(ConfigError, 'method', f"use '{right}'", match=lambda: build(world.target_folder(), folder, method))
    assert (error.field, error.value) == ('method', method)


def test_a_deepspec_baseline_is_a_dflash_draft(world: World) -> None:
    folder = world.draft_folder('dflash_anchor_first')
    refused(ConfigError, 'method', "use 'dflash'", match=lambda: build(world.target_folder(), folder, 'dspark'))


def test_no_draft_named(world: World) -> None:
    refused(ConfigError, 'model', 'SpeculativeConfig', match=lambda: build(world.target_folder(), ''))


# ------------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize('k', [5, 8, 1000])
def test_more_drafts_than_the_block_has(world: World, k: int) -> None:
    target, draft = world.target_folder(), world.draft_folder('dflash_fill_in')
    error = refused(ConfigError, 'num_speculative_tokens', str(k), '4', match=lambda: build(target, draft, k=k))
    assert error.value == k


def test_dflash_block_size_out_of_range(world: World) -> None:
    config = SpeculativeConfig('dflash', str(world.draft_folder('dflash_fill_in')), dflash_block_size=6)
    attempt = lambda: build_engine(str(world.target_folder()), PytorchEngineConfig(**SMALL), config)  # noqa: E731
    error = refused(ConfigError, 'dflash_block_size', '6', '5', match=attempt)
    assert error.value == 6


@pytest.mark.parametrize(
    ('arguments', 'field'),
    [
        ({'method': 'eagle'}, 'method'),
        ({'method': 'dflash', 'num_speculative_tokens': 0}, 'num_speculative_tokens'),
        ({'method': 'dflash', 'num_speculative_tokens': -1}, 'num_speculative_tokens'),
        ({'method': 'dflash', 'num_speculative_tokens': 2.5}, 'num_speculative_tokens'),
        ({'method': 'dflash', 'num_speculative_tokens': True}, 'num_speculative_tokens'),
        ({'method': 'dflash', 'dflash_block_size': 1}, 'dflash_block_size'),
        ({'method': 'dflash', 'dflash_block_size': 4, 'num_speculative_tokens': 4}, 'dflash_block_size'),
        ({'method': 'dspark', 'dflash_block_size': 4}, 'dflash_block_size'),
    ],
)
def test_speculative_settings(arguments: dict[str, Any], field: str) -> None:
    error = refused(ConfigError, field, match=lambda: SpeculativeConfig(**arguments))
    assert error.field == field


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('session_len', 0), ('session_len', -5), ('session_len', 'long'), ('max_batch_size', 0), ('block_size', 0),
        ('max_prefill_token_num', 0), ('cache_max_entry_count', 0), ('cache_max_entry_count', 1.5),
        ('cache_max_entry_count', float('nan')), ('num_gpu_blocks', -1), ('dtype', 'int3'), ('device_type', 'tpu'),
        ('tp', 0), ('dp', 2), ('ep', 2), ('rank_timeout', 0),
        ('quant_policy', 8), ('adapters', {'a': 'b'}), ('logprobs_mode', 'raw_logits'),
    ],
)  # fmt: skip
def test_engine_settings(field: str, value: Any) -> None:
    error = refused(ConfigError, field, match=lambda: PytorchEngineConfig(**{field: value}))
    assert error.field == field


def test_session_len_beyond_the_model(world: World) -> None:
    target = world.target_folder()
    refused(ConfigError, 'session_len', str(POSITIONS), match=lambda: build(target, session_len=POSITIONS + 1))


def test_session_len_that_the_cache_cannot_hold(world: World) -> None:
    attempt = lambda: build(world.target_folder(), session_len=100, num_gpu_blocks=24)  # noqa: E731
    refused(ConfigError, 'session_len', '100', '96', match=attempt)
    assert build(world.target_folder(), session_len=96, num_gpu_blocks=24).info.session_len == 96


def test_session_len_shrinks_to_the_cache_when_nobody_asked(world: World, ledger: Ledger) -> None:
    engine = build(world.target_folder(), session_len=None, num_gpu_blocks=10)
    assert engine.info.session_len == 40
    models = world.models()
    outcomes = generate(engine, [request(prompt_ids(n), 400) for n in (1, 39, 20)])
    for outcome in outcomes:
        assert len(outcome.text) == 40
        prompt = outcome.request.prompt_ids
        ledger.same(models, ledger.plain(models, prompt, 40 - len(prompt)), outcome)


def test_no_memory_for_one_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        available = 1000

    monkeypatch.setattr('specdec.engine.build.psutil.virtual_memory', Nothing)
    attempt = lambda: build(world.target_folder(), session_len=None)  # noqa: E731
    refused(ConfigError, 'cache_max_entry_count', match=attempt)


@pytest.mark.parametrize(
    ('field', 'value'),
    [('num_gpu_blocks', 10**9), ('max_batch_size', 10**9), ('block_size', 10**10), ('cache_max_entry_count', 1e-12)],
)
def test_settings_that_no_memory_holds(world: World, field: str, value: Any) -> None:
    error = refused(ConfigError, field, 'free', match=lambda: build(world.target_folder(), **{field: value}))
    assert (error.field, error.value) == (field, value)


# ------------------------------------------------------------------------------------------------------- requests
BAD_VALUES: dict[str, list[Any]] = {
    'temperature': [-1, 100.0, float('nan'), 'hot', 10**400],
    'top_p': [0, -0.1, 1.5, float('inf')],
    'top_k': [-1, 1.5, True],
    'min_p': [-0.1, 2],
    'max_new_tokens': [0, -3, 1.5],
    'min_new_tokens': [-1, 10**6],
    'random_seed': ['x', 1.0],
    'logprobs': [-1, 10**6],
    'num_speculative_tokens': [-1, 0.5],
    'stop_token_ids': [7, ['a'], [True]],
    'stop_words': ['abc', [''], [3]],
    'do_sample': [1],
    'ignore_eos': ['no'],
    'speculative': [None],
    'n': [0, 129, 1.5],
    'repetition_penalty': [0, -1, 11, 1e-38, float('nan')],
    'presence_penalty': [-2.1, 2.1, 'x'],
    'frequency_penalty': [-2.1, 2.1, None],
    'bad_words': ['x', [''], [3], ['x'] * 65, ['x' * 257]],
    'bad_token_ids': [3, ['x'], list(range(257))],
    'allowed_token_ids': [[], [True], 'x', list(range(16385))],
    'logit_bias': [[], {'1': 1.0}, {1: 101}, {1: 10**400}, {1: float('inf')}, dict.fromkeys(range(513), 1.0)],
    'response_format': ['json', 3],
    'repetition_ngram_size': [3, -1],
    'repetition_ngram_threshold': [3, -1],
    'thinking_budget': [-1, 1.5],
    'draft_sampling': ['beam', 1],
    # known, and served by nobody
    'logits_processors': [[print]],
    'output_logits': ['all'],
}
BAD_SETTINGS = [(field, value) for field, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(('field', 'value'), BAD_SETTINGS, ids=lambda x: repr(x)[:20])
def test_generation_settings(field: str, value: Any) -> None:
    error = refused(RequestError, field, match=lambda: GenerationConfig(**{field: value}))
    assert error.field == field


@pytest.mark.parametrize('length', [0, 64, 65, 5000])
def test_prompt_lengths_that_the_engine_refuses(world: World, length: int) -> None:
    engine = build(world.target_folder(), world.draft_folder('dflash_fill_in'))
    words = ['prompt', 'session_len=64'] if length else ['prompt', 'empty']
    refused(RequestError, *words, match=lambda: engine.add(request((1,) * length)))
    prompt = (1,) * length
    refused(RequestError, 'prompt', match=lambda: resolve_sampling(engine.info, (), prompt, GenerationConfig()))
    [outcome] = generate(engine, [request((1,) * 63, 9)])
    assert (len(outcome.token_ids), outcome.finish) == (1, 'length')


@pytest.mark.parametrize('wrong', [-1, VOCABULARY, 10**9])
def test_ids_that_the_model_does_not_have(world: World, wrong: int) -> None:
    engine = build(world.target_folder())
    refused(RequestError, 'prompt', str(wrong), match=lambda: engine.add(request((1, wrong, 2))))
    refused(RequestError, 'stop_token_ids', str(wrong), match=lambda: engine.add(request((1, 2), stop_ids=(wrong,))))
    attempt = lambda: resolve_sampling(engine.info, (), (1,), GenerationConfig(stop_token_ids=[wrong]))  # noqa: E731
    refused(RequestError, 'stop_token_ids', str(wrong), match=attempt)
    assert not engine.has_work()


def test_an_integer_too_large_to_be_written() -> None:
    refused(RequestError, 'temperature', 'very large int', match=lambda: GenerationConfig(temperature=10**5000))


BAD_PARAMS: dict[str, list[dict[str, Any]]] = {
    'max_new_tokens': [{'max_new_tokens': -1}, {'max_new_tokens': 0}, {'max_new_tokens': 2**63}],
    'min_new_tokens': [{'min_new_tokens': -1}, {'min_new_tokens': 2**63}, {'min_new_tokens': 1.5}],
    'top_k': [{'top_k': -1}, {'top_k': 2**63}],
    'random_seed': [{'seed': -(2**63) - 1}, {'seed': 2**64}, {'seed': None}],
    'logprobs': [{'logprobs': -1}, {'logprobs': 21}],
    'num_speculative_tokens': [{'max_drafts': -1}, {'max_drafts': True}],
    'thinking_budget': [{'thinking_budget': 5}, {'thinking_budget': 2**63, 'think_ids': (1, 2)}],
    'think_ids': [{'think_ids': (1, VOCABULARY)}, {'think_ids': (1,)}],
    'temperature': [{'temperature': float('nan')}, {'temperature': 3}],
    'repetition_penalty': [{'repetition_penalty': 1e-38}],
    'stop_token_ids': [{'stop_ids': (1,) * 65}, {'stop_ids': (None,)}],
    'bad_token_ids': [{'banned_ids': (1,) * 257}, {'banned_ids': (VOCABULARY,)}, {'banned_ids': (1.5,)}],
    'allowed_token_ids': [{'allowed_ids': (1,) * 16385}, {'allowed_ids': (-1,)}],
    'logit_bias': [{'logit_bias': bias} for bias in (((1, 1.0),) * 513, ((VOCABULARY, 1.0),), ((1, 1e9),))],
    'bad_words': [{'bad_words': words} for words in (((1, VOCABULARY),), ((1,) * 17,), ((),), ((1, 2),) * 65)],
    'draft_sampling': [{'draft_sampling': 'beam'}, {'draft_sampling': 'probabilistic', 'temperature': 1.0}],
    'response_format': [{'grammar': 'x'}, {'grammar': 3}],
}  # fmt: skip


def test_params_that_no_table_of_the_device_holds(world: World) -> None:
    """Each is refused by name in front of the scheduler, and a request beside them runs as if there were none."""
    engine = build(world.target_folder(), world.draft_folder('dspark_vanilla'), 'dspark')
    asked = request(prompt_ids(5), 12)
    [alone] = generate(engine, [asked])
    engine.add(replace(asked, request_id=10**6))
    for field, cases in BAD_PARAMS.items():
        for case in cases:
            wrong = EngineRequest(7, (1, 2), replace(SamplingParams(max_new_tokens=5), **case))
            error = refused(RequestError, field, match=lambda wrong=wrong: engine.add(wrong))
            assert error.field == field, case
    refused(RequestError, 'request_id', match=lambda: engine.add(replace(asked, request_id=10**6)))
    refused(RequestError, 'request_id', match=lambda: engine.add(replace(asked, request_id=2**63)))
    refused(RequestError, 'prompt', match=lambda: engine.add(EngineRequest(8, (1, '2'), asked.params)))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [i for output in outputs for i in output.token_ids] == alone.token_ids


def test_too_many_stop_ids(world: World) -> None:
    engine = build(world.target_folder())
    many = GenerationConfig(stop_token_ids=list(range(VOCABULARY)) * 2)
    assert len(resolve_sampling(engine.info, (), (1,), many).stop_ids) == VOCABULARY
    large = engine.info.__class__(**{**_fields(engine.info), 'vocab_size': 1000})
    attempt = lambda: resolve_sampling(large, (), (1,), GenerationConfig(stop_token_ids=list(range(100))))  # noqa: E731
    refused(RequestError, 'stop_token_ids', '64', match=attempt)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__}


def test_settings_that_ask_for_much_get_what_there_is(world: World) -> None:
    info = build(world.target_folder(), world.draft_folder('dflash_fill_in')).info
    config = GenerationConfig(
        do_sample=True, top_k=10**9, max_new_tokens=10**9, num_speculative_tokens=10**9, random_seed=-1
    )
    params = resolve_sampling(info, (48,), (1, 2, 3), config)
    assert (params.top_k, params.max_new_tokens, params.max_drafts, params.seed) == (0, 61, 4, 2**64 - 1)
    assert resolve_sampling(info, (48,), (1,), GenerationConfig(thinking_budget=2**63)).thinking_budget == 64
    assert resolve_sampling(info, (48,), (1,), GenerationConfig(speculative=False)).max_drafts == 0
    cold = GenerationConfig(do_sample=True, temperature=1e-6, top_k=3)
    assert resolve_sampling(info, (48,), (1,), cold).temperature == 0
    banned = resolve_sampling(info, (48, 47), (1,), GenerationConfig(ignore_eos=True, stop_token_ids=[47]))
    assert (banned.banned_ids, banned.stop_ids) == ((48,), (47,))


def test_bad_requests_fail_alone(world: World, ledger: Ledger) -> None:
    """Through the client's thread: each bad request ends in one error, its neighbours' texts are as if alone."""
    models = world.models('dspark_vanilla')
    client = ThreadClient(make_engine(models, Settings(session_len=64)))
    outputs: queue.Queue[list[RequestOutput]] = queue.Queue()
    client.start(outputs.put)
    good = [request(prompt_ids(3 + i), 30) for i in range(6)]
    wrong = [((), ()), ((1,) * 64, ()), ((VOCABULARY,), ()), ((1, -1), ()), ((1,), (-7,))]
    bad = [
        EngineRequest(-1 - i, prompt, SamplingParams(max_new_tokens=5, stop_ids=stops))
        for i, (prompt, stops) in enumerate(wrong)
    ]
    for one, other in zip(good, [*bad, None]):
        client.submit(one)
        if other is not None:
            client.submit(other)
    texts: dict[int, list[int]] = {r.request_id: [] for r in good}
    errors: dict[int, str] = {}
    running = {r.request_id for r in (*good, *bad)}
    while running:
        for output in outputs.get(timeout=60):
            if output.error is not None:
                errors[output.request_id] = output.error.message
            else:
                texts[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                running.remove(output.request_id)
    client.close()
    assert errors.keys() == {r.request_id for r in bad}
    assert all('\n' not in message for message in errors.values())
    for asked in good:
        assert texts[asked.request_id] == ledger.plain(models, asked.prompt_ids, 30).token_ids


def test_a_refused_request_leaves_nothing_behind(world: World) -> None:
    driver: Driver = drive(build(world.target_folder()))
    for _ in range(3):
        with pytest.raises(RequestError):
            driver.engine.add(request(()))
    driver.engine.scheduler.check()
    assert driver.run() == {}
