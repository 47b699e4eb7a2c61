"""Draft checkpoints in every public dialect, turned into one DraftConfig; what cannot be served is refused by name.

Dialects name the same things differently and, worse, mean different things by the same name; misreading one raises no
error anywhere, the drafts are just rarely accepted. Hence: no guessed defaults, conflicts are errors, and shapes in the
file's headers have the last word. Next: tensor_table.py, the tensors that a DraftConfig implies.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from specdec.errors import CheckpointError
from specdec.models.config_reader import REQUIRED, ConfigReader, pick, read_decoder, read_dtype, refuse_quantised
from specdec.models.configs import DecoderConfig, DraftConfig, LayerRule, MarkovConfig, TargetConfig, TargetSizes
from specdec.models.tensor_table import FLOATS, TensorInfo

Shapes = Mapping[str, TensorInfo]
DialectName = Literal['zlab', 'deepspec', 'speculators', 'specforge']


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one family of checkpoints writes things down.

    `nested`: the method's keys live in `dflash_config` (or, older, beside it), else at the top level. `backbone`: the
    key of the object with the decoder's sizes, '' = top level. `tap_shift` turns its layer ids into "after layer k".
    The defaults apply where a key is absent; REQUIRED where programs disagree about the default.
    """

    name: DialectName
    kind: Literal['dflash', 'dspark']
    anchor_predicts: bool
    nested: bool = False
    backbone: str = ''
    taps_key: str = 'target_layer_ids'
    tap_shift: int = 0
    markov_rank: Any = 0
    markov_kind: Any = 'vanilla'
    confidence: Any = False
    confidence_with_markov: Any = False


ZLAB = Dialect('zlab', 'dflash', anchor_predicts=False, nested=True)
SPECFORGE = Dialect('specforge', 'dspark', anchor_predicts=True, nested=True)
DEEPSPEC = Dialect(
    'deepspec',
    'dspark',
    anchor_predicts=True,
    markov_rank=REQUIRED,
    markov_kind=REQUIRED,
    confidence=REQUIRED,
    confidence_with_markov=REQUIRED,
)
SPECULATORS_DFLASH = Dialect(
    'speculators',
    'dflash',
    anchor_predicts=False,
    backbone='transformer_layer_config',
    taps_key='aux_hidden_state_layer_ids',
    tap_shift=-1,
)
SPECULATORS_DSPARK = Dialect(
    'speculators',
    'dspark',
    anchor_predicts=False,  # where neither the key nor speculative_tokens tells: see _anchor_predicts
    backbone='transformer_layer_config',
    taps_key='aux_hidden_state_layer_ids',
    tap_shift=-1,
    markov_rank=256,
    confidence=True,
    confidence_with_markov=True,
)

_EXPERTS = 'drafts with experts are not served, only dense ones'
_DFLASH2 = 'DFlash 2 (convolutions and a candidate selector) is not served'
_BUNDLED = 'DeepSeek-V4 heads bundled in a target are not a draft checkpoint'

# Architectures that are known and not served: serving them as something similar would run, and draft badly.
REFUSED_ARCHITECTURES = {
    'DFlash2DraftModel': _DFLASH2,
    'Qwen35DSparkModel': 'Qwen3.5-native drafts (gated attention, 1 + w norms) are not served',
    'DSparkDraftModel': "without speculators_model_type or dflash_config.projector_type='dspark' its layout is unknown",
}

# (key, values that change nothing, reason). Looked for at every level that a draft's config has.
REFUSED_KEYS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ('num_experts', (0,), _EXPERTS),
    ('n_routed_experts', (0,), _EXPERTS),
    ('num_local_experts', (0,), _EXPERTS),
    ('attention_sink_bias', (False,), 'drafts with attention sinks are not served'),
    ('attention_value_scale', (1, 1.0), 'scaled attention values are not served'),
    ('dflash_query_causal', (False,), 'this community variant is not served'),
    ('log_snr_conditioning', (False,), 'this community variant is not served'),
    ('enable_qwen35_gated_q_proj', (False,), 'gated query projections are not served'),
    ('has_lm_head', (True,), 'drafts without a language model head are not served'),
    ('use_aux_hidden_state', (True,), 'drafts that read only the last hidden state are not served'),
    ('is_neox_style', (True,), 'only NeoX (half-split) rotation is served'),
    ('rope_is_neox_style', (True,), 'only NeoX (half-split) rotation is served'),
    ('logit_scale', (1, 1.0), 'scaled draft logits are served only as output_multiplier'),
    ('conv_kernel_size', (), _DFLASH2),
    ('conv_group_size', (), _DFLASH2),
    ('selector_rank', (), _DFLASH2),
    ('selector_top_k', (), _DFLASH2),
    ('dspark_config', (), 'no served dialect has this key'),
    ('dspark_block_size', (), _BUNDLED),
    ('dspark_target_layer_ids', (), _BUNDLED),
    ('dspark_noise_token_id', (), _BUNDLED),
    ('dspark_markov_rank', (), _BUNDLED),
    ('dspark_bonus_anchor', (), _BUNDLED),
    ('eagle_aux_hidden_state_layer_ids', (), 'no served dialect has this key; its layer ids would be off by one'),
    ('layer_ids', (), "no served dialect has this key; state the taps as 'target_layer_ids'"),
)

# (DraftConfig field, key, neutral value)
SCALES: tuple[tuple[str, str, float | None], ...] = (
    ('input_scale', 'input_embedding_scale', 1.0),
    ('output_multiplier', 'output_multiplier', 1.0),
    ('softcap', 'final_logit_softcapping', None),
)

# Tensor names that give a variant away where its config does not.
REFUSED_TENSORS = (
    (r'.*\.(experts\..*|mlp\.gate\.weight)', _EXPERTS),
    (r'(.*\.)?attention_sink_bias', 'drafts with attention sinks are not served'),
    (r'candidate_selector\..*|.*\.(attention|mlp)_conv\..*', _DFLASH2),
    (r'.*\.(qweight|qzeros|scales|g_idx|weight_scale.*|weight_packed)', 'quantised drafts are not served'),
)

# Wrappers that published files were saved through, and names that engines use for the same tensors.
_PREFIXES = ('model.', 'logit_head.')
_ALIASES = (
    ('midlayer.', 'layers.0.'),
    ('encoder.fc.', 'fc.'),
    ('encoder.output_norm_enc.', 'hidden_norm.'),
    ('draft_id_to_target_id', 'd2t'),
)


def draft_name(name: str) -> str:
    """A draft tensor's name as all dialects would spell it: wrappers' prefixes and engines' aliases undone."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for alias, plain in _ALIASES:
        if name.startswith(alias):
            name = plain + name.removeprefix(alias)
    return 'mask_embedding.weight' if name == 'mask_embedding' else name


def normalise(top: ConfigReader, shapes: Callable[[], Shapes]) -> DraftConfig:
    """One draft's config.json -> DraftConfig.

    `shapes` returns the headers under `draft_name` names; it is asked only after the config itself is in order.
    """
    dialect = detect(top)
    backbone = top.child(dialect.backbone) if dialect.backbone else top
    places = (top.child('dflash_config'), top) if dialect.nested else (top,)
    _refuse_variants(dialect, top, backbone, places)
    anchor_predicts = _anchor_predicts(dialect, top, places)
    markov = _markov(dialect, places)
    confidence = _confidence(dialect, places, markov)
    block_rows = pick('block_size', *places).integer('block_size', low=1 if anchor_predicts else 2)
    taps = _taps(dialect, places)
    rules = _rules(dialect, top, backbone, places)
    mask = pick('mask_token_id', *places)
    mask_id = mask.integer('mask_token_id', low=0)
    scales = _scales(dialect, places)
    found = shapes()
    decoder = read_decoder(backbone, _head_dim(backbone, found), inherited_rope=True)
    if mask_id >= decoder.vocab_size:
        raise mask.error('mask_token_id', f'outside the vocabulary (vocab_size={decoder.vocab_size})')
    draft_vocab = _draft_vocab_size(dialect, places, decoder, found)
    config = DraftConfig(
        dialect=dialect.name,
        kind=_kind(dialect, markov, confidence),
        decoder=decoder,
        target_hidden_size=top.integer('target_hidden_size', decoder.hidden_size),
        taps=taps,
        block_rows=block_rows,
        anchor_predicts=anchor_predicts,
        default_tokens=_default_tokens(dialect, top, block_rows if anchor_predicts else block_rows - 1),
        mask_id=mask_id,
        rules=rules,
        markov=markov,
        confidence_with_markov=confidence,
        draft_vocab_size=draft_vocab,
        own_embedding='embed_tokens.weight' in found,
        own_head='lm_head.weight' in found or draft_vocab != decoder.vocab_size,
        dtype=read_dtype(top, backbone, fallback=lambda: _file_dtype(found)),
        num_target_layers=top.integer('num_target_layers', None),
        mask_embedding='mask_embedding.weight' in found,
        **scales,
    )
    _cross_check(config, found, top.where)
    return config


def detect(top: ConfigReader) -> Dialect:
    """Which dialect a config is written in: the first of these that speaks decides.

    `projector_type` comes before the architecture because other heads are saved under DFlash's name.
    """
    if top.has('speculators_model_type'):
        kind = top.text('speculators_model_type')
        served = {'dflash': SPECULATORS_DFLASH, 'dspark': SPECULATORS_DSPARK}
        if kind not in served:
            raise top.error('speculators_model_type', 'served here: dflash, dspark')
        return served[kind]
    method = top.child('dflash_config')
    projector = method.text('projector_type', 'dflash')
    if projector == 'dspark':
        return SPECFORGE
    if projector != 'dflash':
        raise method.error('projector_type', f'{projector} heads are not served; served here: dflash, dspark')
    return _detect_by_architecture(top, method)


def _detect_by_architecture(top: ConfigReader, method: ConfigReader) -> Dialect:
    names = top.texts('architectures', ())
    if len(names) != 1:
        raise top.error('architectures', 'expected one name; nothing else says what kind of draft this is')
    if names[0] == 'Qwen3DSparkModel':
        return DEEPSPEC
    if names[0] in REFUSED_ARCHITECTURES:
        raise top.error('architectures', REFUSED_ARCHITECTURES[names[0]])
    if names[0] != 'DFlashDraftModel':
        raise top.error(
            'architectures', 'not a draft; served here: DFlashDraftModel, Qwen3DSparkModel, DSparkDraftModel'
        )
    if not method.values:
        raise top.error('dflash_config', 'missing; a DFlashDraftModel without it is of no known layout')
    return ZLAB


def check_fit(config: DraftConfig, target: TargetConfig | TargetSizes, where: str) -> None:
    """Raise CheckpointError unless the draft was made for a target of these sizes."""
    layers = target.num_layers
    sizes = [
        ('target_hidden_size', config.target_hidden_size, target.hidden_size),
        ('vocab_size', config.decoder.vocab_size, target.vocab_size),
        ('num_target_layers', config.num_target_layers or layers, layers),
    ]
    if not (config.own_embedding and config.own_head):
        # The target's embedding and head stand in, and are as wide as the target's hidden states.
        sizes.insert(0, ('hidden_size', config.decoder.hidden_size, target.hidden_size))
    for field, mine, theirs in sizes:
        if mine != theirs:
            raise CheckpointError(
                field, mine, f'the target has {theirs}; choose the draft made for this target ({where})'
            )
    for tap in config.taps:
        if not -1 <= tap < layers:
            raise CheckpointError(
                'target_layer_ids',
                tap,
                f'the target has layers 0 to {layers - 1} (-1 = embedding); choose the draft made for it ({where})',
            )


def _refuse_variants(
    dialect: Dialect, top: ConfigReader, backbone: ConfigReader, places: tuple[ConfigReader, ...]
) -> None:
    readers = (top, *(reader for reader in (backbone, *places) if reader is not top))
    for reader in readers:
        refuse_quantised(reader)
        for key, harmless, reason in REFUSED_KEYS:
            if reader.has(key) and reader.values[key] not in harmless:
                raise reader.error(key, reason)
    if not backbone.text('model_type', 'qwen3').startswith('qwen3'):
        raise backbone.error('model_type', 'only drafts made of Qwen3 decoder layers are served')
    if dialect.kind == 'dflash':
        for reader in readers:
            if reader.integer('markov_rank', 0, low=0):
                raise reader.error('markov_rank', 'a DFlash draft with a Markov head is of no known layout')
    places[0].text('attention_mode', 'gqa', choices=('gqa', 'mha'))
    if dialect.name == 'speculators':
        # Here the key was obeyed in training; in copies of a target's config (the other dialects) it was not.
        rope = pick('partial_rotary_factor', backbone.child('rope_parameters'), backbone)
        if rope.number('partial_rotary_factor', 1.0) != 1.0:
            raise rope.error('partial_rotary_factor', 'drafts with partial rotation are not served')


def _anchor_predicts(dialect: Dialect, top: ConfigReader, places: tuple[ConfigReader, ...]) -> bool:
    """Whether row k predicts the token after its own position (g = b) or the one at it (g = b - 1)."""
    place = pick('sample_from_anchor', *places)
    if dialect.name in ('deepspec', 'specforge'):
        if not place.flag('sample_from_anchor', True):
            raise place.error('sample_from_anchor', f'{dialect.name} drafts are always trained anchor-first')
        return True
    if place.has('sample_from_anchor'):
        return place.flag('sample_from_anchor')
    if dialect is SPECULATORS_DSPARK:
        # Early releases did not write the key although the trainer used both layouts; the token count tells them apart.
        return _speculative_tokens(top) == top.integer('block_size')
    return dialect.anchor_predicts


def _taps(dialect: Dialect, places: tuple[ConfigReader, ...]) -> tuple[int, ...]:
    reader = pick(dialect.taps_key, *places)
    ids = reader.integers(dialect.taps_key, low=-1 - dialect.tap_shift)
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise reader.error(dialect.taps_key, 'expected layer ids in strictly ascending order')
    return tuple(i + dialect.tap_shift for i in ids)


def _kind(dialect: Dialect, markov: MarkovConfig | None, confidence: bool | None) -> Literal['dflash', 'dspark']:
    # DeepSpec saves its DFlash baseline under DSpark's architecture, with both heads off.
    if dialect is DEEPSPEC and markov is None and confidence is None:
        return 'dflash'
    return dialect.kind


def _markov(dialect: Dialect, places: tuple[ConfigReader, ...]) -> MarkovConfig | None:
    if dialect.kind == 'dflash':
        return None
    rank = pick('markov_rank', *places).integer('markov_rank', dialect.markov_rank, low=0)
    if not rank:
        return None
    kind = pick('markov_head_type', *places).text(
        'markov_head_type', dialect.markov_kind, choices=('vanilla', 'gated', 'rnn')
    )
    return MarkovConfig(kind, rank)


def _confidence(dialect: Dialect, places: tuple[ConfigReader, ...], markov: MarkovConfig | None) -> bool | None:
    """None without a confidence head, else whether the head also reads the Markov embedding."""
    place = pick('enable_confidence_head', *places)
    if dialect.kind == 'dflash':
        if place.flag('enable_confidence_head', False):
            raise place.error('enable_confidence_head', 'a DFlash draft with a confidence head is of no known layout')
        return None
    default = dialect.confidence
    if dialect is SPECFORGE:
        default = pick('confidence_head_alpha', *places).number('confidence_head_alpha', 0.0, zero=True) > 0
    if not place.flag('enable_confidence_head', default):
        return None
    with_markov = pick('confidence_head_with_markov', *places).flag(
        'confidence_head_with_markov', dialect.confidence_with_markov
    )
    return with_markov and markov is not None


def _rules(
    dialect: Dialect, top: ConfigReader, backbone: ConfigReader, places: tuple[ConfigReader, ...]
) -> tuple[LayerRule, ...]:
    sliding = _sliding_layers(backbone)
    if not dialect.nested:
        return _rules_by_layer_type(dialect, top, backbone, sliding)
    method = places[0]
    all_sliding = method.flag('use_swa', False) and not any(sliding)
    window = method.integer('swa_window_size', None) or _window(backbone, any(sliding) or all_sliding)
    causal = _explicit_causality(places)
    if all_sliding:
        return (LayerRule(causal=bool(causal), window=window),) * len(sliding)
    return tuple(
        LayerRule(causal=slides if causal is None else causal, window=window if slides else None) for slides in sliding
    )


def _rules_by_layer_type(
    dialect: Dialect, top: ConfigReader, backbone: ConfigReader, sliding: tuple[bool, ...]
) -> tuple[LayerRule, ...]:
    for reader in (top, backbone):
        if reader.flag('is_causal', False):
            raise reader.error('is_causal', f'{dialect.name} drafts have no causal full-attention layers')
    if dialect is DEEPSPEC:
        if any(sliding):
            raise backbone.error('layer_types', 'DeepSpec drafts have full_attention layers only')
        return (LayerRule(),) * len(sliding)
    causal = not top.flag('sliding_window_non_causal', False)
    window = _window(backbone, any(sliding))
    return tuple(LayerRule(causal=causal, window=window) if slides else LayerRule() for slides in sliding)


def _explicit_causality(places: tuple[ConfigReader, ...]) -> bool | None:
    """What the config says for all layers; None leaves it to each layer's type (sliding = causal)."""
    said = {}
    for key in ('is_causal', 'causal'):
        place = pick(key, *places)
        if place.has(key):
            said[key] = place.flag(key)
    if len(set(said.values())) > 1:
        raise places[-1].error('is_causal', f'contradicts causal={said["causal"]}; remove the one that is wrong')
    return next(iter(said.values()), None)


def _sliding_layers(backbone: ConfigReader) -> tuple[bool, ...]:
    layers = backbone.integer('num_hidden_layers')
    types = backbone.texts('layer_types', None)
    if types is None:
        if backbone.flag('use_sliding_window', False) and backbone.has('sliding_window'):
            raise backbone.error('layer_types', 'missing; with use_sliding_window it must say which layers slide')
        return (False,) * layers
    if len(types) != layers:
        raise backbone.error('layer_types', f'expected num_hidden_layers={layers} entries')
    if unknown := set(types) - {'full_attention', 'sliding_attention'}:
        raise backbone.error(
            'layer_types', f'{sorted(unknown)[0]} is not served; full_attention, sliding_attention are'
        )
    return tuple(name == 'sliding_attention' for name in types)


def _window(backbone: ConfigReader, needed: bool) -> int | None:
    if not needed or not backbone.flag('use_sliding_window', True):
        return None
    return backbone.integer('sliding_window')


def _head_dim(backbone: ConfigReader, found: Shapes) -> int:
    if (norm := found.get('layers.0.self_attn.q_norm.weight')) is not None and len(norm.shape) == 1:
        return norm.shape[0]
    return max(2, backbone.integer('hidden_size') // backbone.integer('num_attention_heads') // 2 * 2)


def _draft_vocab_size(dialect: Dialect, places: tuple[ConfigReader, ...], decoder: DecoderConfig, found: Shapes) -> int:
    default = found['d2t'].shape[0] if 'd2t' in found and found['d2t'].shape else decoder.vocab_size
    place = pick('draft_vocab_size', *places)
    size = place.integer('draft_vocab_size', default)
    if size > decoder.vocab_size:
        raise place.error('draft_vocab_size', f'more than vocab_size={decoder.vocab_size}')
    if dialect is DEEPSPEC and size != decoder.vocab_size:
        raise place.error('draft_vocab_size', 'DeepSpec drafts have no reduced vocabulary')
    return size


def _speculative_tokens(top: ConfigReader) -> int | None:
    """K as a Speculators config proposes it, from its first proposal method."""
    settings = top.child('speculators_config')
    methods = settings.values.get('proposal_methods') or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise settings.error('proposal_methods', 'expected a list of objects')
    first = ConfigReader(methods[0], top.where, f'{settings.prefix}proposal_methods[0].')
    return first.integer('speculative_tokens', None)


def _default_tokens(dialect: Dialect, top: ConfigReader, proposals: int) -> int:
    tokens = _speculative_tokens(top) if dialect.name == 'speculators' else None
    if tokens is not None and tokens > proposals:
        raise CheckpointError(
            'speculators_config.proposal_methods[0].speculative_tokens',
            tokens,
            f'one block of this draft proposes {proposals}; correct it or block_size, sample_from_anchor ({top.where})',
        )
    return proposals if tokens is None else tokens


def _scales(dialect: Dialect, places: tuple[ConfigReader, ...]) -> dict[str, Any]:
    """z-lab's constants around the block; no other dialect has them, and none may ignore them."""
    scales = {}
    for field, key, neutral in SCALES:
        place = pick(key, *places)
        scales[field] = place.number(key, neutral)
        if dialect is not ZLAB and scales[field] != neutral:
            raise place.error(key, f'{dialect.name} drafts are not trained with this key')
    return scales


def _file_dtype(found: Shapes) -> str:
    stored = found['fc.weight'].dtype if 'fc.weight' in found else 'F32'
    return FLOATS.get(stored, stored)


def _cross_check(config: DraftConfig, found: Shapes, where: str) -> None:
    """Compare what the config says with what the file holds, in the order in which a mistake is best explained."""
    for name, info in found.items():
        for pattern, reason in REFUSED_TENSORS:
            if re.fullmatch(pattern, name):
                raise CheckpointError(name, info.shape, f'{reason} ({where})')
    for name, info in found.items():
        if info.dtype not in FLOATS and not re.fullmatch(r'd2t|t2d|verifier_.*', name):
            raise CheckpointError(name, info.dtype, f'weights are served as F32, BF16 or F16 only ({where})')
    for field, said, name, held in _shape_facts(config, found):
        if said != held:
            gated = field == 'num_attention_heads' and held == 2 * said
            reason = ': gated query projections are not served' if gated else ''
            raise CheckpointError(field, said, f'but {name} {list(found[name].shape)} says {held}{reason} ({where})')
    _check_markov_kind(config, found, where)


def _shape_facts(config: DraftConfig, found: Shapes) -> list[tuple[str, Any, str, Any]]:
    """(config field, its value, tensor, the value that the tensor's shape gives), where the tensor is there."""
    decoder, first = config.decoder, 'layers.0.self_attn.'
    H, hd = decoder.hidden_size, decoder.head_dim
    facts: list[tuple[str, Any, str, int, Callable[[int], Any]]] = [
        ('hidden_size', H, 'fc.weight', 0, int),
        ('number of taps', len(config.taps), 'fc.weight', 1, lambda n: _ratio(n, config.target_hidden_size)),
        ('head_dim', hd, f'{first}q_norm.weight', 0, int),
        ('num_attention_heads', decoder.num_heads, f'{first}q_proj.weight', 0, lambda n: _ratio(n, hd)),
        ('num_key_value_heads', decoder.num_kv_heads, f'{first}k_proj.weight', 0, lambda n: _ratio(n, hd)),
        ('draft_vocab_size', config.draft_vocab_size, 'lm_head.weight', 0, int),
        ('draft_vocab_size', config.draft_vocab_size, 'markov_head.markov_w2.weight', 0, int),
        ('markov_rank', config.markov.rank if config.markov else 0, 'markov_head.markov_w1.weight', 1, int),
    ]
    reads_markov = config.confidence_with_markov
    if reads_markov is not None:
        facts.append(
            ('confidence_head_with_markov', reads_markov, 'confidence_head.proj.weight', 1, lambda width: width > H)
        )
    return [
        (field, said, name, read(found[name].shape[axis]))
        for field, said, name, axis, read in facts
        if name in found and len(found[name].shape) > axis
    ]


def _check_markov_kind(config: DraftConfig, found: Shapes, where: str) -> None:
    marks = {'gated': 'markov_head.gate_proj.weight', 'rnn': 'markov_head.joint_proj.weight'}
    held = [kind for kind, name in marks.items() if name in found]
    if config.markov and held and held != [config.markov.kind]:
        raise CheckpointError('markov_head_type', config.markov.kind, f'the file holds a {held[0]} head ({where})')


def _ratio(size: int, unit: int) -> int | float:
    return size // unit if size % unit == 0 else round(size / unit, 2)
