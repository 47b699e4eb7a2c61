"""config.json of Qwen3.5 (alone or as the text part of a vision model) and Qwen3-Next. Next: target.py."""

from collections.abc import Callable, Mapping

from specdec.kernels.gated_delta_rule import DeltaHeads
from specdec.models.config_reader import ConfigReader, read_decoder, read_dtype, refuse_quantised
from specdec.models.configs import HybridConfig, MoeConfig
from specdec.models.tensor_table import TensorInfo

NEXT = 'Qwen3NextForCausalLM'
DENSE = ('Qwen3_5ForCausalLM', 'Qwen3_5ForConditionalGeneration')
SPARSE = ('Qwen3_5MoeForCausalLM', 'Qwen3_5MoeForConditionalGeneration', NEXT)
ARCHITECTURES = (*DENSE, *SPARSE)
KINDS = ('linear_attention', 'full_attention')
TEXT_PREFIX = 'model.language_model'
DEFAULT_PARTIAL, DEFAULT_INTERVAL = 0.25, 4  # what transformers assumes where the keys are absent


def read_hybrid(
    top: ConfigReader, architecture: str, shapes: Mapping[str, TensorInfo], stored_dtype: Callable[[], str]
) -> HybridConfig:
    """The text model's part. The names in the headers (`shapes`) tell how the file is laid out."""
    reader = top.child('text_config') if top.has('text_config') else top
    refuse_quantised(reader)
    if not reader.flag('attn_output_gate', True):
        raise reader.error('attn_output_gate', 'only gated attention is served')
    sparse = architecture in SPARSE
    # with experts in every layer a config need not say how wide an MLP would be
    decoder = read_decoder(reader, partial_rope=DEFAULT_PARTIAL, intermediate=1 if sparse else None)
    if int(decoder.head_dim * decoder.rope.partial) % 2:
        raise reader.error('partial_rotary_factor', f'rotates an odd number of the {decoder.head_dim} channels')
    heads = DeltaHeads(
        key_heads=reader.integer('linear_num_key_heads'),
        value_heads=reader.integer('linear_num_value_heads'),
        key_dim=reader.integer('linear_key_head_dim'),
        value_dim=reader.integer('linear_value_head_dim'),
    )
    if heads.value_heads % heads.key_heads:
        raise reader.error('linear_num_value_heads', f'not a multiple of linear_num_key_heads={heads.key_heads}')
    ties = top if top.has('tie_word_embeddings') else reader
    return HybridConfig(
        architecture=architecture,
        decoder=decoder,
        attends=_attends(reader, decoder.num_layers),
        heads=heads,
        conv_width=reader.integer('linear_conv_kernel_dim', low=2),
        tie_embeddings=ties.flag('tie_word_embeddings', False),
        dtype=read_dtype(reader, top, fallback=stored_dtype),
        moe=_moe(reader, decoder.num_layers, architecture) if sparse else None,
        fused_inputs=architecture == NEXT,
        prefix=TEXT_PREFIX if any(name.startswith(f'{TEXT_PREFIX}.') for name in shapes) else 'model',
        stacked_experts=any(name.endswith('.mlp.experts.gate_up_proj') for name in shapes),
    )


def _attends(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    types = reader.texts('layer_types', None)
    if types is None:
        interval = reader.integer('full_attention_interval', DEFAULT_INTERVAL)
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    if len(types) != layers or not set(types) <= set(KINDS):
        raise reader.error('layer_types', f'expected {layers} entries: {" or ".join(KINDS)}')
    if len(set(types)) < 2:
        raise reader.error('layer_types', f'a hybrid has layers of both kinds: {" and ".join(KINDS)}')
    return tuple(kind == 'full_attention' for kind in types)


def _moe(reader: ConfigReader, layers: int, architecture: str) -> MoeConfig:
    experts, active = reader.integer('num_experts'), reader.integer('num_experts_per_tok')
    if active > experts:
        raise reader.error('num_experts_per_tok', f'more than num_experts={experts}')
    sparse = (True,) * layers
    if architecture == NEXT:
        step, dense = reader.integer('decoder_sparse_step', 1), reader.integers('mlp_only_layers', ())
        sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
        if not all(sparse):
            reader.integer('intermediate_size')
    return MoeConfig(
        num_experts=experts,
        experts_per_token=active,
        intermediate_size=reader.integer('moe_intermediate_size'),
        norm_topk=reader.flag('norm_topk_prob', True) if architecture == NEXT else True,
        sparse_layers=sparse,
        shared_size=reader.integer('shared_expert_intermediate_size'),
    )
