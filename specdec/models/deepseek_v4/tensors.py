"""The tensors of a DeepSeek-V4 checkpoint: one set of names for every layout, quantised weights as numbers.

Names are the release's. transformers writes two more layouts, its modules' own names (experts stacked) and what
save_pretrained makes of them; both are renamed here. Formulas: docs/deepseek_v4.md, section "Weights". Next: block.py,
whose layers say where tensors go.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.tensor_table import TensorInfo

BLOCK = 128  # rows and columns of a weight that share an FP8 scale
GROUP = 32  # columns of a row that share an FP4 scale
PACKED = ('I8', 'U8')  # how FP4 pairs are stored
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

TOP = {
    'embed_tokens.weight': 'embed.weight',
    'lm_head.weight': 'head.weight',
    'hc_head.hc_fn': 'hc_head_fn',
    'hc_head.hc_base': 'hc_head_base',
    'hc_head.hc_scale': 'hc_head_scale',
}
LAYER = re.compile(r'((?:layers|mtp)\.\d+)\.(.+)')
# In a layer, in this order: the indexer's compressor before the compressor, both before plain attention names.
RENAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r'^self_attn\.compressor\.indexer\.scorer\.weights_proj\.', 'attn.indexer.weights_proj.'),
        (r'^self_attn\.compressor\.indexer\.q_b_proj\.', 'attn.indexer.wq_b.'),
        (r'^self_attn\.compressor\.indexer\.', 'attn.indexer.compressor.'),
        (r'^self_attn\.', 'attn.'),
        (r'^(attn\..*compressor)\.kv_proj\.', r'\1.wkv.'),
        (r'^(attn\..*compressor)\.gate_proj\.', r'\1.wgate.'),
        (r'^(attn\..*compressor)\.kv_norm\.', r'\1.norm.'),
        (r'^(attn\..*compressor)\.position_bias$', r'\1.ape'),
        (r'^attn\.q_a_proj\.', 'attn.wq_a.'),
        (r'^attn\.q_b_proj\.', 'attn.wq_b.'),
        (r'^attn\.q_a_norm\.', 'attn.q_norm.'),
        (r'^attn\.kv_proj\.', 'attn.wkv.'),
        (r'^attn\.norm\.', 'attn.kv_norm.'),
        (r'^attn\.o_a_proj\.', 'attn.wo_a.'),
        (r'^attn\.o_b_proj\.', 'attn.wo_b.'),
        (r'^attn\.sinks$', 'attn.attn_sink'),
        (r'^input_layernorm\.', 'attn_norm.'),
        (r'^post_attention_layernorm\.', 'ffn_norm.'),
        (r'^(attn|ffn)_hc\.(fn|base|scale)$', r'hc_\1_\2'),
        (r'^mlp\.', 'ffn.'),
        (r'^ffn\.gate\.e_score_correction_bias$', 'ffn.gate.bias'),
        (r'^ffn\.gate\.tie2eid$', 'ffn.gate.tid2eid'),
        (r'^ffn\.shared_experts\.gate_proj\.', 'ffn.shared_experts.w1.'),
        (r'^ffn\.shared_experts\.down_proj\.', 'ffn.shared_experts.w2.'),
        (r'^ffn\.shared_experts\.up_proj\.', 'ffn.shared_experts.w3.'),
        (r'^(ffn\.experts\.(?:gate_up|down)_proj)_scale_inv$', r'\1.scale'),
        (r'^(ffn\.experts\.(?:gate_up|down)_proj)$', r'\1.weight'),
        (r'\.weight_scale_inv$', '.scale'),
    )
)


def release_name(stored: str) -> str:
    """The release's name of a tensor in any layout; stacked experts become `ffn.experts.gate_up_proj.weight`."""
    name = stored.removeprefix('model.')
    layer = LAYER.fullmatch(name)
    if layer is None:
        return TOP.get(name, name)
    leaf = layer[2]
    for pattern, replacement in RENAMES:
        leaf = pattern.sub(replacement, leaf)
    return f'{layer[1]}.{leaf}'


def scale_values(scale: Tensor) -> Tensor:
    """Block scales as fp32. e8m0 bytes b are 2^(b - 127): read as bits, since casting them as numbers loses them."""
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8, torch.int8):
        bits = scale.view(torch.uint8).to(torch.int32)
        small = torch.full((), 2.0**-127)  # byte 0: below fp32's normal numbers
        values = torch.where(bits == 0, small, (bits << 23).view(torch.float32))
        return torch.where(bits == 255, float('nan'), values)
    return scale.float()


def dequantise_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [..., O, I] e4m3, scale [..., ceil(O / 128), ceil(I / 128)] -> fp32."""
    rows, columns = weight.shape[-2:]
    wide = scale_values(scale).repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return weight.float() * wide


def dequantise_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [..., O, I / 2] bytes, low nibble first, scale [..., O, I / 32] -> fp32 [..., O, I]."""
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    packed = weight.view(torch.uint8)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return table[nibbles.long()] * scale_values(scale).repeat_interleave(GROUP, -1)


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 or FP4, told apart by the stored dtype."""
    return (dequantise_fp8 if weight.dtype == torch.float8_e4m3fn else dequantise_fp4)(weight, scale)


def plain_tensors(
    pairs: Iterable[tuple[str, Tensor]], shapes: Mapping[str, TensorInfo], taken: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(release name, tensor) with weights dequantised to fp32 and stacked experts taken apart.

    A weight whose scale is among the names `taken` stays as it is; both come as bytes. `shapes` are the same files'
    headers, which tell which weights have a scale. Others wait for theirs, so that memory holds one shard's tensors at
    most if the two share one, as they do in releases.
    """
    names = [release_name(stored) for stored in shapes]
    scaled = {name.removesuffix('.scale') for name in names if name.endswith('.scale')}
    waiting: dict[str, Tensor] = {}
    for stored, tensor in pairs:
        name = release_name(stored)
        base, _, kind = name.rpartition('.')
        if base not in scaled or kind not in ('weight', 'scale'):
            yield from _apart(name, tensor, None)
        elif f'{base}.scale' in taken:
            yield name, tensor.view(torch.uint8)
        elif base not in waiting:
            waiting[base] = tensor
        else:
            other = waiting.pop(base)
            weight, scale = (tensor, other) if kind == 'weight' else (other, tensor)
            yield from _apart(f'{base}.weight', weight, scale)
    for base in waiting:
        raise CheckpointError(f'{base}.weight', f'{base}.scale', 'the files hold only one of the two')


def _apart(name: str, weight: Tensor, scale: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The tensor, or the experts that are stacked in it, one after the other."""
    prefix, parts = _stacked(name)
    if not parts:
        yield name, weight if scale is None else dequantise(weight, scale)
        return
    for e in range(weight.shape[0]):
        expert = weight[e] if scale is None else dequantise(weight[e], scale[e])
        for part, rows in zip(parts, expert.chunk(len(parts))):
            yield f'{prefix}{e}.{part}.weight', rows


def _stacked(name: str) -> tuple[str, tuple[str, ...]]:
    """What stands before an expert's number, and its matrices by rows; nothing unless the tensor is a stack."""
    for ending, parts in (('gate_up_proj.weight', ('w1', 'w3')), ('down_proj.weight', ('w2',))):
        if name.endswith(f'.experts.{ending}'):
            return name.removesuffix(ending), parts
    return '', ()


def plain_shapes(shapes: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Headers as `plain_tensors` will deliver them: shapes unpacked, scales gone, dtypes as stored."""
    found: dict[str, TensorInfo] = {}
    for stored, info in shapes.items():
        name, shape = release_name(stored), info.shape
        if name.endswith('.scale'):
            continue
        if info.dtype in PACKED and name.endswith('.weight'):
            shape = (*shape[:-1], 2 * shape[-1])
        prefix, parts = _stacked(name)
        if not parts:
            found[name] = TensorInfo(shape, info.dtype)
            continue
        rows = TensorInfo((shape[1] // len(parts), shape[2]), info.dtype)
        found |= {f'{prefix}{e}.{part}.weight': rows for e in range(shape[0]) for part in parts}
    return found
