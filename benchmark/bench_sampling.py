"""What sampling settings add to a decode step: the demo's on a CPU, or a pipeline of real size on a GPU.

    python -m benchmark.bench_sampling --json out.json                    # demo steps, batch 16
    python -m benchmark.bench_sampling --rows 256 --vocabulary 151936     # operators alone, on a GPU

Steps with a setting and greedy ones alternate on the same requests, whose stages are switched off every other step;
figures are medians over pairs of neighbours, because a machine's speed drifts. `idle` is what the pipeline costs where
nobody asks for anything: the share of a greedy step spent in front of its argmax. On a GPU, milliseconds by CUDA
graphs; the step they belong to is that of benchmark.bench_step.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.timing import graph_seconds
from specdec.demo.prompts import held_out_prompts
from specdec.engine.build import build_engine
from specdec.engine.engine import Engine
from specdec.engine.tokenizer import Tokenizer
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams, SpeculativeConfig
from specdec.plan import NO_STAGE, RULES, Stage
from specdec.spec_decode import rejection_sampler
from specdec.spec_decode.logits import LogitRows, Sampling, pick_tokens, process
from specdec.spec_decode.rules import Rules

PENALTIES = {'repetition_penalty': 1.1, 'presence_penalty': 0.2, 'frequency_penalty': 0.1}
FILTERS = {'top_k': 50, 'top_p': 0.9, 'min_p': 0.02}
SETTINGS: dict[str, dict[str, Any]] = {
    'temperature': {'temperature': 1.0},
    'temperature, coupled drafts': {'temperature': 1.0, 'draft_sampling': 'coupled'},
    'top_p': {'temperature': 1.0, 'top_p': 0.9},
    'penalties': PENALTIES,
    'all': {'temperature': 1.0, **PENALTIES, **FILTERS},
    'all, coupled drafts': {'temperature': 1.0, 'draft_sampling': 'coupled', **PENALTIES, **FILTERS},
}


# ------------------------------------------------------------------------------------------------- the demo's steps
class Steps:
    """Decode steps of a full batch under one setting."""

    def __init__(self, method: str, batch: int) -> None:
        config = PytorchEngineConfig(device_type='cpu', max_batch_size=batch, enable_prefix_caching=False)
        self.engine: Engine = build_engine('demo', config, SpeculativeConfig(method))
        tokenizer = Tokenizer.load(self.engine.info.folder)
        texts = [prompt.text for prompt in held_out_prompts()]
        self.prompts = [tuple(tokenizer.encode(texts[i % len(texts)])) for i in range(batch)]
        self.next_id = 0
        self.in_front = 0.0
        self._process = rejection_sampler.process
        rejection_sampler.process = self._timed

    def _timed(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._process(*args)
        finally:
            self.in_front += time.perf_counter() - start

    def pairs(self, setting: dict[str, Any], count: int) -> tuple[list[float], float]:
        """Ratios of a step with the setting to the greedy one before it, and the latter's share before the pick."""
        engine = self.engine
        requests = []
        for prompt in self.prompts:
            self.next_id += 1
            requests.append(self.next_id)
            params = SamplingParams(max_new_tokens=850, seed=self.next_id % 16, **setting)
            engine.add(EngineRequest(self.next_id, prompt, params))
        while engine.scheduler.waiting or any(s.prefilling for s in engine.scheduler.running):
            engine.step()
        wanted = {sequence: sequence.stages for sequence in engine.scheduler.running}
        ratios, idle = [], []
        for _ in range(count):
            times = []
            for off in (True, False):
                for sequence, stages in wanted.items():
                    sequence.stages = NO_STAGE if off else stages
                self.in_front = 0.0
                start = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - start)
                if off:
                    idle.append(self.in_front / times[0])
            ratios.append(times[1] / times[0])
        assert len(engine.scheduler.running) == len(requests), 'a request ended while it was timed'
        engine.abort(requests)
        return ratios, statistics.median(idle)


def measure_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for method in args.methods:
        steps = Steps(method, args.batch)
        for name, setting in SETTINGS.items():
            ratios, idle = steps.pairs(setting, args.pairs)
            quarters = statistics.quantiles(ratios, n=4)
            row = {
                'method': method,
                'setting': name,
                'added': round(quarters[1] - 1, 4),
                'quartiles': [round(quarters[0] - 1, 4), round(quarters[2] - 1, 4)],
                'idle': round(idle, 5),
            }
            rows.append(row)
            spread = f'{row["quartiles"][0]:+.1%} to {row["quartiles"][1]:+.1%}'
            print(f'| {method} | {name} | {row["added"]:+.1%} | {spread} | {idle:.3%} |', flush=True)
    return rows


# ----------------------------------------------------------------------------------------------- operators of real size
def measure_operators(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The pipeline on random logits: R rows, 8 to a request, on whatever device there is."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    num_drafts = 7
    count = args.rows // (num_drafts + 1)
    rules = Rules.allocate(count + 1, num_drafts, args.vocabulary, device)
    slots = torch.arange(1, count + 1, device=device)
    rules.tables.penalties[1:] = torch.tensor([1.1, 0.2, 0.1], device=device)
    rules.tables.counts.random_(0, 3)

    def full(value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    sampling = Sampling(
        slots=slots, seeds=slots, top_k=full(50), stop_from=full(0), end=full(10**6), draft_sampling=full(1),
        temperature=full(1.0, torch.float32), top_p=full(0.9, torch.float32), min_p=full(0.02, torch.float32),
        stop_ids=full(-1)[:, None], banned_ids=full(-1)[:, None],
    )  # fmt: skip
    offsets = torch.arange(count + 1, device=device) * (num_drafts + 1)
    requests = torch.arange(count, device=device).repeat_interleave(num_drafts + 1)
    drafts = torch.randint(args.vocabulary, (count, num_drafts), device=device)
    rows = LogitRows(requests, offsets, torch.arange(len(requests), device=device), drafts, full(num_drafts))
    logits = torch.randn(len(requests), args.vocabulary, device=device) * 3
    variants = {
        'greedy': NO_STAGE,
        'temperature': Stage.NOISE,
        'filters': Stage.NOISE | Stage.FILTERS,
        'penalties': Stage.PENALTIES,
        'all of them': Stage.NOISE | Stage.FILTERS | Stage.PENALTIES,
        'every rule': Stage.NOISE | Stage.FILTERS | RULES,
    }
    found = []
    for name, stages in variants.items():

        def call(stages: Stage = stages) -> torch.Tensor:
            return pick_tokens(process(logits, rows, sampling, rules, stages, 50), rows, sampling)

        milliseconds = 1e3 * graph_seconds(call) if device.type == 'cuda' else 1e3 * _on_cpu(call)
        found.append({'setting': name, 'milliseconds': round(milliseconds, 3)})
        print(f'| {name} | {milliseconds:.3f} ms |')
    return found


def _on_cpu(call: Any) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--methods', nargs='+', default=['dspark'])
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--pairs', type=int, default=30)
    parser.add_argument('--rows', type=int, help='measure operators on so many rows instead of steps of the demo')
    parser.add_argument('--vocabulary', type=int, default=151936)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    with torch.inference_mode():
        rows = measure_operators(args) if args.rows else measure_steps(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + '\n')


if __name__ == '__main__':
    main()
