"""Offline throughput of one target plain and with drafts, interleaved in one process.

    python -m benchmark.profile_throughput demo --batch 1 16 --json out.json
    python -m benchmark.profile_throughput demo --batch 1 16 --verify-length fixed adaptive
    python -m benchmark.profile_throughput MODEL --draft dspark=DRAFT --draft dflash=OTHER --prompts prompts.json

A round runs every method once over the same prompts, in turn; figures are medians over rounds, ratios are taken within
a round, because a machine's speed drifts. `prompts.json` is a list of strings; without it the demo's held-out excerpts
are used. `overhead` is the share of the engine's time that is spent outside the models' forward passes, the Markov
chain counted as model: a clock around each of them, and around the steps. `rows` are verified rows per emitted token,
`wasted` the share of verified drafts that were not accepted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec import GenerationConfig, Pipeline, PytorchEngineConfig, SpeculativeConfig
from specdec.demo.prompts import held_out_prompts
from specdec.engine.build import build_engine
from specdec.engine.engine import Engine
from specdec.engine.tokenizer import Tokenizer
from specdec.messages import SpeculationStats

PLAIN = 'plain'


class Clock:
    """Seconds spent in an engine's steps and, of those, in its models."""

    def __init__(self, engine: Engine) -> None:
        self.steps = self.models = 0.0
        model = engine.agent.model
        model.run_target = self._timed('models', model.run_target)
        model.proposer.absorb = self._timed('models', model.proposer.absorb)
        model.proposer.propose = self._timed('models', model.proposer.propose)
        engine.step = self._timed('steps', engine.step)

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                setattr(self, what, getattr(self, what) + time.perf_counter() - start)

        return timed

    @property
    def overhead(self) -> float:
        return 1 - self.models / self.steps


class Method:
    """One way of decoding, with its own engine, and what its rounds gave."""

    def __init__(
        self, name: str, model: str, draft: str | None, args: argparse.Namespace, batch: int, lengths: str = 'fixed'
    ) -> None:
        config = PytorchEngineConfig(
            device_type=args.device, dtype=args.dtype, max_batch_size=batch, enable_prefix_caching=False
        )
        speculative = None
        if draft is not None:
            speculative = SpeculativeConfig(name, draft, args.num_draft_tokens, verify_length=lengths)
        engine = build_engine(model, config, speculative)
        self.name = name if lengths == 'fixed' else f'{name}/{lengths}'
        self.clock = Clock(engine) if engine.info.device == 'cpu' else None  # a GPU's work is not on the host's clock
        self.pipe = Pipeline.from_engine(engine, Tokenizer.load(engine.info.folder))
        self.rates: list[float] = []
        self.texts: list[list[int]] = []
        self.accepted: list[float] = []
        self.speculation = SpeculationStats()

    def run(self, prompts: list[str], config: GenerationConfig) -> None:
        start = time.perf_counter()
        responses = self.pipe.infer(prompts, config)
        self.rates.append(sum(r.generate_token_len for r in responses) / (time.perf_counter() - start))
        self.texts = [r.token_ids for r in responses]
        self.accepted = [r.speculation.mean_accepted_length for r in responses]
        self.speculation = sum((r.speculation for r in responses), SpeculationStats())

    def report(self, plain: 'Method', batch: int) -> dict[str, Any]:
        counts = self.speculation
        ratios = [mine / theirs for mine, theirs in zip(self.rates, plain.rates, strict=True)]
        return {
            'batch': batch,
            'method': self.name,
            'tokens_per_s': round(statistics.median(self.rates), 1),
            'ratio': round(statistics.median(ratios), 2),
            'ratio_range': [round(min(ratios), 2), round(max(ratios), 2)],
            'mean_accepted_length': round(statistics.mean(self.accepted), 2),
            'rows': round((counts.steps + counts.drafted) / max(counts.steps + counts.accepted, 1), 2),
            'wasted': round(1 - counts.accepted / counts.drafted, 2) if counts.drafted else 0.0,
            'identical': self.texts == plain.texts,
            'overhead': None if self.clock is None else round(self.clock.overhead, 3),
        }


def run_batch(args: argparse.Namespace, batch: int, prompts: list[str]) -> list[dict[str, Any]]:
    drafts = dict(d.split('=', 1) for d in args.draft) or {'dflash': '', 'dspark': ''}
    methods = [Method(PLAIN, args.model, None, args, batch)]
    methods += [
        Method(name, args.model, folder, args, batch, lengths)
        for name, folder in drafts.items()
        for lengths in args.verify_length
    ]
    config = GenerationConfig(
        max_new_tokens=args.tokens,
        ignore_eos=True,
        do_sample=args.temperature > 0,
        temperature=args.temperature or 0.8,
        top_k=0 if args.temperature > 0 else 50,
        random_seed=0,
    )
    for method in methods:
        method.run(prompts[:batch], config)  # warm-up
        method.rates.clear()
        if method.clock is not None:
            method.clock.steps = method.clock.models = 0.0
    for _ in range(args.rounds):
        for method in methods:
            method.run(prompts, config)
    rows = [method.report(methods[0], batch) for method in methods]
    for method in methods:
        method.pipe.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', help="a checkpoint folder, or 'demo'")
    parser.add_argument('--draft', action='append', default=[], metavar='METHOD=FOLDER')
    parser.add_argument('--batch', nargs='+', type=int, default=[1])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--tokens', type=int, default=128)
    parser.add_argument('--temperature', type=float, default=0.0)
    parser.add_argument('--verify-length', nargs='+', choices=['fixed', 'adaptive'], default=['fixed'])
    parser.add_argument('--num-draft-tokens', type=int, default=None)
    parser.add_argument('--num-prompts', type=int, default=16)
    parser.add_argument('--prompts', type=Path, help='a JSON list of strings')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    texts = json.loads(args.prompts.read_text()) if args.prompts else [p.text for p in held_out_prompts()]
    rows = []
    for batch in args.batch:
        for row in run_batch(args, batch, texts[: args.num_prompts]):
            rows.append(row)
            print(' '.join(f'{key}={value}' for key, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({'arguments': vars(args) | {'prompts': len(texts), 'json': None}, 'rows': rows}, indent=1)
        )


if __name__ == '__main__':
    main()
