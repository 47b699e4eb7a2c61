"""The flags that say which model runs and how, with LMDeploy's names, for every command that starts an engine.

A flag that LMDeploy has and this engine cannot honour is accepted at its default and refused by name otherwise.
Next: messages.py, whose configs check the values.
"""

from typing import Annotated

import typer

from specdec.errors import ConfigError
from specdec.messages import ChatTemplateConfig, PytorchEngineConfig, SpeculativeConfig

ENGINE, SPECULATION, COMPATIBILITY = 'Engine', 'Speculative decoding', "Accepted at LMDeploy's default only"

Model = Annotated[
    str,
    typer.Argument(
        metavar='MODEL', help="Folder in Hugging Face layout, a hub name, or 'demo' for the packaged model."
    ),
]
Backend = Annotated[str, typer.Option(help="Only 'pytorch'.", rich_help_panel=COMPATIBILITY)]
ChatTemplate = Annotated[
    str | None, typer.Option(metavar='FILE', help="Jinja file that replaces the tokenizer's chat template.")
]
Revision = Annotated[str | None, typer.Option(help='Hub revision of MODEL.', rich_help_panel=ENGINE)]
DownloadDir = Annotated[str | None, typer.Option(help='Where hub downloads are kept.', rich_help_panel=ENGINE)]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        '--trust-remote-code', help='Accepted; no code of a checkpoint ever runs.', rich_help_panel=COMPATIBILITY
    ),
]
Adapters = Annotated[
    list[str] | None, typer.Option(help='LoRA adapters (not served here).', rich_help_panel=COMPATIBILITY)
]
Device = Annotated[str, typer.Option(help="'auto' (CUDA if there, else CPU), 'cuda' or 'cpu'.", rich_help_panel=ENGINE)]
EagerMode = Annotated[bool, typer.Option('--eager-mode', help='No CUDA graphs.', rich_help_panel=ENGINE)]
Dtype = Annotated[
    str,
    typer.Option(help="'auto', 'float32', 'bfloat16' or 'float16'; auto is float32 on CPU.", rich_help_panel=ENGINE),
]
Tp = Annotated[
    int, typer.Option(help='Ranks that share every layer, a process and a device each.', rich_help_panel=ENGINE)
]
RankTimeout = Annotated[
    float,
    typer.Option(help='Seconds that ranks wait for one of them before the engine ends.', rich_help_panel=ENGINE),
]
Ep = Annotated[int, typer.Option(help='Expert parallel ranks.', rich_help_panel=COMPATIBILITY)]
SessionLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and answer together; by default the model's, or what fits.", rich_help_panel=ENGINE
    ),
]
CacheMaxEntryCount = Annotated[
    float, typer.Option(help='Share of the free memory that the cache may take, in (0, 1).', rich_help_panel=ENGINE)
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        '--enable-prefix-caching/--no-enable-prefix-caching',
        help='Reuse the cache of prompts that begin alike.',
        rich_help_panel=ENGINE,
    ),
]
QuantPolicy = Annotated[str, typer.Option(help='Cache quantisation.', rich_help_panel=COMPATIBILITY)]
LanguageModelOnly = Annotated[
    bool, typer.Option('--language-model-only', help='Leave out the vision tower.', rich_help_panel=COMPATIBILITY)
]
SpeculativeAlgorithm = Annotated[
    str | None, typer.Option(help="'dflash' or 'dspark'; without it, decoding is plain.", rich_help_panel=SPECULATION)
]
SpeculativeDraftModel = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of the draft; not needed with 'demo'.", rich_help_panel=SPECULATION),
]
SpeculativeNumDraftTokens = Annotated[
    int | None,
    typer.Option(
        help='Drafted tokens verified per step; by default as the draft was trained.', rich_help_panel=SPECULATION
    ),
]
SpeculativeDflashBlockSize = Annotated[
    int | None,
    typer.Option(help='Verified rows per DFlash step: drafted tokens + 1.', rich_help_panel=SPECULATION),
]

DraftSampling = Annotated[
    str | None,
    typer.Option(
        help="How drafts of sampling requests are drawn: 'coupled' (the default), 'greedy' or 'probabilistic'.",
        rich_help_panel=SPECULATION,
    ),
]
VerifyLength = Annotated[
    str | None,
    typer.Option(
        help="Drafts verified per step: 'fixed' (the default: all), 'threshold', or 'adaptive' (as many as pay).",
        rich_help_panel=SPECULATION,
    ),
]
ConfidenceThreshold = Annotated[
    float | None,
    typer.Option(
        help='With --verify-length threshold: a block is cut before the first draft whose confidence is below this.',
        rich_help_panel=SPECULATION,
    ),
]


def refuse_other_backends(backend: str) -> None:
    if backend != 'pytorch':
        raise ConfigError('backend', backend, "only 'pytorch' is served here")


def engine_config(
    *,
    adapters: list[str] | None,
    quant_policy: str,
    device: str,
    **settings: object,
) -> PytorchEngineConfig:
    """The engine's settings from flags; those that share their name with a field are passed on as they are."""
    if adapters:
        raise ConfigError('adapters', adapters, 'LoRA adapters are not served here; leave the flag out')
    if quant_policy not in ('0', 'none'):
        raise ConfigError('quant_policy', quant_policy, "the cache is not quantised here; leave it at 'none'")
    return PytorchEngineConfig(device_type=device, **settings)


def speculative_config(
    algorithm: str | None,
    draft_model: str | None,
    num_draft_tokens: int | None,
    dflash_block_size: int | None,
    **ours: str | float | None,
) -> SpeculativeConfig | None:
    """ConfigError for a draft without an algorithm. `ours`: fields named like their flags, None for the default."""
    if algorithm is not None:
        given = {name: value for name, value in ours.items() if value is not None}
        return SpeculativeConfig(algorithm, draft_model or '', num_draft_tokens, dflash_block_size, **given)
    flags = {
        'speculative_draft_model': draft_model,
        'speculative_num_draft_tokens': num_draft_tokens,
        'speculative_dflash_block_size': dflash_block_size,
        **ours,
    }
    for name, value in flags.items():
        if value is not None:
            raise ConfigError(name, value, 'needs --speculative-algorithm dflash or dspark')
    return None


def chat_template_config(chat_template: str | None) -> ChatTemplateConfig | None:
    return None if chat_template is None else ChatTemplateConfig(chat_template)
