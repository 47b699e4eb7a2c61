"""How long a decode step takes against the bytes it must move: one model shape, random weights, plain, DFlash, DSpark.

    python -m benchmark.bench_step --shape qwen3-8b --batch 1 8 32 --context 1024 --json out.json

Everything is measured in this process, side by side: the memory bandwidth (a large read), then for each method, batch
and context the engine's own loop (requests are admitted, prompts run, steady decode steps timed on the host's clock),
and the two graphs of the step by CUDA events. `floor` = bytes / bandwidth.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.shapes import ANY_MEMORY, SHAPES, draft_config, make_draft, make_target, step_bytes, target_config
from benchmark.timing import bandwidth, seconds
from specdec.agent.caches import plan_memory
from specdec.engine.build import Sources, assemble
from specdec.engine.engine import Engine
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams
from specdec.spec_decode.proposers import PROPOSERS
from specdec.spec_decode.proposers.null import NullProposer

METHODS = {'plain': None, 'dflash8': ('dflash', 8), 'dflash16': ('dflash', 16), 'dspark7': ('dspark', 7)}


class Bench:
    """One shape's target and the drafts made for it; the target's taps are every draft's."""

    def __init__(self, shape: str, methods: list[str], session: int, device: torch.device) -> None:
        self.shape, self.device, self.session = shape, device, session
        self.config = target_config(shape)
        wanted = [METHODS[m] for m in methods if METHODS[m]]
        self.drafts = {spec: draft_config(self.config, *spec) for spec in wanted}
        taps = next((d.taps for d in self.drafts.values()), ())
        self.target = make_target(shape, taps, session + 64, device)
        self.tapped = self.target.taps

    def engine(self, method: str, batch: int) -> Engine:
        spec = METHODS[method]
        self.target.taps = self.tapped if spec else frozenset()
        draft = None
        proposer: Any = NullProposer()
        if spec:
            draft = self.drafts[spec]
            model = make_draft(draft, self.target.embedding, self.target.head, self.session + 64, self.device)
            proposer = PROPOSERS[draft.kind](model, draft.default_tokens)
        config = PytorchEngineConfig(max_batch_size=batch, enable_prefix_caching=False)
        pages = batch * (self.session // config.block_size + 2)
        specs = tuple(s for s in (self.target.cache_spec(proposer.num_drafts), proposer.cache_spec()) if s is not None)
        memory = plan_memory(specs, config.block_size, ANY_MEMORY, 0.5, 0, pages)
        sources = Sources(self.shape, Path(), self.config, None, draft, proposer.num_drafts)
        return assemble(sources, config, self.target, proposer, memory, self.session, self.device)

    @torch.inference_mode()
    def measure(self, method: str, batch: int, context: int, steps: int) -> dict[str, Any]:
        engine = self.engine(method, batch)
        rng = random.Random(0)
        for i in range(batch):
            prompt = tuple(rng.randrange(1000, 150000) for _ in range(context))
            engine.add(EngineRequest(i + 1, prompt, SamplingParams(max_new_tokens=self.session - context)))
        while any(s.prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        for _ in range(8):
            engine.step()
        torch.cuda.synchronize()
        host, emitted, start = [], 0, time.perf_counter()
        for _ in range(steps):
            emitted += sum(len(output.token_ids) for output in engine.step())
            host.append(time.perf_counter())
        torch.cuda.synchronize()
        step_s = (time.perf_counter() - start) / steps
        graphs = engine.agent.graphs
        key = max(graphs.graphs)
        captured = graphs.graphs[key]
        draft_graph = next(iter(captured.drafts.values())).graph
        captured.slots.copy_(torch.arange(1, batch + 1, device=self.device))
        target_s = statistics.median(seconds(captured.target.replay) for _ in range(15))
        draft_s = statistics.median(seconds(draft_graph.replay) for _ in range(15))
        spec = METHODS[method]
        draft = self.drafts[spec] if spec else None
        num_drafts = draft.default_tokens if draft else 0
        moved = step_bytes(self.config, draft, batch, context + steps, batch * (num_drafts + 1), num_drafts)
        return {
            'method': method, 'batch': batch, 'context': context, 'step_ms': step_s * 1e3,
            'target_ms': target_s * 1e3, 'draft_ms': draft_s * 1e3, 'bytes': moved.total,
            'tokens_per_step': emitted / steps / batch, 'eager_steps': engine.agent.eager_decode_steps,
        }  # fmt: skip

    def profile(self, method: str, batch: int, context: int, path: Path) -> None:
        """Time by kernel over some replays of the step's graphs, as a table."""
        engine = self.engine(method, batch)
        engine.add(EngineRequest(1, tuple(range(1000, 1000 + context)), SamplingParams(max_new_tokens=256)))
        for _ in range(6):
            engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(10):
                engine.step()
            torch.cuda.synchronize()
        table = profiler.key_averages().table(sort_by='cuda_time_total', row_limit=60, max_name_column_width=48)
        path.write_text(table)
        print(f'--- {method}', *table.splitlines()[:24], sep='\n', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shape', choices=SHAPES, default='qwen3-8b')
    parser.add_argument('--methods', nargs='+', choices=METHODS, default=list(METHODS))
    parser.add_argument('--batch', nargs='+', type=int, default=[1, 8, 32])
    parser.add_argument('--context', nargs='+', type=int, default=[1024])
    parser.add_argument('--steps', type=int, default=64)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--profile', type=Path, help='a folder for kernel tables of batch 1')
    args = parser.parse_args()
    device = torch.device('cuda')
    rate = bandwidth(device)
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}: large reads {rate / 1e12:.2f} TB/s', flush=True)
    bench = Bench(args.shape, args.methods, max(args.context) + 512, device)
    rows = []
    for context in args.context:
        for batch in args.batch:
            for method in args.methods:
                row = bench.measure(method, batch, context, args.steps)
                row['floor_ms'] = row['bytes'] / rate * 1e3
                row['ratio'] = row['step_ms'] / row['floor_ms']
                rows.append(row)
                shown = ' '.join(f'{k}={v:.3f}' if isinstance(v, float) else f'{k}={v}' for k, v in row.items())
                print(shown, flush=True)
                torch.cuda.empty_cache()
    if args.profile:
        for method in args.methods:
            bench.profile(method, 1, args.context[0], args.profile / f'profile_{args.shape}_{method}.txt')
    if args.json:
        args.json.write_text(json.dumps({'shape': args.shape, 'bandwidth': rate, 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
