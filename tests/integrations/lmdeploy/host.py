"""LMDeploy pipelines for tests: target and draft by name, requests in as ids, outcomes out; and what was drafted.

Targets and drafts are those of tests/helpers/engines.py, and the packaged demo models ('demo'). Plain decoding's
outcomes are kept, since every test compares with them.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdeploy
from lmdeploy import GenerationConfig, PytorchEngineConfig
from lmdeploy.pytorch.engine import engine_loop
from tokenizers import Tokenizer, models, pre_tokenizers

from specdec.demo.prompts import held_out_prompts
from specdec.engine.build import demo_folder
from specdec.integrations.lmdeploy import SpeculativeConfig
from specdec.integrations.lmdeploy.proposer import HostProposer
from tests.helpers.engines import VOCABULARY, World

END = VOCABULARY - 2  # the tiny targets' end of sequence


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt ids and GenerationConfig's fields, greedy unless they say otherwise."""

    prompt: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self) -> GenerationConfig:
        return GenerationConfig(**{'max_new_tokens': 32, 'do_sample': False, **dict(self.settings)})


def ask(prompt: Sequence[int], **settings: Any) -> Ask:
    return Ask(tuple(prompt), tuple(settings.items()))


@dataclass(slots=True)
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    text: str = ''
    logprobs: list[dict[int, float]] = field(default_factory=list)


class Served:
    """A running pipeline. `drafted`: (length, anchor, drafts) of every proposal, once it is watched; `accepted`: how
    many drafts of each request's decode steps were, by LMDeploy's own count.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.accepted: list[int] = []
        self._make_metrics = engine_loop.RequestMetrics
        engine_loop.RequestMetrics = self._metrics
        self.drafted: list[tuple[int, int, tuple[int, ...]]] = []

    def _metrics(self, *args: Any, spec_info: dict[str, int] | None = None, **kwargs: Any) -> Any:
        if spec_info is not None:
            self.accepted.append(spec_info['num_accepted_tokens'])
        return self._make_metrics(*args, spec_info=spec_info, **kwargs)

    @property
    def mean_accepted_length(self) -> float:
        return 1 + sum(self.accepted) / len(self.accepted)

    def run(self, asks: Sequence[Ask]) -> list[Outcome]:
        """All requests at once."""

        async def gather() -> list[Outcome]:
            return await asyncio.gather(*(self._one(a) for a in asks))

        return self.pipe._run(coro=gather()).result()

    async def _one(self, asked: Ask) -> Outcome:
        engine, outcome = self.pipe.async_engine, Outcome()
        session = self.pipe.session_mgr.get()
        request = await engine.preprocess(None, session, asked.config(), input_ids=list(asked.prompt))
        async for out in engine.generate(request):
            outcome.token_ids += out.token_ids or []
            outcome.logprobs += out.logprobs or []
            outcome.text += out.response or ''
            outcome.finish = out.finish_reason or outcome.finish
        return outcome

    @property
    def model_agent(self) -> Any:
        return self.pipe.async_engine.engine.executor.model_agent

    @property
    def proposer(self) -> HostProposer:
        return self.model_agent.spec_agent.proposer

    def watch(self) -> 'Served':
        """Keep what is drafted."""
        proposer, draft = self.proposer, self.proposer.draft

        def watched(inputs: Any, extra: Any, cache_engine: Any) -> Any:
            drafts = draft(inputs, extra, cache_engine)
            if not inputs.is_chunk or inputs.is_last_chunk:
                lengths = inputs.history_lengths + inputs.seq_length
                if extra.num_rejected_tokens is not None:
                    lengths = lengths - extra.num_rejected_tokens
                rows = zip(lengths.tolist(), extra.next_token_ids.tolist(), drafts.tolist())
                self.drafted += [(length, anchor, tuple(ids)) for length, anchor, ids in rows]
            return drafts

        proposer.draft = watched
        return self

    def __enter__(self) -> 'Served':
        return self

    def __exit__(self, *_: Any) -> None:
        engine_loop.RequestMetrics = self._make_metrics
        self.pipe.close()


class Host:
    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self._plain: dict[Any, list[Outcome]] = {}

    def close(self) -> None:
        self._plain.clear()

    def target_folder(self, target: str) -> Path:
        if target == 'demo':
            return demo_folder('target')
        folder = self.world.target_folder(target)
        return folder if (folder / 'tokenizer.json').exists() else _write_tokenizer(folder)

    def draft_folder(self, target: str, draft: str) -> Path:
        return demo_folder(draft) if target == 'demo' else self.world.draft_folder(draft, target)

    def serve(
        self, target: str, draft: str | None = None, tokens: int | None = None, stock: Sequence[str] = (), **engine: Any
    ) -> Served:
        """`draft`: its name begins with its method."""
        speculative = None
        if draft is not None:
            folder = self.draft_folder(target, draft)
            speculative = SpeculativeConfig(draft.split('_')[0], str(folder), tokens, stock=tuple(stock))
        return self.pipeline(target, speculative, **engine)

    def pipeline(self, target: str, speculative: Any, **engine: Any) -> Served:
        """`engine`: PytorchEngineConfig's fields."""
        settings = {
            'session_len': 256, 'max_batch_size': 4, 'block_size': 16, 'num_gpu_blocks': 96,
            'max_prefill_token_num': 512, 'eager_mode': True, **engine,
        }  # fmt: skip
        return Served(
            lmdeploy.pipeline(
                str(self.target_folder(target)),
                backend_config=PytorchEngineConfig(**settings),
                speculative_config=speculative,
                log_level='WARNING',
            )
        )

    def plain(self, target: str, asks: Sequence[Ask], **engine: Any) -> list[Outcome]:
        """LMDeploy without speculation."""
        key = target, repr(asks), tuple(sorted(engine.items()))
        if key not in self._plain:
            with self.serve(target, **engine) as served:
                self._plain[key] = served.run(asks)
        return self._plain[key]

    def demo_prompts(self, count: int, length: int = 100) -> list[list[int]]:
        """The first ids of held-out code of the demo."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(demo_folder('target'))
        return [tokenizer(prompt.text)['input_ids'][:length] for prompt in held_out_prompts()[:count]]


def _write_tokenizer(folder: Path) -> Path:
    """A word for every id of the tiny targets; LMDeploy does not start without a tokenizer."""
    words = {f'w{i}': i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token='w0'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / 'tokenizer.json'))
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': f'w{END}'}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    return folder
