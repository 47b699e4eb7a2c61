"""Whole engines on tiny random checkpoints, loaded from folders as a user's would be, and a driver that counts.

The target is mostly a table of what follows a token, with some context mixed in; a DSpark draft whose Markov head holds
the same table is then accepted often without any training. Next: proposers.py, drafts made for tests.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.agent.caches import plan_memory
from specdec.agent.model_agent import Launched
from specdec.engine.build import Sources, assemble, cache_specs, load_models, read_sources
from specdec.engine.engine import Engine
from specdec.messages import EngineRequest, PytorchEngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from specdec.models.checkpoint import read_target
from specdec.models.config_reader import ConfigReader
from specdec.models.draft_dialects import normalise
from specdec.models.target import TargetModel
from specdec.models.tensor_table import TensorInfo, draft_tensor_shapes, target_tensor_shapes
from specdec.plan import StepPlan
from specdec.spec_decode.proposers.base import DraftStep, Proposal, Proposer
from specdec.spec_decode.proposers.null import NullProposer
from tests.helpers import checkpoints as tiny

CPU = torch.device('cpu')
VOCABULARY = tiny.VOCABULARY
POSITIONS = 512  # the longest session that the test models allow
PAGE = 4
SHARPNESS = 3.0  # about the standard deviation of the target's logits
MLP_SHARE, ATTENTION_SHARE = 0.2, 0.4  # what a sublayer adds to the residual stream, relative to an embedding
FOCUS = 3.0  # sharpens attention, so that text depends on its context and does not just run in a circle
_FACTORS = {'down_proj.weight': MLP_SHARE, 'o_proj.weight': ATTENTION_SHARE, 'q_norm.weight': FOCUS}
MAX_STEPS = 20_000


# ------------------------------------------------------------------------------------------------- checkpoints
def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> tiny.Tensors:
    """Norm weights near 1, embeddings of size 1, every other matrix scaled to keep the size of its input."""
    generator = torch.Generator().manual_seed(seed)
    found: tiny.Tensors = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if 'norm' in name:
            found[name] = 1 + 0.1 * noise
        elif 'embed_tokens' in name or len(shape) == 1:
            found[name] = noise
        else:
            found[name] = noise / shape[-1] ** 0.5
        for ending, factor in _FACTORS.items():
            if name.endswith(ending):
                found[name] *= factor
    return found


def write_target(folder: Path, seed: int = 1, **changes: Any) -> Path:
    config = tiny.target_config(**{'max_position_embeddings': POSITIONS, **changes})
    weights = random_tensors(target_tensor_shapes(read_target(tiny.write(folder, config))), seed)
    if 'lm_head.weight' in weights:
        weights['lm_head.weight'] *= SHARPNESS
    return tiny.write(folder, config, weights)


MOE = {
    'architectures': ['Qwen3MoeForCausalLM'],
    'model_type': 'qwen3_moe',
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 12,
    'norm_topk_prob': True,
    'layer_types': None,
}
_SLIDING = {'layer_types': ['sliding_attention', 'full_attention'], 'sliding_window': 7, 'use_sliding_window': True}
_RANK = {'markov_rank': tiny.HIDDEN}
DRAFTS: dict[str, tiny.Config] = {
    'dflash_fill_in': tiny.zlab_config(),
    'dflash_sliding': tiny.zlab_config(**_SLIDING),
    'dflash_sliding_noncausal': tiny.zlab_config({'is_causal': False}, **_SLIDING),
    'dflash_anchor_first': tiny.deepspec_config(
        markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False
    ),
    'dspark_confidence_only': tiny.specforge_config({'markov_rank': 0, 'confidence_head_with_markov': False}),
    'dspark_vanilla': tiny.deepspec_config(**_RANK),
    'dspark_gated': tiny.deepspec_config(markov_head_type='gated', **_RANK),
    'dspark_rnn': tiny.deepspec_config(markov_head_type='rnn', **_RANK),
    'dspark_fill_in': tiny.speculators_dspark_config(**_RANK),
    'dspark_fill_in_rnn': tiny.speculators_dspark_config(markov_head_type='rnn', **_RANK),
    'dspark_fill_in_d2t': tiny.speculators_dspark_config(draft_vocab_size=tiny.REDUCED, **_RANK),
    'dspark_sliding': tiny.speculators_dspark_config(layers=_SLIDING, **_RANK),
}


def write_draft(folder: Path, name: str, target: Path, seed: int = 2) -> Path:
    """A draft of DRAFTS. DSpark's Markov head holds the target's own table, so that many of its drafts are right."""
    head_size = {'layers.0.self_attn.q_norm.weight': TensorInfo((tiny.HEAD_DIM,), 'F32')}
    config = normalise(ConfigReader(DRAFTS[name], name), lambda: head_size)
    weights = random_tensors(draft_tensor_shapes(config), seed)
    kept: Any = slice(None)
    if config.reduced_vocabulary:
        kept = 2 * torch.arange(tiny.REDUCED)  # draft id i is target id 2 i
        weights['d2t'] = kept // 2
        weights['t2d'] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True)
    if config.markov is not None:
        weights |= _table_heads(weights, config.markov.kind, target, kept)
    return tiny.write(folder, DRAFTS[name], weights)


def _table_heads(weights: tiny.Tensors, kind: str, target: Path, kept: Any) -> tiny.Tensors:
    """Markov weights that say what the target would without any context; a tanh bends the rnn's a little."""
    theirs = load_file(target / 'model.safetensors')
    embedding = theirs['model.embed_tokens.weight']
    scale = theirs['model.norm.weight'] + any('.linear_attn.' in name for name in theirs)  # hybrids store w of 1 + w
    normed = torch.nn.functional.rms_norm(embedding, embedding.shape[-1:], scale)
    table = theirs.get('lm_head.weight', embedding)
    found = {
        'norm.weight': weights['norm.weight'] * 0.2,  # base logits are noise here: keep them below the table's
        'markov_head.markov_w1.weight': normed / 4,
        'markov_head.markov_w2.weight': (4 * table[kept]).contiguous(),
    }
    if kind == 'gated':
        found['markov_head.gate_proj.bias'] = weights['markov_head.gate_proj.bias'] + 5
    if kind == 'rnn':
        rank = tiny.HIDDEN
        joint = weights['markov_head.joint_proj.weight'] * 0.2
        joint[2 * rank :, rank : 2 * rank] += torch.eye(rank)
        found['markov_head.joint_proj.weight'] = joint
        found['markov_head.joint_proj.bias'] = weights['markov_head.joint_proj.bias'] * 0.1
    return found


# ----------------------------------------------------------------------------------------------------- engines
@dataclass(frozen=True, slots=True, repr=False)
class Models:
    """A target and perhaps its draft, in memory, for any number of engines."""

    sources: Sources
    target: TargetModel
    proposer: Proposer

    def with_drafts(self, num_drafts: int) -> 'Models':
        """The same draft, K of its proposals used."""
        proposer = self.proposer
        return Models(self.sources, self.target, type(proposer)(proposer.draft, num_drafts))

    def with_proposer(self, proposer: Proposer) -> 'Models':
        """The same weights, with the taps that this proposer reads."""
        target: Any = copy.copy(self.target)
        target.taps = frozenset(proposer.taps)
        return Models(self.sources, target, proposer)

    def plain(self) -> 'Models':
        return self.with_proposer(NullProposer())


TARGETS: dict[str, tiny.Config] = {
    'dense': {},
    'sliding': {
        'use_sliding_window': True,
        'sliding_window': 9,
        'layer_types': ['sliding_attention', 'full_attention'] * (tiny.TARGET_LAYERS // 2),
    },
    'moe': MOE,
}


class World:
    """Every target and draft of the tests, written and loaded when somebody asks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models: dict[tuple[str, str | None], Models] = {}

    def target_folder(self, target: str = 'dense') -> Path:
        folder = self.root / target
        return folder if folder.exists() else write_target(folder, **TARGETS[target])

    def draft_folder(self, draft: str, target: str = 'dense') -> Path:
        folder = self.root / f'{target}-{draft}'
        return folder if folder.exists() else write_draft(folder, draft, self.target_folder(target))

    def models(self, draft: str | None = None, num_drafts: int | None = None, target: str = 'dense') -> Models:
        key = target, draft
        if key not in self._models:
            folder = None if draft is None else self.draft_folder(draft, target)
            self._models[key] = load(self.target_folder(target), folder, (draft or 'dflash').split('_')[0])
        models = self._models[key]
        return models if num_drafts is None else models.with_drafts(num_drafts)


def load(target: Path, draft: Path | None = None, method: str = 'dflash') -> Models:
    config = PytorchEngineConfig(device_type='cpu')
    speculative = None if draft is None else SpeculativeConfig(method, str(draft))
    sources = read_sources(str(target), config, speculative)
    loaded = load_models(sources, config, sources.target.max_position, CPU, None)
    return Models(sources, *loaded)


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine settings that tests vary. `chunk`: prompt tokens per step; `num_pages` 0: enough for everybody;
    `overlap` 1: a step is launched before the one before it is read, as on a GPU.
    """

    session_len: int = 128
    max_batch_size: int = 4
    chunk: int = 512
    page_size: int = PAGE
    num_pages: int = 0
    prefix_caching: bool = True
    overlap: int = 0


def make_engine(models: Models, settings: Settings = Settings()) -> Engine:
    config = PytorchEngineConfig(
        device_type='cpu',
        block_size=settings.page_size,
        max_batch_size=settings.max_batch_size,
        max_prefill_token_num=settings.chunk,
        enable_prefix_caching=settings.prefix_caching,
    )
    pages = settings.num_pages or settings.max_batch_size * -(-settings.session_len // settings.page_size)
    specs = cache_specs(models.target, models.proposer)
    memory = plan_memory(specs, settings.page_size, 2**30, 0.5, 0, pages)
    assert settings.session_len <= memory.token_capacity, 'one request must fit'
    engine = assemble(models.sources, config, models.target, models.proposer, memory, settings.session_len, CPU)
    engine.scheduler.config = replace(engine.scheduler.config, overlap=settings.overlap)
    return engine


# ------------------------------------------------------------------------------------------------------ driving
@dataclass(slots=True)
class Outcome:
    """What one request got. `steps`: (drafted, emitted) of each decode step; `firsts`: tokens of prompts' ends."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)
    firsts: int = 0
    cached: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def accepted(self) -> int:
        return sum(emitted - 1 for _, emitted in self.steps)

    @property
    def mean_accepted_length(self) -> float:
        return 1 + self.accepted / len(self.steps) if self.steps else 0.0


class Driver:
    """Steps an engine, files its outputs by request, and checks what must hold after every step.

    `proposals[request id][length]` are the tokens drafted behind `length` committed tokens; `plans` every plan.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[int, Outcome] = {}
        self.proposals: dict[int, dict[int, tuple[int, ...]]] = {}
        self.plans: list[StepPlan] = []
        agent = engine.agent
        self._watched = agent.model.proposer
        self._last: tuple[DraftStep, Proposal] | None = None
        self._launch = agent.launch
        agent.model.proposer = self
        agent.launch = self._watch

    # the proposer's side, passed through
    @property
    def taps(self) -> tuple[int, ...]:
        return self._watched.taps

    def absorb(self, step: DraftStep) -> None:
        self._watched.absorb(step)

    def propose(self, step: DraftStep) -> Proposal:
        proposal = self._watched.propose(step)
        self._last = step, proposal
        return proposal

    def _watch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        self._last = None
        requests = {s.slot: s.request.request_id for s in self.engine.scheduler.running}
        launched = self._launch(plan)
        drawing = [c.slot for c in plan.chunks if c.final] + list(plan.decodes)
        if self._last is not None:
            step, proposal = self._last
            proposals = zip(step.lengths.tolist(), proposal.tokens.tolist())  # padding proposes for nobody, at the end
            for slot, (length, tokens) in zip(drawing, proposals):
                self.proposals.setdefault(requests[slot], {})[length] = tuple(tokens)
        return launched

    # the caller's side
    def add(self, request: EngineRequest) -> None:
        self.engine.add(request)
        self.outcomes[request.request_id] = Outcome(request)

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        for output in outputs:
            self._file(output)
        self.check_pages()
        return outputs

    def _file(self, output: RequestOutput) -> None:
        outcome = self.outcomes[output.request_id]
        count, params = len(output.token_ids), outcome.request.params
        assert outcome.finish is None, 'an output after the end'
        assert count >= 1, 'an output without tokens'
        cap = self._watched.num_drafts if params.max_drafts is None else params.max_drafts
        if output.decode:
            assert count <= output.drafted + 1 <= min(cap, self._watched.num_drafts) + 1
            outcome.steps.append((output.drafted, count))
        else:
            assert count == 1
            assert output.drafted == 0
            outcome.firsts += 1
            outcome.cached.append(output.cached_tokens)
        outcome.token_ids += output.token_ids
        outcome.finish = output.finish_reason
        if params.logprobs is not None:
            assert output.logprobs is not None
            assert len(output.logprobs) == count
            outcome.logprobs += output.logprobs
        else:
            assert output.logprobs is None, 'log-probabilities that nobody asked for'

    def check_pages(self) -> None:
        """Shared pages hold committed tokens only, and rows are never written into a page that others may read."""
        scheduler = self.engine.scheduler
        scheduler.pages.check()
        size = scheduler.config.page_size
        holders: dict[int, int] = {}
        for sequence in scheduler.running:
            assert 0 not in sequence.pages
            assert len(set(sequence.pages)) == len(sequence.pages)
            for page in sequence.pages:
                holders[page] = holders.get(page, 0) + 1
        for sequence in scheduler.running:
            for page in sequence.pages[sequence.length // size :]:
                assert holders[page] == 1, 'a page that is still written to is shared'
                assert page not in scheduler.pages._keys, 'a page that is still written to can be found'

    def run(self, until: Callable[[], bool] | None = None) -> dict[int, Outcome]:
        """Step until there is nothing to do (or `until`), then check that nothing was left behind."""
        for _ in range(MAX_STEPS):
            if until is not None and until():
                return self.outcomes
            if not self.engine.has_work():
                self.engine.scheduler.check()
                return self.outcomes
            self.step()
        raise AssertionError('the engine does not come to an end')


def drive(engine: Engine | Driver) -> Driver:
    """The engine's driver, the same one every time."""
    if isinstance(engine, Driver):
        return engine
    known = engine.agent.model.proposer
    return known if isinstance(known, Driver) else Driver(engine)


def generate(
    engine: Engine | Driver, requests: Sequence[EngineRequest], arrivals: Sequence[int] | None = None
) -> list[Outcome]:
    """Run requests to their end, request i added before step arrivals[i] (all at once by default)."""
    driver = drive(engine)
    due = sorted(zip(arrivals or [0] * len(requests), range(len(requests))))
    step = 0
    while due or driver.engine.has_work():
        assert step < MAX_STEPS, 'the engine does not come to an end'
        while due and due[0][0] <= step:
            driver.add(requests[due.pop(0)[1]])
        driver.step()
        step += 1
    driver.engine.scheduler.check()
    return [driver.outcomes[r.request_id] for r in requests]


_LAST_ID = [0]


def request(prompt: Sequence[int], max_new_tokens: int = 24, **params: Any) -> EngineRequest:
    """A request with a fresh id."""
    _LAST_ID[0] += 1
    return EngineRequest(_LAST_ID[0], tuple(prompt), SamplingParams(max_new_tokens=max_new_tokens, **params))


def prompt_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, VOCABULARY - 2, (length,), generator=generator).tolist())


def draft_pages(engine: Engine, pages: Sequence[int], tokens: int) -> Tensor:
    """The draft's keys and values of the first `tokens` positions in these pages [layers, 2, tokens, heads, hd]."""
    cache = engine.agent.model.caches.draft
    index = torch.tensor(pages)
    return torch.stack([torch.stack([x[index].flatten(0, 1)[:tokens] for x in pair]) for pair in zip(cache.k, cache.v)])
