"""How long a decode step takes in LMDeploy: plain, with its own DFlash, and with the plug-in's drafts; random weights.

    python -m benchmark.bench_lmdeploy --shape qwen3-8b --batch 1 8 32 --context 1024 --json out.json

For a GPU with LMDeploy 0.18.0 and FlashAttention-3. Every method runs in a process of its own, one after the other, and
measures all batches; checkpoints are files full of holes, so that nothing is downloaded and little written, and weights
are drawn on the device after loading. A step's time is the median between LMDeploy's outputs while the batch is full.
`dflash16of8` drafts with a block of 16 at dflash_block_size 8: LMDeploy shortens the block, the plug-in does not.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmark.shapes import SHAPES, draft_config, target_config
from specdec.engine.build import demo_folder
from specdec.models.configs import DecoderConfig, DraftConfig, Qwen3Config
from specdec.models.tensor_table import draft_tensor_shapes, target_tensor_shapes

DTYPE = 'bfloat16'


@dataclass(frozen=True, slots=True)
class Method:
    """`kind` and `block_rows` of the draft; `tokens` drafted per step; `stock`: LMDeploy's own draft."""

    kind: str
    block_rows: int
    tokens: int
    stock: bool = False


METHODS: dict[str, Method | None] = {
    'plain': None,
    'stock_dflash8': Method('dflash', 8, 7, stock=True),
    'dflash8': Method('dflash', 8, 7),
    'stock_dflash16': Method('dflash', 16, 15, stock=True),
    'dflash16': Method('dflash', 16, 15),
    'dspark7': Method('dspark', 7, 7),
    'stock_dflash16of8': Method('dflash', 16, 7, stock=True),
    'dflash16of8': Method('dflash', 16, 7),
}


# ------------------------------------------------------------------------------------------------- checkpoints
def write_holes(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A checkpoint of bf16 zeros that takes no room: a header, and a file made long."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {'dtype': 'BF16', 'shape': list(shape), 'data_offsets': [start, end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with (folder / 'model.safetensors').open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        file.truncate(8 + len(text) + end)
    return folder


def _decoder(decoder: DecoderConfig) -> dict[str, Any]:
    return {
        'model_type': 'qwen3', 'dtype': DTYPE, 'hidden_size': decoder.hidden_size,
        'num_hidden_layers': decoder.num_layers, 'num_attention_heads': decoder.num_heads,
        'num_key_value_heads': decoder.num_kv_heads, 'head_dim': decoder.head_dim,
        'intermediate_size': decoder.intermediate_size, 'rms_norm_eps': decoder.rms_norm_eps,
        'vocab_size': decoder.vocab_size, 'max_position_embeddings': decoder.max_position, 'hidden_act': 'silu',
        'attention_bias': False, 'layer_types': ['full_attention'] * decoder.num_layers, 'use_sliding_window': False,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': decoder.rope.theta},
        'bos_token_id': None, 'pad_token_id': None,
    }  # fmt: skip


def write_target(folder: Path, config: Qwen3Config) -> Path:
    assert config.moe is None, 'dense shapes only'
    top = {
        'architectures': [config.architecture], 'eos_token_id': 2, 'tie_word_embeddings': config.tie_embeddings,
        **_decoder(config.decoder),
    }  # fmt: skip
    write_holes(folder, top, target_tensor_shapes(config))
    for name in ('tokenizer.json', 'tokenizer_config.json'):  # LMDeploy wants one, whatever it says
        (folder / name).write_text((demo_folder('target') / name).read_text())
    return folder


def write_draft(folder: Path, draft: DraftConfig, target: Qwen3Config) -> Path:
    """DFlash in z-lab's layout, which LMDeploy reads too; DSpark in DeepSpec's."""
    common = {'num_target_layers': target.decoder.num_layers, **_decoder(draft.decoder)}
    taps, mask = list(draft.taps), draft.mask_id
    if draft.kind == 'dflash':
        method = {'block_size': draft.block_rows, 'mask_token_id': mask, 'target_layer_ids': taps}
        config = {'architectures': ['DFlashDraftModel'], 'dflash_config': method, **common}
    else:
        assert draft.markov is not None
        config = {
            'architectures': ['Qwen3DSparkModel'], 'block_size': draft.block_rows, 'mask_token_id': mask,
            'target_layer_ids': taps, 'markov_rank': draft.markov.rank, 'markov_head_type': draft.markov.kind,
            'enable_confidence_head': True, 'confidence_head_with_markov': True, **common,
        }  # fmt: skip
    return write_holes(folder, config, draft_tensor_shapes(draft))


# ------------------------------------------------------------------------------------------------------ one method
def measure(
    name: str, target: Qwen3Config, draft: DraftConfig | None, batches: Sequence[int], context: int, steps: int
) -> list[dict[str, Any]]:
    """Steps of one method in this process. `draft`: as METHODS[name] says, made for the target."""
    import lmdeploy
    from lmdeploy.pytorch.engine import engine_loop

    from specdec.integrations.lmdeploy import SpeculativeConfig

    method = METHODS[name]
    times: list[tuple[float, int]] = []
    accepted: list[int] = []
    make_outputs, make_metrics = engine_loop.EngineLoop._make_infer_outputs, engine_loop.RequestMetrics

    def outputs(*args: Any, **kwargs: Any) -> Any:
        found = make_outputs(*args, **kwargs)
        times.append((time.perf_counter(), len(found)))
        return found

    def metrics(*args: Any, spec_info: Any = None, **kwargs: Any) -> Any:
        if spec_info is not None:
            accepted.append(spec_info['num_accepted_tokens'])
        return make_metrics(*args, spec_info=spec_info, **kwargs)

    engine_loop.EngineLoop._make_infer_outputs, engine_loop.RequestMetrics = outputs, metrics
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_target(Path(scratch) / 'target', target)
        speculative = None
        if method is not None and draft is not None:
            there = write_draft(Path(scratch) / 'draft', draft, target)
            stock = ('draft',) if method.stock else ()
            speculative = SpeculativeConfig(draft.kind, str(there), method.tokens, stock=stock)
        engine = lmdeploy.PytorchEngineConfig(
            session_len=context + 1024, max_batch_size=max(batches), max_prefill_token_num=8192,
            cache_max_entry_count=0.5, dtype='auto',
        )  # fmt: skip
        pipe = lmdeploy.pipeline(str(folder), backend_config=engine, speculative_config=speculative)
        _fill(pipe, method)
        for batch in batches:
            times.clear()
            accepted.clear()
            _run(pipe, batch, context, steps, target.decoder.vocab_size)
            full = [(t, n) for t, n in times if n == batch]
            gaps = [after[0] - before[0] for before, after in pairwise(full[8:])]
            tokens = 1 + statistics.mean(accepted) if accepted else 1.0
            times_ms, found = 1e3 * statistics.median(gaps), {'method': name, 'batch': batch, 'context': context}
            rows.append({**found, 'steps': len(gaps), 'step_ms': times_ms, 'tokens_per_step': tokens})
        pipe.close()
    engine_loop.EngineLoop._make_infer_outputs, engine_loop.RequestMetrics = make_outputs, make_metrics
    return rows


@torch.inference_mode()
def _fill(pipe: Any, method: Method | None) -> None:
    """Gaussian matrices whose products keep their size, norms of one."""
    agent = pipe.async_engine.engine.executor.model_agent
    named = dict(agent.patched_model.get_model().named_parameters())
    if method is not None:
        model = agent.spec_agent.proposer.model.get_model()
        if method.stock:
            named |= {f'draft.{name}': weight for name, weight in model.named_parameters()}
        else:
            found = model.proposer.draft.weights()
            named |= {f'draft.{name}': place.view for name, place in found.items()}
    for name, weight in named.items():
        if 'norm' in name:
            weight.fill_(1)
        elif weight.is_floating_point():
            weight.normal_(0, weight.shape[-1] ** -0.5)


def _run(pipe: Any, batch: int, context: int, steps: int, vocabulary: int) -> None:
    import lmdeploy

    engine = pipe.async_engine
    settings = lmdeploy.GenerationConfig(max_new_tokens=steps + 16, do_sample=False, ignore_eos=True)

    async def one(prompt: list[int]) -> None:
        request = await engine.preprocess(None, pipe.session_mgr.get(), settings, input_ids=prompt)
        async for _ in engine.generate(request):
            pass

    async def everybody() -> None:
        generator = random.Random(0)
        prompts = [[generator.randrange(10, vocabulary) for _ in range(context)] for _ in range(batch)]
        await asyncio.gather(*(one(prompt) for prompt in prompts))

    pipe._run(coro=everybody()).result()


# -------------------------------------------------------------------------------------------------------------- all
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shape', choices=SHAPES, default='qwen3-8b')
    parser.add_argument('--methods', nargs='+', choices=METHODS, default=list(METHODS))
    parser.add_argument('--batch', nargs='+', type=int, default=[1, 8, 32])
    parser.add_argument('--context', type=int, default=1024)
    parser.add_argument('--steps', type=int, default=64)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--one', choices=METHODS, help='measure this method in this process; used by the script itself')
    args = parser.parse_args()
    if args.one:
        target, method = target_config(args.shape), METHODS[args.one]
        draft = None if method is None else draft_config(target, method.kind, method.block_rows)
        rows = measure(args.one, target, draft, args.batch, args.context, args.steps)
        print(f'rows {json.dumps(rows)}')
        return
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}', flush=True)
    rows = []
    for name in args.methods:
        command = [
            sys.executable, '-m', 'benchmark.bench_lmdeploy', '--one', name, '--shape', args.shape,
            '--context', str(args.context), '--steps', str(args.steps), '--batch', *map(str, args.batch),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('rows ')]
        if not lines:
            print(f'{name}: failed', flush=True)
            continue
        for row in json.loads(lines[-1].removeprefix('rows ')):
            rows.append(row)
            print(' '.join(f'{k}={v:.3f}' if isinstance(v, float) else f'{k}={v}' for k, v in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({'shape': args.shape, 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
