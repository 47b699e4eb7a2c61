"""`specdec chat MODEL`: a conversation in the terminal, streamed, with each answer's speed and accepted length.

Next: engine_options.py for the flags, pipeline.py for what answers.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, TextIO

import typer
from rich.console import Console

from specdec import GenerationConfig, Pipeline, Response, pipeline
from specdec.cli import engine_options as options
from specdec.pipeline import Session

INTRODUCTION = "Two line breaks send a message. 'end' forgets the conversation, 'exit' leaves, Ctrl-C stops an answer."


def chat(
    model: options.Model,
    chat_template: options.ChatTemplate = None,
    max_new_tokens: Annotated[int, typer.Option(help='Longest answer.')] = 4096,
    greedy: Annotated[bool, typer.Option('--greedy', help='Take the likeliest token instead of sampling.')] = False,
    seed: Annotated[int | None, typer.Option(help='Makes sampled answers repeatable.')] = None,
    device: options.Device = 'auto',
    dtype: options.Dtype = 'auto',
    session_len: options.SessionLen = None,
    cache_max_entry_count: options.CacheMaxEntryCount = 0.8,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    eager_mode: options.EagerMode = False,
    revision: options.Revision = None,
    download_dir: options.DownloadDir = None,
    speculative_algorithm: options.SpeculativeAlgorithm = None,
    speculative_draft_model: options.SpeculativeDraftModel = None,
    speculative_num_draft_tokens: options.SpeculativeNumDraftTokens = None,
    speculative_dflash_block_size: options.SpeculativeDflashBlockSize = None,
    draft_sampling: options.DraftSampling = None,
    verify_length: options.VerifyLength = None,
    confidence_threshold: options.ConfidenceThreshold = None,
    backend: options.Backend = 'pytorch',
    trust_remote_code: options.TrustRemoteCode = False,
    adapters: options.Adapters = None,
    tp: options.Tp = 1,
    rank_timeout: options.RankTimeout = 60.0,
    ep: options.Ep = 1,
    quant_policy: options.QuantPolicy = 'none',
    language_model_only: options.LanguageModelOnly = False,
) -> None:
    """Talk to a model in the terminal.

    Write a message, then an empty line to send it. The answer streams; the line below it tells its speed.

    Try it without any download: specdec chat demo --speculative-algorithm dspark
    """
    options.refuse_other_backends(backend)
    gen_config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=not greedy, random_seed=seed)
    model_pipeline = pipeline(
        model,
        options.engine_config(
            adapters=adapters,
            quant_policy=quant_policy,
            device=device,
            dtype=dtype,
            tp=tp,
            rank_timeout=rank_timeout,
            ep=ep,
            session_len=session_len,
            cache_max_entry_count=cache_max_entry_count,
            enable_prefix_caching=enable_prefix_caching,
            eager_mode=eager_mode,
            revision=revision,
            download_dir=download_dir,
            language_model_only=language_model_only,
        ),
        options.chat_template_config(chat_template),
        trust_remote_code=trust_remote_code,
        speculative_config=options.speculative_config(
            speculative_algorithm,
            speculative_draft_model,
            speculative_num_draft_tokens,
            speculative_dflash_block_size,
            draft_sampling=draft_sampling,
            verify_length=verify_length,
            confidence_threshold=confidence_threshold,
        ),
    )
    with model_pipeline:
        converse(model_pipeline, gen_config, Console(highlight=False), sys.stdin)


def converse(pipe: Pipeline, gen_config: GenerationConfig, console: Console, lines: TextIO) -> None:
    """Answers messages until 'exit', or until there are no more lines."""
    console.print(INTRODUCTION, style='dim')
    session = pipe.session()
    for message in messages(lines, console):
        if message == 'exit':
            return
        if message == 'end':
            session.reset()
            console.print('The conversation is forgotten.', style='dim')
        elif message.startswith('/image'):
            console.print('Images cannot be served; models here read text only.', style='yellow')
        else:
            answer(pipe, session, message, gen_config, console)


def messages(lines: Iterable[str], console: Console) -> Iterator[str]:
    """Messages as they are typed: lines up to an empty one. 'exit' and 'end' need none."""
    typed: list[str] = []
    console.print('\n>>> ', end='', markup=False)
    for line in lines:
        typed.append(line.rstrip('\r\n'))
        if typed[-1] and typed not in (['exit'], ['end']):
            continue
        message = '\n'.join(typed).strip('\n')
        typed.clear()
        if message.strip():
            yield message
        console.print('\n>>> ', end='', markup=False)
    if '\n'.join(typed).strip():
        yield '\n'.join(typed).strip('\n')


def answer(pipe: Pipeline, session: Session, message: str, gen_config: GenerationConfig, console: Console) -> None:
    """Streams one answer; Ctrl-C stops it. An answer that fails says why, and the conversation goes on."""
    pieces = pipe.chat(message, session, gen_config, stream_response=True)
    start = time.perf_counter()
    try:
        for piece in pieces:
            console.print(piece.text, end='', markup=False, emoji=False, soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()
    seconds = time.perf_counter() - start
    console.print()
    console.print(summary(session.response, seconds), style='dim', markup=False)


def summary(response: Response, seconds: float) -> str:
    if response.finish_reason == 'error':
        return f'error: {response.error_message}'
    parts = [f'{response.generate_token_len} tokens', f'{response.generate_token_len / seconds:.1f} tokens/s']
    if response.speculation.drafted:
        parts.append(f'mean accepted length {response.speculation.mean_accepted_length:.2f}')
    return f'[{response.finish_reason or "stopped"}: {", ".join(parts)}]'
