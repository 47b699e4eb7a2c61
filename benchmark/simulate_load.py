"""Load without a GPU: a discrete-event simulation of the engine's decode loop, fed with a table of step costs and with
acceptance as it was recorded, or as a model has it.

    python -m benchmark.simulate_load --cost cost.json --trace trace.json --concurrency 1 4 16 64 --json out.json
    python -m benchmark.simulate_load --record demo --cost cost.json --trace trace.json

`--record MODEL` runs the model with its packaged draft and writes both files: what steps cost there (the table of
agent/step_cost.py) and every block's survivals with how many of its drafts were right. The simulation then runs plain
decoding, each fixed K, the adaptive policy (the engine's own code), the paper's Algorithm 1 and an oracle that knows
what will be accepted, at each concurrency (a finished request is replaced at once) or request rate (Poisson).
Prompts cost nothing here: it is the decode loop that is compared. Tokens/s, and ms per token of a request, are shown.
"""

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.agent.step_cost import StepCost
from specdec.plan import Candidate
from specdec.spec_decode.draft_budget import AdaptiveBudget
from specdec.spec_decode.verify_length import early_stopped

LENGTHS = (64, 512)  # tokens that a request asks for, evenly between


@dataclass(frozen=True, slots=True)
class Block:
    """What a head said of one block, and how many of its drafts are right."""

    survival: tuple[float, ...]
    right: int


# ------------------------------------------------------------------------------------------------------- acceptance
class Trace:
    """Blocks drawn from a recording, each request's in their order from a random place."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.num_drafts = len(blocks[0].survival)

    def start(self, dice: random.Random) -> Callable[[], Block]:
        place = dice.randrange(len(self.blocks))

        def following() -> Block:
            nonlocal place
            place = (place + 1) % len(self.blocks)
            return self.blocks[place]

        return following

    @classmethod
    def load(cls, path: Path) -> 'Trace':
        return cls([Block(tuple(b['survival']), b['right']) for b in json.loads(path.read_text())])


class Model:
    """Each draft is right with a chance that decays along the block and varies from block to block.

    `rate`: of the first draft; `decay`: factor per position; `bias`: what the head adds to the logit of each chance
    (0: calibrated).
    """

    def __init__(self, rate: float, decay: float, num_drafts: int, bias: float = 0.0, spread: float = 0.15) -> None:
        self.rate, self.decay, self.num_drafts = rate, decay, num_drafts
        self.bias, self.spread = bias, spread

    def start(self, dice: random.Random) -> Callable[[], Block]:
        def following() -> Block:
            first = min(max(self.rate + dice.uniform(-self.spread, self.spread), 0.01), 0.99)
            chances = [first * self.decay**k for k in range(self.num_drafts)]
            right = next((k for k, chance in enumerate(chances) if dice.random() >= chance), self.num_drafts)
            survival, told = 1.0, []
            for chance in chances:
                odds = chance / (1 - chance) * 2.718281828**self.bias
                survival *= odds / (1 + odds)
                told.append(survival)
            return Block(tuple(told), right)

        return following


# ---------------------------------------------------------------------------------------------------------- engine
@dataclass(slots=True)
class Request:
    arrival: float
    left: int
    blocks: Callable[[], Block]
    block: Block | None = None
    emitted: int = 0


@dataclass(slots=True)
class Outcome:
    """`seconds` of simulated time; `waits`: ms per token of each finished request, from its arrival."""

    tokens: int = 0
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    verified: int = 0
    accepted: int = 0
    steps: int = 0


Lengths = Callable[[list[Request]], tuple[list[int], bool]]  # requests -> verify lengths, whether to draft


class Arm:
    """One way to choose lengths, with whatever it remembers; `choose` before a step, `learn` after it."""

    def __init__(self, name: str, cost: StepCost, num_drafts: int, kind: str, fixed: int = 0) -> None:
        self.name, self.kind, self.fixed, self.cost, self.num_drafts = name, kind, fixed, cost, num_drafts
        self.policy = AdaptiveBudget(cost, num_drafts, delay=0)

    def choose(self, running: list[Request]) -> tuple[list[int], bool]:
        blocks = [r.block for r in running]
        most = [min(self.num_drafts, r.left - 1) if r.block else 0 for r in running]
        if self.kind == 'fixed':
            return [min(n, self.fixed) for n in most], self.fixed > 0
        if self.kind == 'adaptive':
            choice = self.policy.choose([Candidate(n, self.num_drafts) for n in most], [], 0)
            return _likeliest(
                [b.survival[:n] if b else () for b, n in zip(blocks, most)], choice.budget or 0
            ), choice.drafting
        batch, drafted = len(running), self.cost.draft(len(running))

        def rate(rows: int) -> float:
            return 1 / (self.cost.target(batch, rows) + self.cost.absorb(batch, rows) + drafted)

        if self.kind == 'early stop':
            return early_stopped([_confidences(b.survival[:n]) if b else [] for b, n in zip(blocks, most)], rate), True
        return self._oracle(running, most)

    def _oracle(self, running: list[Request], most: list[int]) -> tuple[list[int], bool]:
        """Exactly the drafts that are right."""
        return [min(r.block.right, n) if r.block else 0 for r, n in zip(running, most)], True

    def learn(self, request: Request, verified: int, accepted: int) -> None:
        if self.kind == 'adaptive' and request.block is not None and verified:
            self.policy.observe(request.block.survival, verified, accepted)

    def report(self, block: Block) -> None:
        if self.kind == 'adaptive':
            self.policy.report(block.survival)


def _confidences(survival: Sequence[float]) -> list[float]:
    return [s / before if before else 0.0 for s, before in zip(survival, (1.0, *survival))]


def _likeliest(survivals: Sequence[Sequence[float]], budget: int) -> list[int]:
    """What verify_length.admit does, without tensors."""
    chances = ((-s, k, r) for r, row in enumerate(survivals) for k, s in enumerate(row))
    lengths = [0] * len(survivals)
    for _, _, request in heapq.nsmallest(budget, chances):
        lengths[request] += 1
    return lengths


def simulate(
    arm: Arm, acceptance: Trace | Model, num_requests: int, seed: int, concurrency: int, rate: float | None = None
) -> Outcome:
    """`rate` None: `concurrency` requests always run; else requests arrive at so many per second, queued beyond it."""
    dice, found, clock = random.Random(seed), Outcome(), 0.0
    waiting, when = [], 0.0
    for _ in range(num_requests):
        when += dice.expovariate(rate) if rate else 0.0
        waiting.append(Request(when, dice.randint(*LENGTHS), acceptance.start(random.Random(dice.random()))))
    waiting.reverse()
    running: list[Request] = []
    while waiting or running:
        while waiting and len(running) < concurrency and (waiting[-1].arrival <= clock or not running):
            request = waiting.pop()
            clock = max(clock, request.arrival)
            if rate is None:
                request.arrival = clock
            running.append(request)
        lengths, drafting = arm.choose(running)
        batch, rows = len(running), len(running) + sum(lengths)
        ms = arm.cost.target(batch, rows) + arm.cost.absorb(batch, rows) + (arm.cost.draft(batch) if drafting else 0)
        clock += ms / 1e3
        found.steps += 1
        for request, length in zip(running, lengths):
            accepted = min(request.block.right, length) if request.block else 0
            arm.learn(request, length, accepted)
            emitted = min(accepted + 1, request.left)
            request.left -= emitted
            request.emitted += emitted
            found.tokens += emitted
            found.verified += length
            found.accepted += accepted
            request.block = None
            if drafting:
                request.block = request.blocks()
                arm.report(request.block)
            if request.left == 0:
                found.waits.append((clock - request.arrival) * 1e3 / request.emitted)
        running = [r for r in running if r.left]
        if rate is None and not waiting and len(running) < concurrency:
            break  # the load falls off: the rest is not at this concurrency
    found.seconds = clock
    return found


# ------------------------------------------------------------------------------------------------------- recording
def record(model: str, method: str, cost_file: Path, trace_file: Path, batch: int, tokens: int) -> None:
    """Run the packaged prompts with every draft verified; write what steps cost and what became of each block."""
    from specdec import GenerationConfig, Pipeline, PytorchEngineConfig, SpeculativeConfig
    from specdec.cli.calibrate import Recorder
    from specdec.demo.prompts import held_out_prompts
    from specdec.engine.build import build_engine
    from specdec.engine.tokenizer import Tokenizer

    speculative = SpeculativeConfig(method, verify_length='adaptive')
    engine = build_engine(model, PytorchEngineConfig(max_batch_size=batch), speculative)
    engine.agent.cost.dump(cost_file)
    engine.scheduler.lengths = recorder = Recorder()
    with Pipeline.from_engine(engine, Tokenizer.load(engine.info.folder)) as pipe:
        pipe.infer([p.text for p in held_out_prompts()], GenerationConfig(max_new_tokens=tokens, ignore_eos=True))
    blocks = [{'survival': list(s), 'right': a} for s, v, a in recorder.rows if v == engine.info.num_drafts]
    trace_file.write_text(json.dumps(blocks))
    print(f'{len(blocks)} blocks, mean accepted length {1 + statistics.mean(b["right"] for b in blocks):.2f}')


def arms(cost: StepCost, num_drafts: int) -> list[Arm]:
    found = [Arm('plain', cost, num_drafts, 'fixed', 0)]
    found += [Arm(f'fixed {k}', cost, num_drafts, 'fixed', k) for k in range(1, num_drafts + 1)]
    kinds = ('adaptive', 'early stop', 'oracle')
    return found + [Arm(kind, cost, num_drafts, kind) for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cost', type=Path, required=True, help='a table of step costs')
    parser.add_argument('--trace', type=Path, help='recorded blocks; without it --model-rate')
    parser.add_argument('--record', metavar='MODEL', help='write both files from runs of this model, and stop')
    parser.add_argument('--method', default='dspark')
    parser.add_argument('--model-rate', nargs=2, type=float, default=(0.9, 0.97), metavar=('RATE', 'DECAY'))
    parser.add_argument('--num-drafts', type=int, default=7, help='with --model-rate')
    parser.add_argument('--bias', type=float, default=0.0, help='a head that is off by so much in its logits')
    parser.add_argument('--concurrency', nargs='+', type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument(
        '--rate', nargs='*', type=float, default=[], help='requests per second, in place of concurrency'
    )
    parser.add_argument('--requests', type=int, default=0, help='0: eight for each one running, 64 at least')
    parser.add_argument('--tokens', type=int, default=128, help='with --record')
    parser.add_argument('--batch', type=int, default=16, help='with --record')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    if args.record:
        record(args.record, args.method, args.cost, args.trace or Path('trace.json'), args.batch, args.tokens)
        return
    cost = StepCost.load(args.cost)
    acceptance = Trace.load(args.trace) if args.trace else Model(*args.model_rate, args.num_drafts, args.bias)
    loads: list[tuple[int, float | None]] = [(max(args.concurrency), rate) for rate in args.rate]
    rows: list[dict[str, Any]] = []
    for concurrency, rate in loads or [(n, None) for n in args.concurrency]:
        num_requests = args.requests or max(64, 8 * concurrency)
        found = {
            arm.name: simulate(arm, acceptance, num_requests, args.seed, concurrency, rate)
            for arm in arms(cost, acceptance.num_drafts)
        }
        plain = found['plain']
        if found['oracle'].tokens / found['oracle'].seconds < plain.tokens / plain.seconds:
            found['oracle'] = plain  # it knows that, too
        for name, outcome in found.items():
            row = {
                'concurrency': concurrency,
                'rate': rate,
                'arm': name,
                'tokens_per_s': round(outcome.tokens / outcome.seconds, 1),
                'to_plain': round(outcome.tokens / outcome.seconds / (plain.tokens / plain.seconds), 3),
                'ms_per_token': round(statistics.median(outcome.waits), 2) if outcome.waits else None,
                'rows_per_token': round((outcome.tokens - outcome.accepted + outcome.verified) / outcome.tokens, 2),
            }
            rows.append(row)
            print(' '.join(f'{key}={value}' for key, value in row.items() if value is not None), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({'arguments': {k: str(v) for k, v in vars(args).items()}, 'rows': rows}, indent=1)
        )


if __name__ == '__main__':
    main()
