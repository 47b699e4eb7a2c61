"""`specdec inspect`: what the loader understands of a checkpoint folder, from its JSON and tensor headers alone.

Read it before a large model is loaded, or to find out why one is refused. Next: models/checkpoint.py, which does the
reading.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.errors import ConfigError
from specdec.models.checkpoint import looks_like_draft, parse_draft, read_target, tensor_shapes
from specdec.models.configs import (
    DecoderConfig,
    DraftConfig,
    HybridConfig,
    LayerRule,
    MoeConfig,
    Qwen3Config,
    TargetConfig,
)
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.target import implied_shapes
from specdec.models.deepseek_v4.tensors import plain_shapes
from specdec.models.draft_dialects import check_fit
from specdec.models.hub import check_has_tokenizer, resolve_model
from specdec.models.hybrid.target import implied_shapes as hybrid_shapes
from specdec.models.tensor_table import (
    Shape,
    TensorAccount,
    TensorInfo,
    account,
    draft_tensor_shapes,
    ignored_draft,
    ignored_target,
    target_tensor_shapes,
)
from specdec.models.weights import listed

Rows = list[tuple[str, str]]

DIALECT_NAMES = {'zlab': 'z-lab', 'deepspec': 'DeepSpec', 'speculators': 'Speculators', 'specforge': 'SpecForge'}
KIND_NAMES = {'dflash': 'DFlash', 'dspark': 'DSpark'}


@dataclass(frozen=True, slots=True)
class Report:
    """What `inspect` found. `misfit`: why it does not go with the target; `damage`: what is wrong with its tensors,
    or what else it lacks."""

    folder: str
    config: TargetConfig | DraftConfig
    tensors: TensorAccount
    target: str | None = None
    misfit: str | None = None
    damage: str | None = None

    @property
    def problem(self) -> str | None:
        return self.misfit or self.damage


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar='CHECKPOINT', help='Folder (or hub name) of a target or a draft.')
    ],
    target: Annotated[
        str | None, typer.Option(metavar='TARGET', help='For a draft: the target that it should fit.')
    ] = None,
    as_json: Annotated[bool, typer.Option('--json', help='Write one JSON object instead of a table.')] = False,
    revision: Annotated[str | None, typer.Option(help='Hub revision of CHECKPOINT.')] = None,
    download_dir: Annotated[str | None, typer.Option(help='Where hub downloads are kept.')] = None,
) -> None:
    """Show what specdec understands of a checkpoint, without loading its weights.

    For a draft: its dialect, how its conventions were read, which tensors are used, and whether it fits --target.

    Exit status 1, and one line on stderr, if it cannot be served.
    """
    try:
        folder = resolve_model(checkpoint, revision, download_dir)
        report = examine(folder, None if target is None else resolve_model(target, None, download_dir))
    except ConfigError as error:
        typer.echo(f'error: {error}', err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(as_dictionary(report), indent=2))
    else:
        _show(report)
    if report.problem is not None:
        typer.echo(f'error: {report.problem}', err=True)
        raise typer.Exit(1)


def examine(folder: Path, target: Path | None = None) -> Report:
    """Read a checkpoint folder. Raises ConfigError where not even its config is served."""
    if looks_like_draft(folder):
        config, found = parse_draft(folder)
        tensors = account(found, draft_tensor_shapes(config), ignored_draft(config))
        damage = _objection(lambda: tensors.check(str(folder)))
        if target is None:
            return Report(str(folder), config, tensors, damage=damage)
        wanted = read_target(target)
        misfit = _objection(lambda: check_fit(config, wanted, str(folder)))
        return Report(str(folder), config, tensors, str(target), misfit, damage)
    if target is not None:
        raise ConfigError('target', str(target), f'goes with a draft, and {folder} is none')
    served = read_target(folder)
    tensors = account_target(folder, served)
    damage = _objection(lambda: tensors.check(str(folder))) or _objection(lambda: check_has_tokenizer(folder))
    return Report(str(folder), served, tensors, damage=damage)


def account_target(folder: Path, config: TargetConfig) -> TensorAccount:
    """A target's headers against its config; heads in its checkpoint are part of it."""
    found = tensor_shapes(folder)
    if isinstance(config, DeepseekV4Config):
        return account(plain_shapes(found), implied_shapes(config), ignored_target(config))
    if isinstance(config, HybridConfig):
        return account(found, hybrid_shapes(config), ignored_target(config))
    assert isinstance(config, Qwen3Config), 'every kind of target has its table'
    return account(found, target_tensor_shapes(config), ignored_target(config))


def _objection(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def as_dictionary(report: Report) -> dict[str, Any]:
    """The report for `--json`; sizes in bytes."""
    tensors = report.tensors
    return {
        'folder': report.folder,
        'kind': report.config.kind if isinstance(report.config, DraftConfig) else 'target',
        'config': asdict(report.config),
        'tensors': {
            'used': {'count': len(tensors.used), 'bytes': _num_bytes(tensors.used.values())},
            'ignored': sorted(tensors.ignored),
            'unexpected': sorted(tensors.unexpected),
            'missing': sorted(tensors.missing),
            'misshapen': {name: {'found': f, 'implied': i} for name, (f, i) in tensors.misshapen.items()},
        },
        'target': report.target,
        'served': report.problem is None,
        'problem': report.problem,
    }


def _show(report: Report) -> None:
    config = report.config
    rows = describe(config)
    if report.target is not None:
        rows.append(('fits the target', 'no' if report.misfit else f'yes, {report.target}'))
    sections = [('understood', [('folder', report.folder), *rows]), ('tensors', describe_tensors(report.tensors))]
    (_show_table if sys.stdout.isatty() else _show_plain)(sections)


def _show_table(sections: list[tuple[str, Rows]]) -> None:
    console = Console()
    for title, rows in sections:
        table = Table(title=title, title_justify='left', show_header=False)
        table.add_column(style='bold', no_wrap=True)
        table.add_column(overflow='fold')
        for label, text in rows:
            table.add_row(label, escape(text))
        console.print(table)


def _show_plain(sections: list[tuple[str, Rows]]) -> None:
    for _, rows in sections:
        for label, text in rows:
            typer.echo(f'{label}: {text}')


def describe(config: TargetConfig | DraftConfig) -> Rows:
    """A config in words, as (label, text)."""
    if isinstance(config, DraftConfig):
        return describe_draft(config)
    if isinstance(config, DeepseekV4Config):
        return describe_deepseek_v4(config)
    if isinstance(config, HybridConfig):
        return describe_hybrid(config)
    assert isinstance(config, Qwen3Config), 'every kind of target has its words'
    return describe_target(config)


def describe_deepseek_v4(config: DeepseekV4Config) -> Rows:
    """Its config in words, the bundled heads included."""
    counts = {ratio: config.ratios.count(ratio) for ratio in (0, 4, 128)}
    heads = 'none'
    if config.classic_mtp:
        heads = 'a classic MTP layer, ignored'
    if config.draft is not None:
        draft = config.draft
        heads = (
            f'DSpark, {draft.num_stages} stages, {draft.block_rows} proposals, taps {_numbers(draft.taps)}, '
            f'Markov rank {draft.markov_rank}, {"with" if draft.has_confidence else "without"} confidence head'
        )
    return [
        ('kind', f'target, {config.architecture}'),
        ('layers', f'{config.num_layers} of hidden size {config.hidden_size}, {config.streams} residual streams'),
        ('attention', f'{config.num_heads} heads of {config.head_dim}, window {config.window}'),
        (
            'compression',
            f'none in {counts[0]} layers, by 4 in {counts[4]} ({config.index_topk} entries chosen), '
            f'by 128 in {counts[128]}',
        ),
        (
            'experts',
            f'{config.num_experts} of size {config.intermediate_size}, {config.experts_per_token} per token and one '
            f'shared; the first {config.hash_layers} layers choose by token id',
        ),
        ('positions', f'{config.max_position}, rope theta {config.rope.theta:g} and {config.compress_rope.theta:g}'),
        ('vocabulary', str(config.vocab_size)),
        ('dtype', config.dtype),
        ('bundled draft', heads),
    ]


def _numbers(values: tuple[int, ...]) -> str:
    return ', '.join(map(str, values))


def describe_target(config: Qwen3Config) -> Rows:
    """A target's config in words, as (label, text)."""
    moe = config.moe
    rows = [('kind', f'target, {config.architecture}'), *_describe_decoder(config.decoder, config.dtype)]
    if moe is not None:
        rows.append(('experts', _describe_experts(moe)))
    rules = tuple(LayerRule(causal=True, window=window) for window in config.windows)
    return [
        *rows,
        ('attention', _describe_rules(rules)),
        ('head', 'the embedding (tied)' if config.tie_embeddings else 'its own'),
    ]


def describe_hybrid(config: HybridConfig) -> Rows:
    """Its config in words, with what a request's state takes."""
    decoder, heads, moe = config.decoder, config.heads, config.moe
    rows = [('kind', f'target, {config.architecture}'), *_describe_decoder(decoder, config.dtype)]
    if moe is not None:
        rows.append(('experts', _describe_experts(moe)))
    attending = sum(config.attends)
    state = heads.value_heads * heads.key_dim * heads.value_dim * 4 * (config.num_layers - attending)
    return [
        *rows,
        ('attention', f'gated, in {attending} layers; {decoder.rope.partial:.0%} of each head is rotated'),
        (
            'recurrence',
            f'gated delta rule in {config.num_layers - attending} layers: {heads.key_heads} key heads of '
            f'{heads.key_dim}, {heads.value_heads} value heads of {heads.value_dim}, convolution over '
            f'{config.conv_width} rows; {state / 2**20:.1f} MiB of state per request',
        ),
        ('head', 'the embedding (tied)' if config.tie_embeddings else 'its own'),
    ]


def _describe_experts(moe: MoeConfig) -> str:
    shared = '' if moe.shared_size is None else f' and a gated shared one of size {moe.shared_size}'
    return (
        f'{moe.num_experts} of size {moe.intermediate_size}, {moe.experts_per_token} per token{shared}'
        f'{", weights renormalised" if moe.norm_topk else ""}, in {sum(moe.sparse_layers)} layers'
    )


def describe_draft(config: DraftConfig) -> Rows:
    """A draft's normalised config in words, as (label, text)."""
    layout = 'row k predicts the token after it' if config.anchor_predicts else 'row k fills in itself, row 0 nothing'
    rows = [
        ('kind', f'{KIND_NAMES[config.kind]} draft, {DIALECT_NAMES[config.dialect]} dialect'),
        *_describe_decoder(config.decoder, config.dtype),
        ('attention', _describe_rules(config.rules)),
        ('taps', _describe_taps(config)),
        ('block', f'{config.block_rows} rows, {config.num_proposals} proposals: {layout}'),
        ('drafted tokens', f'{config.default_tokens} per step unless told otherwise'),
        ('mask id', f'{config.mask_id}{", with its own embedding" if config.mask_embedding else ""}'),
        ('Markov head', f'{config.markov.kind}, rank {config.markov.rank}' if config.markov else 'none'),
        ('confidence head', _describe_confidence(config.confidence_with_markov)),
        ('output vocabulary', f'{config.draft_vocab_size}{" (reduced)" if config.reduced_vocabulary else ""}'),
        ('embedding', "in the file, dropped if equal to the target's" if config.own_embedding else "the target's"),
        ('head', _describe_head(config)),
    ]
    scales = {'embedding x': config.input_scale, 'logits x': config.output_multiplier}
    rows += [('scale', f'{name} {value:g}') for name, value in scales.items() if value != 1]
    if config.softcap is not None:
        rows.append(('scale', f'logits capped at {config.softcap:g} (tanh)'))
    return rows


def describe_tensors(tensors: TensorAccount) -> Rows:
    """The tensor account, as (label, text)."""
    rows = [('tensors used', _counted(tensors.used))]
    ignored = _counted(tensors.ignored)
    rows.append(('tensors ignored', f'{ignored}: {listed(sorted(tensors.ignored))}' if tensors.ignored else ignored))
    rows.append(('tensors missing', _counted_names(tensors.missing)))
    rows.append(
        (
            'tensors unexpected',
            f'{_counted(tensors.unexpected)}: {listed(sorted(tensors.unexpected))}' if tensors.unexpected else '0',
        )
    )
    for name, (found, implied) in sorted(tensors.misshapen.items())[:5]:
        rows.append(('tensor misshapen', f'{name} is {list(found)}, the config implies {list(implied)}'))
    return rows


def _describe_decoder(decoder: DecoderConfig, dtype: str) -> Rows:
    rope = decoder.rope
    scaling = '' if rope.kind == 'default' else f', {rope.kind} x{rope.factor:g}'
    if rope.original_max_position is not None:
        scaling += f' from {rope.original_max_position}'
    bias = ', biases' if decoder.attention_bias else ''
    return [
        ('layers', f'{decoder.num_layers} of hidden size {decoder.hidden_size}, MLP {decoder.intermediate_size}'),
        ('heads', f'{decoder.num_heads} query, {decoder.num_kv_heads} key-value, of {decoder.head_dim}{bias}'),
        ('positions', f'{decoder.max_position}, rope theta {rope.theta:g}{scaling}'),
        ('vocabulary', str(decoder.vocab_size)),
        ('dtype', dtype),
    ]


def _describe_rules(rules: tuple[LayerRule, ...]) -> str:
    """'4 layers causal, window 2048; 1 layer both ways, full', in the order of first appearance."""
    parts = []
    for rule in dict.fromkeys(rules):
        count = rules.count(rule)
        sight = 'causal' if rule.causal else 'whole block'
        reach = 'full context' if rule.window is None else f'window {rule.window}'
        parts.append(f'{count} layer{"s" if count > 1 else ""} {sight}, {reach}')
    return '; '.join(parts)


def _describe_confidence(with_markov: bool | None) -> str:
    if with_markov is None:
        return 'none'
    return 'reads hidden state and Markov embedding' if with_markov else 'reads the hidden state'


def _describe_head(config: DraftConfig) -> str:
    if config.reduced_vocabulary:
        return 'its own'
    return "in the file, dropped if equal to the target's" if config.own_head else "the target's"


def _describe_taps(config: DraftConfig) -> str:
    parts = ['embedding' if tap < 0 else f'layer {tap}' for tap in config.taps]
    total = '' if config.num_target_layers is None else f' of {config.num_target_layers}'
    return f'target states after {", ".join(parts)} (counted from 0{total})'


def _counted(tensors: dict[str, TensorInfo]) -> str:
    return f'{len(tensors)} ({_size(_num_bytes(tensors.values()))})' if tensors else '0'


def _counted_names(missing: dict[str, Shape]) -> str:
    return f'{len(missing)}: {listed(sorted(missing))}' if missing else '0'


def _num_bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(info.num_bytes for info in infos)


def _size(num_bytes: float) -> str:
    for unit in ('B', 'KiB', 'MiB'):
        if num_bytes < 1024:
            return f'{num_bytes:.3g} {unit}' if unit != 'B' else f'{num_bytes} B'
        num_bytes /= 1024
    return f'{num_bytes:.3g} GiB'
