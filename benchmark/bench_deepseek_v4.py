"""How long DeepSeek-V4's decode step takes against the bytes it must move: true widths, fewer layers and experts.

    python -m benchmark.bench_deepseek_v4 --layers 8 --experts 64 --batch 1 8 32 --context 1024 8192 --json out.json

Weights are random, experts in four bits as they stay on a GPU. Plain decoding and the bundled heads (five drafts) are
measured in one process: steady steps on the host's clock and, where there are graphs, both of them by CUDA events.
`floor` = bytes / bandwidth: every weight once, of experts as many as the rows are expected to choose, and each
request's windows, chosen entries and index keys. `--tiny --device cpu` runs the script itself, not the model.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark.shapes import ANY_MEMORY
from benchmark.timing import bandwidth, seconds
from specdec.agent.caches import plan_memory
from specdec.engine.build import Sources, assemble, cache_specs
from specdec.engine.engine import Engine
from specdec.layers.parallel import SINGLE
from specdec.layers.rotary import RopeConfig
from specdec.layers.weights import Destination
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams
from specdec.models.deepseek_v4.config import ARCHITECTURE, BundledDraft, DeepseekV4Config
from specdec.models.deepseek_v4.draft import BundledDspark
from specdec.models.deepseek_v4.target import DeepseekV4Target
from specdec.spec_decode.proposers.bundled import BundledProposer
from specdec.spec_decode.proposers.null import NullProposer

PAGE = 256
NUM_DRAFTS = 5


def flash(layers: int, experts: int) -> DeepseekV4Config:
    """V4-Flash's widths; layers go window, 4, 128, 4, 128, ... and the first chooses experts by token id."""
    return DeepseekV4Config(
        architecture=ARCHITECTURE,
        hidden_size=4096,
        vocab_size=129280,
        num_heads=64,
        head_dim=512,
        rope_dim=64,
        query_rank=1024,
        output_groups=8,
        output_rank=1024,
        window=128,
        ratios=(0, *(4 if i % 2 == 0 else 128 for i in range(layers - 1))),
        rope=RopeConfig(1e4),
        compress_rope=RopeConfig(16e4, 'yarn', 16.0, 65536, attention_factor=1.0),
        index_heads=64,
        index_dim=128,
        index_topk=512,
        num_experts=experts,
        experts_per_token=6,
        intermediate_size=2048,
        route_scale=1.5,
        swiglu_limit=10.0,
        hash_layers=1,
        streams=4,
        sinkhorn_iterations=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        max_position=1048576,
        dtype='bfloat16',
        fp4_experts=True,
        classic_mtp=False,
        draft=BundledDraft(3, tuple(range(layers - 3, layers)), NUM_DRAFTS, 128799, 256, True),
    )


def tiny(config: DeepseekV4Config) -> DeepseekV4Config:
    return replace(
        config,
        hidden_size=64,
        vocab_size=500,
        num_heads=4,
        head_dim=64,
        rope_dim=8,
        query_rank=32,
        output_groups=2,
        output_rank=32,
        index_heads=4,
        index_dim=32,
        index_topk=8,
        intermediate_size=32,
        draft=replace(config.draft, noise_id=499, markov_rank=8),
    )


def fill(weights: dict[str, Destination], config: DeepseekV4Config, device: torch.device) -> None:
    """Matrices whose products keep their size, in four bits too; norms of one; tables of experts in turn."""
    generator = torch.Generator(device).manual_seed(0)
    for name, destination in weights.items():
        view = destination.view
        if name.endswith('tid2eid'):
            ids = torch.arange(view.numel(), device=device) % config.num_experts
            view.copy_(ids.view_as(view))
        elif view.dtype == torch.uint8:
            low, high = (0, 256) if name.endswith('weight') else (119, 121)
            view.random_(low, high, generator=generator)
        elif 'norm' in name or name.endswith('_scale'):
            view.fill_(1)
        elif name.endswith(('_base', 'bias', 'ape', 'attn_sink')):
            view.zero_()
        else:
            view.normal_(0, view.shape[-1] ** -0.5, generator=generator)


def weight_bytes(weights: dict[str, Destination], config: DeepseekV4Config, rows: int) -> int:
    """Read once a step: of experts as many as `rows` rows choose on average, of embeddings and id tables nothing."""
    touched = 1 - (1 - config.experts_per_token / config.num_experts) ** rows
    total = 0.0
    for name, destination in weights.items():
        size = num_bytes(destination.view)
        if name.endswith('tid2eid') or name == 'embed.weight' or 'markov_w1' in name:
            continue
        total += size * touched if '.ffn.experts.' in name else size
    return int(total)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def context_bytes(config: DeepseekV4Config, context: int, drafts: bool) -> int:
    """What one request's rows read of its caches in bf16, however many rows it has."""
    rows = len(config.ratios) + (config.draft.num_stages if drafts and config.draft else 0)
    size = rows * min(config.window, context) * config.head_dim
    size += config.ratios.count(128) * (context // 128) * config.head_dim
    chosen = min(config.index_topk, context // 4) * config.head_dim
    size += config.ratios.count(4) * (chosen + context // 4 * config.index_dim)
    return 2 * size


class Bench:
    def __init__(self, config: DeepseekV4Config, session: int, device: torch.device) -> None:
        self.config, self.session, self.device = config, session, device
        assert config.draft is not None
        self.target = DeepseekV4Target(config, config.draft.taps, 0, SINGLE, torch.bfloat16, device)
        self.draft = BundledDspark(config, self.target.embedding, self.target.head, torch.bfloat16, device)
        fill(self.target.weights(), config, device)
        fill(self.draft.weights(), config, device)

    def engine(self, drafts: bool, batch: int) -> Engine:
        self.target.taps = frozenset(self.config.draft.taps if drafts and self.config.draft else ())
        proposer: Any = BundledProposer(self.draft, NUM_DRAFTS) if drafts else NullProposer()
        settings = PytorchEngineConfig(max_batch_size=batch, enable_prefix_caching=False, device_type=self.device.type)
        specs = cache_specs(self.target, proposer)
        memory = plan_memory(specs, PAGE, ANY_MEMORY, 0.5, 0, batch * (self.session // PAGE + 2), num_states=0)
        sources = Sources('deepseek-v4', Path(), self.config, None, self.config.draft, proposer.num_drafts)
        return assemble(sources, settings, self.target, proposer, memory, self.session, self.device)

    @torch.inference_mode()
    def measure(self, drafts: bool, batch: int, context: int, steps: int) -> dict[str, Any]:
        engine, rng = self.engine(drafts, batch), random.Random(0)
        for i in range(batch):
            prompt = tuple(rng.randrange(2, self.config.vocab_size - 1) for _ in range(context))
            engine.add(EngineRequest(i + 1, prompt, SamplingParams(max_new_tokens=self.session - context)))
        start = time.perf_counter()
        while any(s.prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        self._synchronise()
        prompt_s = time.perf_counter() - start
        for _ in range(8):
            engine.step()
        self._synchronise()
        start = time.perf_counter()
        emitted = sum(sum(len(output.token_ids) for output in engine.step()) for _ in range(steps))
        self._synchronise()
        step_s = (time.perf_counter() - start) / steps
        rows = batch * (1 + (NUM_DRAFTS if drafts else 0))
        moved = weight_bytes(self.target.weights(), self.config, rows) + batch * context_bytes(
            self.config, context + steps, drafts
        )
        if drafts:
            moved += weight_bytes(self.draft.weights(), self.config, batch * NUM_DRAFTS)
            moved += num_bytes(self.target.head_table.weight)
        return {
            'method': 'dspark5' if drafts else 'plain', 'batch': batch, 'context': context,
            'prompt_ms': prompt_s * 1e3, 'step_ms': step_s * 1e3, **self._graphs(engine, batch), 'bytes': moved,
            'tokens_per_step': emitted / steps / batch, 'eager_steps': engine.agent.eager_decode_steps,
        }  # fmt: skip

    def _graphs(self, engine: Engine, batch: int) -> dict[str, float]:
        graphs = engine.agent.graphs
        if graphs is None:
            return {}
        captured = graphs.graphs[max(graphs.graphs)]
        captured.slots.copy_(torch.arange(1, batch + 1, device=self.device))
        draft = next(iter(captured.drafts.values())).graph
        return {
            'target_ms': 1e3 * statistics.median(seconds(captured.target.replay) for _ in range(15)),
            'draft_ms': 1e3 * statistics.median(seconds(draft.replay) for _ in range(15)),
        }

    def _synchronise(self) -> None:
        if self.device.type == 'cuda':
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--layers', type=int, default=8)
    parser.add_argument('--experts', type=int, default=64)
    parser.add_argument('--batch', nargs='+', type=int, default=[1, 8, 32])
    parser.add_argument('--context', nargs='+', type=int, default=[1024])
    parser.add_argument('--steps', type=int, default=64)
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    parser.add_argument('--tiny', action='store_true')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    device, config = torch.device(args.device), flash(args.layers, args.experts)
    rate = bandwidth(device) if device.type == 'cuda' else 1e10
    bench = Bench(tiny(config) if args.tiny else config, max(args.context) + 8 * (args.steps + 16), device)
    rows = []
    for context in args.context:
        for batch in args.batch:
            for drafts in (False, True):
                row = bench.measure(drafts, batch, context, args.steps)
                row['floor_ms'] = row['bytes'] / rate * 1e3
                row['ratio'] = row['step_ms'] / row['floor_ms']
                rows.append(row)
                shown = ' '.join(f'{k}={v:.3f}' if isinstance(v, float) else f'{k}={v}' for k, v in row.items())
                print(shown, flush=True)
    if args.json:
        shape = {'layers': args.layers, 'experts': args.experts}
        args.json.write_text(json.dumps({'shape': shape, 'bandwidth': rate, 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
