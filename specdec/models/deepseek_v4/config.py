"""What a DeepSeek-V4 checkpoint says, in the keys of the release or in those of transformers. Next: tensors.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from specdec.errors import CheckpointError
from specdec.layers.rotary import RopeConfig
from specdec.models.config_reader import ConfigReader, read_dtype
from specdec.models.deepseek_v4.tensors import PACKED, release_name
from specdec.models.tensor_table import TensorInfo

ARCHITECTURE = 'DeepseekV4ForCausalLM'
RATIOS = {'sliding_attention': 0, 'compressed_sparse_attention': 4, 'heavily_compressed_attention': 128}
# Keys with one value that is served; absent counts as that value.
FIXED = {
    'hidden_act': 'silu',
    'scoring_func': 'sqrtsoftplus',
    'topk_method': 'noaux_tc',
    'norm_topk_prob': True,
    'n_shared_experts': 1,
    'num_key_value_heads': 1,
    'attention_bias': False,
    'mlp_bias': False,
    'tie_word_embeddings': False,
    'vision_n_layers': 0,
}
QUANTISATION = {'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [128, 128]}


@dataclass(frozen=True, slots=True)
class BundledDraft:
    """DSpark heads in `mtp.*`. `taps`: target layers, 0-based, ascending. `block_rows`: g, every row proposes."""

    kind: ClassVar[str] = 'dspark'

    num_stages: int
    taps: tuple[int, ...]
    block_rows: int
    noise_id: int
    markov_rank: int
    has_confidence: bool

    @property
    def num_proposals(self) -> int:
        return self.block_rows

    @property
    def default_tokens(self) -> int:
        return self.block_rows


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """`ratios[l]`: 0 = window only, 4 = compressed by 4 with an indexer, 128 = compressed by 128.

    `hash_layers`: the first layers, which choose experts by token id. `fp4_experts`: how the file stores them.
    `draft`: the DSpark heads in `mtp.*`, if that is what they are; `classic_mtp`: they are the older kind.
    """

    page_size: ClassVar[int] = 256
    page_multiple: ClassVar[int] = 128  # a page holds whole entries of either ratio

    architecture: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    window: int
    ratios: tuple[int, ...]
    rope: RopeConfig
    compress_rope: RopeConfig
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    route_scale: float
    swiglu_limit: float
    hash_layers: int
    streams: int
    sinkhorn_iterations: int
    hc_eps: float
    rms_norm_eps: float
    max_position: int
    dtype: str
    fp4_experts: bool
    classic_mtp: bool
    draft: BundledDraft | None

    @property
    def num_layers(self) -> int:
        return len(self.ratios)


def read_deepseek_v4(reader: ConfigReader, shapes: Mapping[str, TensorInfo]) -> DeepseekV4Config:
    """config.json, and the headers for what it does not say: stages, confidence head. CheckpointError names the key."""
    _check_fixed(reader)
    layers, heads = reader.integer('num_hidden_layers'), reader.integer('num_attention_heads')
    head_dim, groups = reader.integer('head_dim'), reader.integer('o_groups')
    if heads % groups:
        raise reader.error('o_groups', f'does not divide num_attention_heads={heads}')
    rope_dim = _rope_dim(reader, head_dim)
    rope, compress_rope = _ropes(reader)
    experts, active = reader.integer('n_routed_experts'), reader.integer('num_experts_per_tok')
    if active > experts:
        raise reader.error('num_experts_per_tok', f'more than n_routed_experts={experts}')
    hidden, vocabulary = reader.integer('hidden_size'), reader.integer('vocab_size')
    names = {release_name(name): info for name, info in shapes.items()}
    drafts = any(name.startswith('mtp.') for name in names)
    dspark = any(name.startswith('mtp.') and '.main_proj.' in name for name in names)
    return DeepseekV4Config(
        architecture=ARCHITECTURE,
        hidden_size=hidden,
        vocab_size=vocabulary,
        num_heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        query_rank=reader.integer('q_lora_rank'),
        output_groups=groups,
        output_rank=reader.integer('o_lora_rank'),
        window=reader.integer('sliding_window'),
        ratios=_ratios(reader, layers),
        rope=rope,
        compress_rope=compress_rope,
        index_heads=reader.integer('index_n_heads'),
        index_dim=reader.integer('index_head_dim', low=rope_dim),
        index_topk=reader.integer('index_topk'),
        num_experts=experts,
        experts_per_token=active,
        intermediate_size=reader.integer('moe_intermediate_size'),
        route_scale=float(reader.number('routed_scaling_factor')),
        swiglu_limit=float(reader.number('swiglu_limit')),
        hash_layers=_hash_layers(reader, layers),
        streams=reader.integer('hc_mult'),
        sinkhorn_iterations=reader.integer('hc_sinkhorn_iters'),
        hc_eps=float(reader.number('hc_eps')),
        rms_norm_eps=float(reader.number('rms_norm_eps')),
        max_position=reader.integer('max_position_embeddings'),
        dtype=read_dtype(reader, fallback=lambda: 'bfloat16'),
        fp4_experts=any('.ffn.experts.0.w1.' in name and info.dtype in PACKED for name, info in names.items()),
        classic_mtp=drafts and not dspark,
        draft=_draft(reader, names, layers, vocabulary) if dspark else None,
    )


def _check_fixed(reader: ConfigReader) -> None:
    for key, wanted in FIXED.items():
        if reader.has(key) and reader.values[key] != wanted:
            raise reader.error(key, f'served here: {wanted}')
    quantisation = reader.child('quantization_config')
    for key, value in QUANTISATION.items():
        if quantisation.has(key) and quantisation.values[key] != value:
            raise quantisation.error(key, f'served here: {value}')
    reader.text('expert_dtype', 'fp4', choices=('fp4', 'fp8'))


def _ratios(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """One per layer; lists may go on with entries of the draft's stages."""
    if reader.has('compress_ratios'):
        ratios = reader.integers('compress_ratios')
        if len(ratios) < layers or not set(ratios[:layers]) <= set(RATIOS.values()):
            raise reader.error('compress_ratios', f'expected {layers} entries or more, each 0, 4 or 128')
        return ratios[:layers]
    types = reader.texts('layer_types')  # never guessed: the pattern that libraries assume is not the release's
    if len(types) < layers or not set(types[:layers]) <= set(RATIOS):
        raise reader.error('layer_types', f'expected {layers} entries or more, each one of {", ".join(RATIOS)}')
    rates = reader.child('compress_rates')
    for name in ('compressed_sparse_attention', 'heavily_compressed_attention'):
        if rates.integer(name, RATIOS[name]) != RATIOS[name]:
            raise rates.error(name, f'served here: {RATIOS[name]}')
    return tuple(RATIOS[name] for name in types[:layers])


def _hash_layers(reader: ConfigReader, layers: int) -> int:
    if reader.has('num_hash_layers'):
        return min(reader.integer('num_hash_layers', low=0), layers)
    types = reader.texts('mlp_layer_types')[:layers]
    count = sum(kind == 'hash_moe' for kind in types)
    if len(types) < layers or types != ('hash_moe',) * count + ('moe',) * (layers - count):
        raise reader.error('mlp_layer_types', f'expected {layers} entries: hash_moe layers, then moe layers')
    return count


def _rope_dim(reader: ConfigReader, head_dim: int) -> int:
    size = reader.integer('qk_rope_head_dim', None)
    if size is None:
        size = round(reader.number('partial_rotary_factor') * head_dim)
    if size % 2 or size > head_dim:
        raise reader.error('qk_rope_head_dim', f'expected an even number up to head_dim={head_dim}')
    return size


def _ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """Of plain layers and of compressed ones; YaRN never scales cosine and sine here."""
    nested = reader.child('rope_parameters')
    main, compress = nested.child('main'), nested.child('compress')
    theta = _theta(compress, reader, 'compress_rope_theta')
    if not compress.values:
        compress = reader.child('rope_scaling')  # a rope_theta in there, if any, is a copy of the plain layers'
    kind_key = 'rope_type' if compress.has('rope_type') else 'type'
    plain = RopeConfig(theta=_theta(main, reader, 'rope_theta'))
    if compress.text(kind_key, 'default', choices=('default', 'yarn')) == 'default':
        return plain, RopeConfig(theta=theta)
    return plain, RopeConfig(
        theta=theta,
        kind='yarn',
        factor=float(compress.number('factor')),
        original_max_position=compress.integer('original_max_position_embeddings'),
        beta_fast=float(compress.number('beta_fast', 32.0)),
        beta_slow=float(compress.number('beta_slow', 1.0)),
        attention_factor=1.0,
    )


def _theta(nested: ConfigReader, top: ConfigReader, key: str) -> float:
    if nested.has('rope_theta') and top.has(key) and nested.values['rope_theta'] != top.values[key]:
        raise top.error(key, f'contradicts {nested.prefix}rope_theta={nested.values["rope_theta"]!r}')
    return float(nested.number('rope_theta') if nested.has('rope_theta') else top.number(key))


def _draft(reader: ConfigReader, names: Mapping[str, TensorInfo], layers: int, vocabulary: int) -> BundledDraft:
    # num_nextn_predict_layers says 1 whatever the number of stages
    stages = len({name.split('.')[1] for name in names if name.startswith('mtp.')})
    taps = reader.integers('dspark_target_layer_ids')
    if not taps or list(taps) != sorted(set(taps)) or taps[-1] >= layers:
        raise reader.error('dspark_target_layer_ids', f'expected ascending layers below {layers}')
    noise = reader.integer('dspark_noise_token_id', low=0)
    if noise >= vocabulary:
        raise reader.error('dspark_noise_token_id', f'not below vocab_size={vocabulary}')
    last = f'mtp.{stages - 1}'
    if f'{last}.markov_head.markov_w1.weight' not in names:
        raise CheckpointError(f'{last}.markov_head.markov_w1.weight', reader.where, 'missing from the DSpark heads')
    return BundledDraft(
        num_stages=stages,
        taps=taps,
        block_rows=reader.integer('dspark_block_size'),
        noise_id=noise,
        markov_rank=reader.integer('dspark_markov_rank'),
        has_confidence=f'{last}.confidence_head.proj.weight' in names,
    )
