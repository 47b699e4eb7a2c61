"""A tiny DeepSeek-V4 with every mechanism, its DSpark heads, and the folders that tools would write of them.

The target is transformers' own; the heads follow docs/deepseek_v4.md on transformers' modules, since no library has
them. transformers' initial values would hide mistakes (sinks, biases and tables are zero), so all are drawn anew.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from specdec.kernels.paged_attention import RowLayout
from specdec.layers.cache_specs import CacheRoom
from specdec.layers.parallel import SINGLE
from specdec.layers.weights import Destination
from specdec.models.checkpoint import read_config, tensor_shapes, tensors
from specdec.models.deepseek_v4.caches import DeepseekV4Caches
from specdec.models.deepseek_v4.config import read_deepseek_v4
from specdec.models.deepseek_v4.draft import BundledDspark
from specdec.models.deepseek_v4.target import DeepseekV4Target
from specdec.models.deepseek_v4.tensors import plain_tensors
from specdec.models.target import Rows
from specdec.models.weights import WeightLoader

STAGES, TAPS, BLOCK, NOISE, RANK = 3, (3, 4, 5), 5, 96, 8
WINDOW, VOCABULARY = 16, 97

Tensors = dict[str, Tensor]


def config(**changes: Any) -> dict[str, Any]:
    """config.json in the release's keys; the last entries of compress_ratios are the stages'.

    Index heads are many on purpose: with few of them scores are exactly 0 often, and transformers breaks such ties
    differently for every shape.
    """
    return {
        'architectures': ['DeepseekV4ForCausalLM'],
        'model_type': 'deepseek_v4',
        'torch_dtype': 'float32',
        'vocab_size': VOCABULARY,
        'hidden_size': 64,
        'moe_intermediate_size': 32,
        'num_hidden_layers': 6,
        'num_attention_heads': 4,
        'num_key_value_heads': 1,
        'head_dim': 32,
        'qk_rope_head_dim': 8,
        'q_lora_rank': 48,
        'o_groups': 2,
        'o_lora_rank': 24,
        'compress_ratios': [0, 4, 128, 0, 4, 128, *[0] * STAGES],
        'num_hash_layers': 2,
        'sliding_window': WINDOW,
        'compress_rope_theta': 160000,
        'rope_theta': 10000,
        'rope_scaling': {
            'type': 'yarn',
            'factor': 16,
            'original_max_position_embeddings': 64,
            'beta_fast': 32,
            'beta_slow': 1,
        },
        'max_position_embeddings': 1024,
        'index_n_heads': 16,
        'index_head_dim': 16,
        'index_topk': 6,
        'n_routed_experts': 8,
        'n_shared_experts': 1,
        'num_experts_per_tok': 2,
        'norm_topk_prob': True,
        'scoring_func': 'sqrtsoftplus',
        'topk_method': 'noaux_tc',
        'routed_scaling_factor': 1.5,
        'swiglu_limit': 1.0,
        'hc_mult': 4,
        'hc_sinkhorn_iters': 20,
        'hc_eps': 1e-6,
        'rms_norm_eps': 1e-6,
        'num_nextn_predict_layers': 1,
        'tie_word_embeddings': False,
        'bos_token_id': 0,
        'eos_token_id': 1,
        **changes,
    }


def bundled_config(taps: tuple[int, ...] = TAPS, **changes: Any) -> dict[str, Any]:
    return config(
        dspark_block_size=BLOCK,
        dspark_noise_token_id=NOISE,
        dspark_target_layer_ids=list(taps),
        dspark_markov_rank=RANK,
        **changes,
    )


# -------------------------------------------------------------------------------------------------- the reference
def build_target(seed: int = 0, **changes: Any) -> DeepseekV4ForCausalLM:
    """transformers' model in fp32 with values under which every mechanism shows in the logits."""
    keys = config(**changes)
    keys['rope_scaling'] = dict(keys['rope_scaling'])  # transformers writes into it
    settings = DeepseekV4Config(**{k: v for k, v in keys.items() if k not in ('architectures', 'torch_dtype')})
    settings._attn_implementation = settings._experts_implementation = 'eager'
    model = DeepseekV4ForCausalLM(settings).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith('tid2eid'):
                rows = [torch.randperm(settings.n_routed_experts, generator=generator) for _ in value]
                value.copy_(torch.stack(rows)[:, : value.shape[1]])
            elif 'inv_freq' not in name:
                mean, spread = _spread(name, value)
                value.copy_(mean + spread * torch.randn(value.shape, generator=generator))
    return model


def _spread(name: str, value: Tensor) -> tuple[float, float]:
    leaf = name.rsplit('.', 1)[-1]
    if name.endswith('norm.weight') or 'layernorm.weight' in name or leaf in ('scale', 'hc_scale'):
        return 1.0, 0.2
    known = {'sinks': 1.0, 'position_bias': 0.7, 'base': 0.7, 'hc_base': 0.7, 'e_score_correction_bias': 0.3}
    if leaf in known or 'embed_tokens' in name:
        return 0.0, known.get(leaf, 1.0)
    return 0.0, (1.5 if leaf in ('fn', 'hc_fn') else 1.4) / value.shape[-1] ** 0.5


def reference_logits(
    model: DeepseekV4ForCausalLM, ids: Tensor, layers: tuple[int, ...] = TAPS
) -> tuple[Tensor, Tensor]:
    """ids [B, S] -> logits [B, S, V] and taps [B, S, m * D] without a cache."""
    taps: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[i].register_forward_hook(lambda _m, _a, out, i=i: taps.__setitem__(i, out.mean(2)))
        for i in layers
    ]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([taps[i] for i in layers], -1)


@dataclass(frozen=True, slots=True)
class ReferenceDraft:
    """`stages`: a model of window-only layers, of which the layers, the last mix and the norm are used."""

    stages: DeepseekV4ForCausalLM
    main_proj: Tensor
    main_norm: Tensor
    markov_w1: Tensor
    markov_w2: Tensor
    confidence: Tensor

    def propose(self, target: DeepseekV4ForCausalLM, taps: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """taps [B, C, m * D] of the committed positions, anchors [B] at position C -> greedy tokens [B, g], their
        logits [B, g, V] and acceptance probabilities [B, g]."""
        length = torch.full((len(taps),), taps.shape[1])
        hidden = self.hidden(target, taps[:, -self.stages.config.sliding_window :], anchors, length)
        base = target.lm_head(self.stages.model.norm(hidden))
        token, tokens, logits, sure = anchors, [], [], []
        for k in range(BLOCK):
            embedded = self.markov_w1[token]
            logits.append(base[:, k] + embedded @ self.markov_w2.T)
            sure.append(torch.sigmoid(torch.cat([hidden[:, k], embedded], -1) @ self.confidence.T)[:, 0])
            token = logits[-1].argmax(-1)
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(sure, 1)

    def hidden(self, target: DeepseekV4ForCausalLM, taps: Tensor, anchors: Tensor, lengths: Tensor) -> Tensor:
        """Rows of the blocks before the final norm [B, g, D]; taps [B, n, m * D] of the n positions before each
        anchor, which is at lengths [B]; n is at most the window."""
        settings = self.stages.config
        context = _norm(F.linear(taps, self.main_proj), self.main_norm, settings.rms_norm_eps)
        before = lengths[:, None] + torch.arange(-taps.shape[1], 0)
        here = lengths[:, None] + torch.arange(BLOCK)
        ids = torch.full((len(anchors), BLOCK), NOISE)
        ids[:, 0] = anchors
        streams = target.model.embed_tokens(ids).unsqueeze(2).repeat(1, 1, settings.hc_mult, 1)
        for layer in self.stages.model.layers:
            streams = self._stage(layer, streams, context, before, here, ids)
        return self.stages.model.hc_head(streams)

    def _stage(self, layer: Any, streams: Tensor, context: Tensor, before: Tensor, here: Tensor, ids: Tensor) -> Tensor:
        attention = layer.self_attn
        angles = self.stages.model.rotary_emb

        def latents(x: Tensor, positions: Tensor) -> Tensor:
            rotation = angles(x, position_ids=positions, layer_type='main')
            return apply_rotary_pos_emb(attention.kv_norm(attention.kv_proj(x)).unsqueeze(1), *rotation)

        post, comb, x = layer.attn_hc(streams)
        x = layer.input_layernorm(x)
        cos, sin = angles(x, position_ids=here, layer_type='main')
        q = attention.q_b_proj(attention.q_a_norm(attention.q_a_proj(x))).unflatten(-1, (-1, attention.head_dim))
        q = apply_rotary_pos_emb(attention.q_b_norm(q.transpose(1, 2)), cos, sin)
        kv = torch.cat([latents(context, before), latents(x, here)], 2)
        scores = q @ kv.transpose(-1, -2) * attention.head_dim**-0.5
        sinks = attention.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        out = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ kv
        out = apply_rotary_pos_emb(out, cos, -sin).transpose(1, 2)
        out = out.reshape(*ids.shape, self.stages.config.o_groups, -1)
        streams = _expand(attention.o_b_proj(attention.o_a_proj(out).flatten(2)), streams, post, comb)
        post, comb, x = layer.ffn_hc(streams)
        return _expand(layer.mlp(layer.post_attention_layernorm(x), input_ids=ids), streams, post, comb)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(2) + comb.transpose(-1, -2) @ streams


def build_draft(seed: int = 1, stages: int = STAGES, taps: tuple[int, ...] = TAPS, **changes: Any) -> ReferenceDraft:
    own = {'num_hidden_layers': stages, 'compress_ratios': [0] * stages, 'num_hash_layers': 0}
    model = build_target(seed, **changes | own)
    generator = torch.Generator().manual_seed(seed + 100)
    size = model.config.hidden_size

    def drawn(*shape: int, spread: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + spread * torch.randn(shape, generator=generator)

    return ReferenceDraft(
        stages=model,
        main_proj=drawn(size, size * len(taps), spread=(size * len(taps)) ** -0.5),
        main_norm=drawn(size, spread=0.2, mean=1.0),
        markov_w1=drawn(VOCABULARY, RANK),
        markov_w2=drawn(VOCABULARY, RANK, spread=0.5),
        confidence=drawn(1, size + RANK, spread=(size + RANK) ** -0.5),
    )


# ----------------------------------------------------------------------------------------------------- checkpoints
_LEAVES = {
    'self_attn.sinks': 'attn.attn_sink',
    'self_attn.q_a_proj.weight': 'attn.wq_a.weight',
    'self_attn.q_a_norm.weight': 'attn.q_norm.weight',
    'self_attn.q_b_proj.weight': 'attn.wq_b.weight',
    'self_attn.kv_proj.weight': 'attn.wkv.weight',
    'self_attn.kv_norm.weight': 'attn.kv_norm.weight',
    'self_attn.o_a_proj.weight': 'attn.wo_a.weight',
    'self_attn.o_b_proj.weight': 'attn.wo_b.weight',
    'input_layernorm.weight': 'attn_norm.weight',
    'post_attention_layernorm.weight': 'ffn_norm.weight',
    'mlp.gate.weight': 'ffn.gate.weight',
    'mlp.gate.e_score_correction_bias': 'ffn.gate.bias',
    'mlp.gate.tid2eid': 'ffn.gate.tid2eid',
    'mlp.shared_experts.gate_proj.weight': 'ffn.shared_experts.w1.weight',
    'mlp.shared_experts.down_proj.weight': 'ffn.shared_experts.w2.weight',
    'mlp.shared_experts.up_proj.weight': 'ffn.shared_experts.w3.weight',
    'self_attn.compressor.indexer.q_b_proj.weight': 'attn.indexer.wq_b.weight',
    'self_attn.compressor.indexer.scorer.weights_proj.weight': 'attn.indexer.weights_proj.weight',
    **{f'{part}_hc.{leaf}': f'hc_{part}_{leaf}' for part in ('attn', 'ffn') for leaf in ('fn', 'base', 'scale')},
    **{
        f'self_attn.compressor.{mine}{leaf}': f'attn.{theirs}compressor.{name}'
        for mine, theirs in (('', ''), ('indexer.', 'indexer.'))
        for leaf, name in (
            ('kv_proj.weight', 'wkv.weight'),
            ('gate_proj.weight', 'wgate.weight'),
            ('position_bias', 'ape'),
            ('kv_norm.weight', 'norm.weight'),
        )
    },
}


def _state(model: DeepseekV4ForCausalLM) -> Tensors:
    everything = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in everything if 'inv_freq' not in name}


def _release_layers(model: DeepseekV4ForCausalLM, prefix: str) -> Tensors:
    found: Tensors = {}
    for name, value in _state(model).items():
        if not name.startswith('model.layers.'):
            continue
        layer, leaf = name.removeprefix('model.layers.').split('.', 1)
        if leaf == 'mlp.experts.gate_up_proj':
            for e, expert in enumerate(value):
                w1, w3 = expert.chunk(2)
                found[f'{prefix}.{layer}.ffn.experts.{e}.w1.weight'] = w1
                found[f'{prefix}.{layer}.ffn.experts.{e}.w3.weight'] = w3
        elif leaf == 'mlp.experts.down_proj':
            found |= {f'{prefix}.{layer}.ffn.experts.{e}.w2.weight': expert for e, expert in enumerate(value)}
        else:
            found[f'{prefix}.{layer}.{_LEAVES[leaf]}'] = value
    return found


def target_tensors(model: DeepseekV4ForCausalLM) -> Tensors:
    """The target under the release's names."""
    state = _state(model)
    top = {
        'embed.weight': 'model.embed_tokens.weight',
        'head.weight': 'lm_head.weight',
        'norm.weight': 'model.norm.weight',
    }
    top |= {f'hc_head_{leaf}': f'model.hc_head.hc_{leaf}' for leaf in ('fn', 'base', 'scale')}
    return {name: state[stored] for name, stored in top.items()} | _release_layers(model, 'layers')


def draft_tensors(draft: ReferenceDraft) -> Tensors:
    """The bundled heads under the release's names."""
    state, last = _state(draft.stages), f'mtp.{len(draft.stages.model.layers) - 1}'
    return {
        **_release_layers(draft.stages, 'mtp'),
        'mtp.0.main_proj.weight': draft.main_proj,
        'mtp.0.main_norm.weight': draft.main_norm,
        f'{last}.norm.weight': state['model.norm.weight'],
        **{f'{last}.hc_head_{leaf}': state[f'model.hc_head.hc_{leaf}'] for leaf in ('fn', 'base', 'scale')},
        f'{last}.markov_head.markov_w1.weight': draft.markov_w1,
        f'{last}.markov_head.markov_w2.weight': draft.markov_w2,
        f'{last}.confidence_head.proj.weight': draft.confidence,
    }


def stacked_tensors(model: DeepseekV4ForCausalLM) -> Tensors:
    """The target under the names of transformers' modules, experts stacked."""
    return _state(model)


def write(folder: Path, settings: dict[str, Any], tensors: Tensors) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(settings))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / 'model.safetensors')
    return folder


def write_bundled(folder: Path, target: DeepseekV4ForCausalLM, draft: ReferenceDraft) -> Path:
    return write(folder, bundled_config(), target_tensors(target) | draft_tensors(draft))


# ---------------------------------------------------------------------------------------------------- quantisation
QUANTISED_LINEARS = ('wq_a', 'wq_b', 'wkv', 'wo_a', 'wo_b', 'w1', 'w2', 'w3', 'main_proj')


def quantise(tensors: Tensors) -> Tensors:
    """As releases are stored: linears e4m3 by 128 x 128, routed experts e2m1 by 1 x 32, scales e8m0, norms bf16."""
    found: Tensors = {}
    for name, value in tensors.items():
        base, _, kind = name.rpartition('.')
        if kind != 'weight' or base.rpartition('.')[2] not in QUANTISED_LINEARS or '.compressor.' in name:
            found[name] = value.bfloat16() if kind == 'weight' and '.gate.' not in name else value
        elif '.experts.' in name:
            found[name], found[f'{base}.scale'] = to_fp4(value)
        else:
            found[name], found[f'{base}.scale'] = to_fp8(value)
    return found


def _power_of_two(largest: Tensor, top: float) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-4) / top)))


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> e4m3 [O, I], e8m0 [ceil(O / 128), ceil(I / 128)]."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = _power_of_two(padded.abs().amax((1, 3)), 448.0)
    stored = (padded / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return stored.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def to_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> bytes [O, I / 2] int8, e8m0 [O, I / 32]."""
    groups = weight.unflatten(1, (-1, 32))
    scale = _power_of_two(groups.abs().amax(-1), 6.0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = (groups / scale[..., None]).flatten(1)
    nibbles = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    packed = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    return packed.to(torch.uint8).view(torch.int8), scale.to(torch.float8_e8m0fnu)


# ----------------------------------------------------------------------------------------------------------- steps
class Steps:
    """Packed steps over own caches, filled with NaN so that nothing unwritten counts: request r has slot r + 1."""

    def __init__(self, target: DeepseekV4Target, num_drafts: int, requests: int, pages: int, page_size: int = 128):
        self.target, self.num_drafts, self.page_size = target, num_drafts, page_size
        spec = replace(target.cache_spec(), num_drafts=num_drafts)
        self.caches = spec.allocate(CacheRoom(requests * pages + 1, page_size, requests + 1), torch.device('cpu'))
        poison(self.caches)
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(9)) + 1
        self.page_table = order.view(requests, pages)

    def layout(self, chunks: list[tuple[int, int, Tensor]], decodes: list[tuple[int, int, Tensor]]) -> RowLayout:
        parts = [*chunks, *decodes]
        counts = torch.tensor([0, *(len(ids) for _, _, ids in parts)])
        return RowLayout(
            row_offsets=counts.cumsum(0),
            contexts=torch.tensor([start for _, start, _ in parts]),
            page_table=self.page_table[[request for request, _, _ in parts]],
            chunk_rows=tuple(len(ids) for _, _, ids in chunks),
            tile_rows=self.num_drafts + 1,
            page_size=self.page_size,
        )

    @torch.inference_mode()
    def __call__(
        self,
        chunks: list[tuple[int, int, Tensor]] | None = None,
        decodes: list[tuple[int, int, Tensor]] | None = None,
        padding: int = 0,
    ) -> list[tuple[Tensor, Tensor]]:
        """Each part: (request, first position, ids [n]) -> its logits [n, V] and taps [n, m * D]."""
        chunks, decodes = chunks or [], decodes or []
        parts = [*chunks, *decodes]
        blank = torch.zeros(padding, dtype=torch.int64)
        positions = [torch.arange(start, start + len(ids)) for _, start, ids in parts]
        rows = Rows(
            ids=torch.cat([*(ids for _, _, ids in parts), blank]),
            positions=torch.cat([*positions, blank]),
            slots=blank[:0],  # entries of single tokens: this model has none
            request_slots=torch.tensor([request + 1 for request, _, _ in parts]),
            layout=self.layout(chunks, decodes),
        )
        output = self.target.forward(rows, self.caches)
        counts = [*(len(ids) for _, _, ids in parts), padding]
        taps = output.hidden[:, :0] if output.taps is None else output.taps
        return list(zip(self.target.head(output.hidden).split(counts), taps.split(counts)))[: len(parts)]


def poison(caches: DeepseekV4Caches) -> None:
    for ring in caches.rings:
        ring.rows.fill_(float('nan'))
    for layer in caches.layers:
        for partials in (layer.entries, layer.keys):
            if partials is not None:
                partials.pages.fill_(float('nan'))


# ---------------------------------------------------------------------------------------------------- own models
def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> DeepseekV4Target:
    """The folder's target through the package's own loader, with the taps of its draft if it has one."""
    settings = read_deepseek_v4(read_config(folder), tensor_shapes(folder))
    taps = settings.draft.taps if settings.draft else ()
    target = DeepseekV4Target(settings, taps, 0, SINGLE, dtype, torch.device('cpu'))
    _load(target.weights(), folder, (r'mtp\..*',))
    return target


def load_draft(folder: Path, target: DeepseekV4Target) -> BundledDspark:
    draft = BundledDspark(target.config, target.embedding, target.head, target.dtype, torch.device('cpu'))
    _load(draft.weights(), folder, (r'(?!mtp\.).*',))
    return draft


def _load(destinations: dict[str, Destination], folder: Path, ignore: tuple[str, ...]) -> None:
    loader = WeightLoader(destinations, ignore, str(folder))
    loader.load(plain_tensors(tensors(folder), tensor_shapes(folder), destinations))
    loader.finish()
