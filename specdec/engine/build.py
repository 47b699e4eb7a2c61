"""The composition root: from names and settings to a running engine. The only place that picks classes.

Order matters: configs are read and checked against each other before anything is loaded, weights are loaded before
memory is shared out, and session_len is settled last, by what the pages hold. Next: engine.py.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from specdec.agent.caches import Caches, MemoryPlan, plan_memory
from specdec.agent.graph_runner import GraphRunner
from specdec.agent.model_agent import ModelAgent
from specdec.agent.state import SlotState
from specdec.agent.step_cost import measure_costs
from specdec.agent.step_model import StepModel
from specdec.engine.distributed import RankArguments, Ranks, join_group
from specdec.engine.engine import Engine
from specdec.engine.grammar import GrammarGuides
from specdec.errors import ConfigError
from specdec.layers.cache_specs import CacheRoom, CacheSpec
from specdec.layers.parallel import SINGLE, ParallelGroup
from specdec.messages import EngineInfo, PytorchEngineConfig, SpeculativeConfig
from specdec.models.checkpoint import (
    bundled_tensors,
    draft_tensors,
    read_draft,
    read_generation_defaults,
    read_target,
    target_tensors,
)
from specdec.models.configs import DraftConfig, Qwen3Config, TargetConfig
from specdec.models.deepseek_v4.config import BundledDraft, DeepseekV4Config
from specdec.models.deepseek_v4.draft import BundledDspark
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.hub import DEMO, demo_folder, find_target, resolve_model
from specdec.models.module_map import TARGETS
from specdec.models.target import TargetModel
from specdec.models.tensor_table import ignored_draft, ignored_target
from specdec.models.weights import WeightLoader
from specdec.scheduler.scheduler import Scheduler, SchedulerConfig
from specdec.spec_decode.draft_budget import AdaptiveBudget
from specdec.spec_decode.proposers import PROPOSERS
from specdec.spec_decode.proposers.base import Proposer
from specdec.spec_decode.proposers.bundled import BundledProposer
from specdec.spec_decode.proposers.null import NullProposer
from specdec.spec_decode.verify_length import ADMITTED, EVERY_DRAFT, LengthRule, threshold_rule

logger = logging.getLogger('specdec')

LoadProgress = Callable[[str, int, int], None]  # (what is loaded, bytes done, bytes in all)


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What an unset engine setting means on a device."""

    max_batch_size: int
    max_prefill_tokens: int
    overlap: int


DEFAULTS = {'cpu': DeviceDefaults(16, 512, 0), 'cuda': DeviceDefaults(256, 8192, 1)}
CPU_CACHE_SHARE = 0.25  # of available memory, in place of cache_max_entry_count's default
DEFAULT_CACHE_SHARE = PytorchEngineConfig().cache_max_entry_count
DEFAULT_PAGE_SIZE = PytorchEngineConfig().block_size


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the models come from and what their configs say, checked against each other. `num_drafts` is K."""

    name: str
    target_folder: Path
    target: TargetConfig
    draft_folder: Path | None
    draft: DraftConfig | BundledDraft | None
    num_drafts: int
    eos_ids: tuple[int, ...] = ()
    draft_sampling: str = 'greedy'
    verify_length: str = 'fixed'
    confidence_threshold: float | None = None

    @property
    def block_rows(self) -> int:
        return 0 if self.draft is None else self.draft.block_rows


def build_engine(
    model_path: str,
    config: PytorchEngineConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    progress: LoadProgress | None = None,
) -> Engine:
    """Load target and draft and share out the memory. ConfigError or CheckpointError before anything runs."""
    config = config or PytorchEngineConfig()
    sources = read_sources(model_path, config, speculative)
    device = pick_device(config.device_type)
    if config.tp == 1:
        return build_on(sources, config, device, progress=progress)
    ranks = Ranks(model_path, config, speculative)
    try:
        ranks.meet()
        group = join_group(0, config, ranks.port, device)
        return build_on(sources, config, device, group, ranks, ranks.meet, progress)
    except BaseException:
        ranks.close()
        raise


def build_rank(arguments: RankArguments, meet: Callable[[], None]) -> Engine:
    """The same on another rank, whose engine runs plans and never makes any."""
    config = arguments.config
    sources = read_sources(arguments.model_path, config, arguments.speculative)
    device = pick_device(config.device_type, arguments.rank)
    group = join_group(arguments.rank, config, arguments.port, device)
    return build_on(sources, config, device, group, None, meet)


def build_on(
    sources: Sources,
    config: PytorchEngineConfig,
    device: torch.device,
    group: ParallelGroup = SINGLE,
    ranks: Ranks | None = None,
    meet: Callable[[], None] = lambda: None,
    progress: LoadProgress | None = None,
) -> Engine:
    """One rank's models, memory and engine. `ranks`: the others, if this one leads them; `meet`: waits for all."""
    if group.size > 1 and device.type == 'cpu':
        torch.set_num_threads(max(torch.get_num_threads() // group.size, 1))
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # where kernels are launched
    session_limit = session_len_limit(config, sources.target)
    target, proposer = load_models(sources, config, session_limit, device, progress, group, meet)
    specs = cache_specs(target, proposer)
    num_slots = (config.max_batch_size or DEFAULTS[device.type].max_batch_size) + 1
    state_bytes = num_slots * sum(spec.bytes_per_slot for spec in specs) + SlotState.bytes_for(
        num_slots, proposer.num_drafts, target.vocab_size, sources.draft_sampling == 'probabilistic'
    )
    page_size = settle_page_size(config, sources.target)
    memory = share_memory(config, specs, page_size, session_limit, state_bytes, device)
    memory = replace(memory, num_pages=group.smallest(memory.num_pages, device))
    session_len = settle_session_len(config, session_limit, memory)
    logger.info('cache: %s; session_len %d', memory.describe(), session_len)
    return assemble(sources, config, target, proposer, memory, session_len, device, progress, ranks)


def assemble(
    sources: Sources,
    config: PytorchEngineConfig,
    target: TargetModel,
    proposer: Proposer,
    memory: MemoryPlan,
    session_len: int,
    device: torch.device,
    progress: LoadProgress | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """Caches, slots, scheduler and agent around loaded models."""
    defaults, num_drafts = DEFAULTS[device.type], proposer.num_drafts
    max_batch_size = config.max_batch_size or defaults.max_batch_size
    settings = SchedulerConfig(
        max_batch_size=max_batch_size,
        max_prefill_tokens=config.max_prefill_token_num or defaults.max_prefill_tokens,
        session_len=session_len,
        num_drafts=num_drafts,
        num_pages=memory.num_pages,
        page_size=memory.page_size,
        prefix_caching=config.enable_prefix_caching and prefixes_are_of_use(target, proposer, memory),
        num_states=memory.num_states,
        overlap=defaults.overlap,
    )
    table_width = -(-(session_len + 2 * (num_drafts + 1)) // memory.page_size)
    state = SlotState(
        max_batch_size + 1,
        num_drafts,
        table_width,
        target.vocab_size,
        device,
        padded=device.type == 'cuda',
        probabilistic=sources.draft_sampling == 'probabilistic',
        lengths=pick_length_rule(sources),
    )
    room = CacheRoom(memory.num_pages, memory.page_size, max_batch_size + 1, memory.num_states)
    caches = Caches.allocate(target.cache_spec(num_drafts), proposer.cache_spec(), room, device)
    info = EngineInfo(
        model_name=sources.name,
        folder=str(sources.target_folder),
        vocab_size=target.vocab_size,
        session_len=session_len,
        max_batch_size=max_batch_size,
        num_drafts=num_drafts,
        eos_ids=sources.eos_ids,
        device=device.type,
        dtype=str(target.cache_spec().dtype).removeprefix('torch.'),
        draft_sampling=sources.draft_sampling,
        verify_length=sources.verify_length,
    )
    processed_logprobs = config.logprobs_mode == 'processed_logprobs'
    model = StepModel(target, proposer, caches, state, memory.page_size, processed_logprobs)
    graphs = None
    if device.type == 'cuda' and not config.eager_mode:
        graphs = GraphRunner(model, max_batch_size, config.cudagraph_capture_batch_sizes)
        graphs.capture(progress and (lambda done, total: progress('graphs', done, total)))
    guides = GrammarGuides(target.vocab_size)
    cost = lengths = None
    if model.reports_survival:
        cost = measure_costs(model, graphs, max_batch_size)
        lengths = AdaptiveBudget(cost, num_drafts, delay=1 - defaults.overlap)
    agent = ModelAgent(model, guides.make, graphs, cost, () if ranks is None else (ranks.tell,))
    return Engine(info, memory, Scheduler(settings, lengths), agent, guides, ranks)


def pick_length_rule(sources: Sources) -> LengthRule:
    """How the device chooses verify lengths."""
    if sources.verify_length == 'threshold':
        assert sources.confidence_threshold is not None, 'checked with the config'
        return threshold_rule(sources.confidence_threshold)
    return ADMITTED if sources.verify_length == 'adaptive' else EVERY_DRAFT


# ------------------------------------------------------------------------------------------------------ sources
def read_sources(model_path: str, config: PytorchEngineConfig, speculative: SpeculativeConfig | None) -> Sources:
    """Find both checkpoints and read their configs; the checkpoint decides which method it is for."""
    is_demo = model_path == DEMO and not Path(DEMO).is_dir()
    target_folder = find_target(model_path, config.revision, config.download_dir)
    target = read_target(target_folder)
    eos_ids = read_generation_defaults(target_folder).eos_ids
    if speculative is None:
        check_ranks(config, target, None)
        return Sources(model_path, target_folder, target, None, None, 0, eos_ids)
    draft: DraftConfig | BundledDraft
    if speculative.model:
        draft_folder = resolve_model(speculative.model, None, config.download_dir)
        draft = read_external_draft(draft_folder, target)
    elif is_demo:
        draft_folder = demo_folder(speculative.method)
        draft = read_draft(draft_folder, target)
    else:
        draft_folder, draft = target_folder, bundled_draft(target_folder, target)
    if draft.kind != speculative.method:
        raise ConfigError('method', speculative.method, f"{draft_folder} is a {draft.kind} draft; use '{draft.kind}'")
    check_ranks(config, target, draft)
    num_drafts = settle_num_drafts(speculative, draft)
    if speculative.verify_length == 'threshold' and not draft.has_confidence:
        remedy = "this draft has no confidence head; use 'fixed' or 'adaptive'"
        raise ConfigError('verify_length', speculative.verify_length, remedy)
    return Sources(
        model_path,
        target_folder,
        target,
        draft_folder,
        draft,
        num_drafts,
        eos_ids,
        speculative.draft_sampling,
        speculative.verify_length,
        speculative.confidence_threshold,
    )


def check_ranks(config: PytorchEngineConfig, target: TargetConfig, draft: DraftConfig | BundledDraft | None) -> None:
    """Whether `tp` ranks can share the models: whole heads, equal parts of the MLPs."""
    if config.tp == 1:
        return
    if not isinstance(target, Qwen3Config):
        raise ConfigError('tp', config.tp, f'{target.architecture} is served on one rank so far; use 1')
    decoders = [('target', target.decoder)] + ([('draft', draft.decoder)] if isinstance(draft, DraftConfig) else [])
    for name, decoder in decoders:
        keys = decoder.num_kv_heads
        sizes = {
            'num_attention_heads': decoder.num_heads,
            'num_key_value_heads': keys if keys >= config.tp else config.tp * (config.tp % keys == 0),
            'intermediate_size': decoder.intermediate_size,
        }
        if name == 'target' and target.moe is not None:
            sizes['moe_intermediate_size'] = target.moe.intermediate_size
        for size_name, size in sizes.items():
            if not size or size % config.tp:
                remedy = f"does not divide the {name}'s {size_name}; use a smaller power of 2"
                raise ConfigError('tp', config.tp, remedy)


def read_external_draft(folder: Path, target: TargetConfig) -> DraftConfig:
    """A draft with a checkpoint of its own."""
    if isinstance(target, DeepseekV4Config):
        remedy = 'drafts of their own are not served for DeepSeek-V4; leave it empty to use the bundled heads'
        raise ConfigError('model', str(folder), remedy)
    return read_draft(folder, target)


def bundled_draft(folder: Path, target: TargetConfig) -> BundledDraft:
    """The draft that a target's checkpoint brings along, or why it has none."""
    if isinstance(target, DeepseekV4Config):
        if target.draft is not None:
            return target.draft
        if target.classic_mtp:
            remedy = (
                f'mtp.* of {folder} is a classic MTP layer, which is not served; use a checkpoint with DSpark heads'
            )
            raise ConfigError('model', '', remedy)
        raise ConfigError('model', '', f'{folder} has no DSpark heads (mtp.*); use a checkpoint that has them')
    raise ConfigError('model', '', f'{folder} has no bundled drafts; name a draft checkpoint in SpeculativeConfig')


def settle_num_drafts(speculative: SpeculativeConfig, draft: DraftConfig | BundledDraft) -> int:
    """K: as asked, else as the checkpoint says; at most the draft's g."""
    wanted = speculative.requested_tokens
    if wanted is None:
        return draft.default_tokens
    if wanted > draft.num_proposals:
        field = 'num_speculative_tokens' if speculative.dflash_block_size is None else 'dflash_block_size'
        limit = draft.num_proposals + (field == 'dflash_block_size')
        value = speculative.num_speculative_tokens if limit == draft.num_proposals else speculative.dflash_block_size
        raise ConfigError(field, value, f'this draft was trained for at most {limit}')
    return wanted


# ------------------------------------------------------------------------------------------------------- models
def pick_device(wanted: str, rank: int = 0) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == 'cuda' and not available:
        raise ConfigError('device_type', wanted, "no CUDA device is visible; use 'cpu' or 'auto'")
    if not available or wanted == 'cpu':
        return torch.device('cpu')
    if rank >= torch.cuda.device_count():
        raise ConfigError('tp', rank + 1, f'{torch.cuda.device_count()} CUDA devices are visible; lower it')
    return torch.device('cuda', rank)


def pick_dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    """'auto': the checkpoint's on CUDA, float32 on CPU."""
    name = wanted if wanted != 'auto' else stored if device.type == 'cuda' else 'float32'
    return {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[name]


def load_models(
    sources: Sources,
    config: PytorchEngineConfig,
    session_limit: int,
    device: torch.device,
    progress: LoadProgress | None,
    group: ParallelGroup = SINGLE,
    meet: Callable[[], None] = lambda: None,
) -> tuple[TargetModel, Proposer]:
    """Both models in device memory, every weight accounted for. `meet`: ranks do not wait for each other's reading."""
    dtype = pick_dtype(config.dtype, sources.target.dtype, device)
    margin = max(2 * (sources.num_drafts + 1), sources.block_rows)
    positions = session_limit + margin
    taps = () if sources.draft is None else sources.draft.taps
    target = TARGETS[sources.target.architecture](sources.target, taps, positions, group, dtype, device)
    loader = WeightLoader(target.weights(), ignored_target(sources.target), str(sources.target_folder))
    loader.load(
        target_tensors(
            sources.target_folder, sources.target, _named(progress, 'target'), loader.destinations, loader.part
        )
    )
    loader.finish()
    meet()
    if sources.draft is None or sources.draft_folder is None:
        return target, NullProposer()
    draft_dtype = torch.bfloat16 if dtype == torch.float16 else dtype  # fused taps overflow fp16
    if isinstance(sources.draft, BundledDraft):
        return target, _load_bundled(sources, target, draft_dtype, device, progress)
    draft = BlockDraft(sources.draft, target.embedding, target.head, positions, group, draft_dtype, device)
    loader = WeightLoader(draft.weights(), ignored_draft(sources.draft), str(sources.draft_folder))
    loader.load(draft_tensors(sources.draft_folder, _named(progress, 'draft')))
    loader.finish()
    return target, PROPOSERS[sources.draft.kind](draft, sources.num_drafts)


def _load_bundled(
    sources: Sources,
    target: TargetModel,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None,
) -> Proposer:
    assert isinstance(sources.target, DeepseekV4Config), 'only DeepSeek-V4 bundles drafts'
    draft = BundledDspark(sources.target, target.embedding, target.head, dtype, device)
    loader = WeightLoader(draft.weights(), (), str(sources.target_folder))
    loader.load(bundled_tensors(sources.target_folder, _named(progress, 'draft'), loader.destinations))
    loader.finish()
    return BundledProposer(draft, sources.num_drafts)


def _named(progress: LoadProgress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


# ------------------------------------------------------------------------------------------------------- memory
def session_len_limit(config: PytorchEngineConfig, target: TargetConfig) -> int:
    """The longest session the model allows, or the shorter one that was asked for."""
    limit = target.max_position
    if config.session_len is None:
        return limit
    if config.session_len > limit:
        raise ConfigError('session_len', config.session_len, f'the model was made for at most {limit} positions')
    return config.session_len


def prefixes_are_of_use(target: TargetModel, proposer: Proposer, memory: MemoryPlan) -> bool:
    """Not where pages are only part of a request's past, and there was no memory for copies of the other part."""
    return memory.num_states > 0 or not any(spec.bytes_per_state for spec in cache_specs(target, proposer))


def settle_num_states(config: PytorchEngineConfig, specs: tuple[CacheSpec, ...]) -> int | None:
    """Copies of what requests keep by slot, for prefixes: as asked, None for a share of the memory, 0 for none."""
    budget = config.prefix_cache_state_budget
    if budget and not any(spec.bytes_per_state for spec in specs):
        raise ConfigError('prefix_cache_state_budget', budget, 'this model keeps nothing by slot; leave it at 0')
    if not config.enable_prefix_caching:
        return 0
    return budget or None


def settle_page_size(config: PytorchEngineConfig, target: TargetConfig) -> int:
    """Tokens per page: as asked, unless nothing was asked and the model has a size of its own."""
    if config.block_size == DEFAULT_PAGE_SIZE:
        return target.page_size
    if config.block_size % target.page_multiple:
        raise ConfigError('block_size', config.block_size, f'this model needs a multiple of {target.page_multiple}')
    return config.block_size


def cache_specs(target: TargetModel, proposer: Proposer) -> tuple[CacheSpec, ...]:
    """What both models keep."""
    own, draft = target.cache_spec(proposer.num_drafts), proposer.cache_spec()
    return (own,) if draft is None else (own, draft)


def share_memory(
    config: PytorchEngineConfig,
    specs: tuple[CacheSpec, ...],
    page_size: int,
    session_limit: int,
    state_bytes: int,
    device: torch.device,
) -> MemoryPlan:
    """Pages from a share of what is free now that the weights are loaded; on CPU no more than the batch can fill."""
    share, wanted, num_states = config.cache_max_entry_count, 0, settle_num_states(config, specs)
    max_batch_size = config.max_batch_size or DEFAULTS[device.type].max_batch_size
    if device.type == 'cuda':
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
        share = (CPU_CACHE_SHARE if share == DEFAULT_CACHE_SHARE else share) / config.tp  # of the same memory
        wanted = max_batch_size * session_limit
    pages = config.num_gpu_blocks
    return plan_memory(specs, page_size, free, share, wanted, pages, state_bytes, num_states, max_batch_size)


def settle_session_len(config: PytorchEngineConfig, limit: int, memory: MemoryPlan) -> int:
    """The smaller of the model's limit and what all pages hold; an explicit one must fit."""
    if config.session_len is not None and config.session_len > memory.token_capacity:
        raise ConfigError(
            'session_len',
            config.session_len,
            f'the cache holds {memory.token_capacity} tokens; lower it, or give the cache more memory',
        )
    return min(limit, memory.token_capacity)
