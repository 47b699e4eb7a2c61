"""`specdec serve api_server MODEL`: the HTTP server, with LMDeploy's flags.

Flags of LMDeploy's that nothing here can honour stand in a table: accepted at LMDeploy's default, refused by name
otherwise. Next: engine_options.py for the engine's flags, serve/api_server.py for the server.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import engine_options as options
from specdec.engine.logs import set_log_level
from specdec.errors import ConfigError
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.engine.process_client import ProcessClient

SERVER, ANSWERS, SECURITY = 'Server', 'Answers', 'Access'

# flag: LMDeploy's default, what it is about
UNSERVED: dict[str, tuple[Any, str]] = {
    'proxy_url': (None, 'Proxy server to register at.'),
    'allowed_media_domains': (None, 'Media in prompts.'),
    'allow_terminate_by_client': (False, 'GET /terminate.'),
    'empty_init': (False, 'Random weights.'),
    'dllm_block_length': (None, 'Diffusion models.'),
    'dllm_unmasking_strategy': ('low_confidence_dynamic', 'Diffusion models.'),
    'dllm_denoising_steps': (None, 'Diffusion models.'),
    'dllm_confidence_threshold': (0.85, 'Diffusion models.'),
    'enable_return_routed_experts': (False, 'Expert ids in answers.'),
    'distributed_executor_backend': (None, 'Several devices.'),
    'kernel_block_size': (-1, 'Page size of kernels.'),
    'model_format': ('hf', 'Quantisation on load.'),
    'hf_overrides': (None, 'Changes of the model config.'),
    'dp': (1, 'Data parallel ranks.'),
    'enable_microbatch': (False, 'Two half batches.'),
    'enable_eplb': (False, 'Balance of experts.'),
    'role': ('Hybrid', 'Prefill and decode apart.'),
    'migration_backend': ('DLSlime', 'Prefill and decode apart.'),
    'kv_transfer_config': (None, 'Prefill and decode apart.'),
    'piecewise_cudagraph_max_tokens': (None, 'Piecewise CUDA graphs.'),
    'node_rank': (0, 'Several machines.'),
    'nnodes': (1, 'Several machines.'),
    'dist_init_addr': (None, 'Several machines.'),
    'cp': (1, 'TurboMind.'),
    'rope_scaling_factor': (0.0, 'TurboMind.'),
    'num_tokens_per_iter': (0, 'TurboMind.'),
    'max_prefill_iters': (1, 'TurboMind.'),
    'communicator': ('nccl', 'TurboMind.'),
    'moe_a2a_backend': ('default', 'TurboMind.'),
    'vision_max_batch_size': (1, 'Vision towers.'),
}

application = typer.Typer(no_args_is_help=True, help='Serve a model over HTTP.')


@application.callback()
def _serve() -> None:
    """Serve a model over HTTP."""


def _with_unserved_flags(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the flags of UNSERVED, which it never sees: they are checked before it is called."""
    signature = inspect.signature(function, eval_str=True)
    extra = []
    for name, (default, text) in UNSERVED.items():
        kind = str | None if default is None else type(default)
        flags = [f'--{name.replace("_", "-")}'] if isinstance(default, bool) else []
        option = typer.Option(*flags, help=text, rich_help_panel=options.COMPATIBILITY)
        extra.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
        )

    def checked(**arguments: Any) -> None:
        for name, (default, _) in UNSERVED.items():
            if (value := arguments.pop(name)) != default:
                raise ConfigError(name, value, f'not served here; leave it at {default!r}')
        function(**arguments)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in signature.parameters.values()]
    checked.__signature__ = signature.replace(parameters=[*parameters, *extra])
    checked.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, *extra]}
    checked.__name__, checked.__doc__ = function.__name__, function.__doc__
    return checked


@application.command('api_server')
@_with_unserved_flags
def api_server(
    model: options.Model,
    server_name: Annotated[str, typer.Option(help='Address to listen on.', rich_help_panel=SERVER)] = '0.0.0.0',
    server_port: Annotated[
        int | None, typer.Option(help='Port; 23333 if unset, 0 for any free one.', rich_help_panel=SERVER)
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help='Name that requests use; by default MODEL.', rich_help_panel=SERVER)
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(
            help='Requests under way, beyond which 429 is answered; by default 4 batches, at least 256.',
            rich_help_panel=SERVER,
        ),
    ] = None,
    shutdown_seconds: Annotated[
        float, typer.Option(help='How long running requests may go on after SIGTERM.', rich_help_panel=SERVER)
    ] = 30.0,
    keep_alive_seconds: Annotated[
        int,
        typer.Option(
            envvar='UVICORN_TIMEOUT_KEEP_ALIVE', help='How long idle connections stay.', rich_help_panel=SERVER
        ),
    ] = 5,
    log_level: Annotated[
        str, typer.Option(help='CRITICAL, ERROR, WARNING, INFO or DEBUG.', rich_help_panel=SERVER)
    ] = 'WARNING',
    max_log_len: Annotated[
        int | None,
        typer.Option(help='Characters of a prompt that are logged at INFO; by default all.', rich_help_panel=SERVER),
    ] = None,
    disable_fastapi_docs: Annotated[
        bool, typer.Option('--disable-fastapi-docs', help='No /docs, no /openapi.json.', rich_help_panel=SERVER)
    ] = False,
    disable_metrics: Annotated[
        bool, typer.Option('--disable-metrics', help='No /metrics.', rich_help_panel=SERVER)
    ] = False,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(metavar='KEY...', help='Keys, any of which a request must have.', rich_help_panel=SECURITY),
    ] = None,
    ssl: Annotated[
        bool,
        typer.Option('--ssl', help='HTTPS, with the files in SSL_KEYFILE and SSL_CERTFILE.', rich_help_panel=SECURITY),
    ] = False,
    ssl_keyfile: Annotated[
        str | None, typer.Option(envvar='SSL_KEYFILE', help='Private key for --ssl.', rich_help_panel=SECURITY)
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(envvar='SSL_CERTFILE', help='Certificate for --ssl.', rich_help_panel=SECURITY)
    ] = None,
    allow_origins: Annotated[
        list[str] | None,
        typer.Option(metavar='ORIGIN...', help='Origins for CORS; all by default.', rich_help_panel=SECURITY),
    ] = None,
    allow_credentials: Annotated[
        bool, typer.Option('--allow-credentials', help='Credentials for CORS.', rich_help_panel=SECURITY)
    ] = False,
    allow_methods: Annotated[
        list[str] | None,
        typer.Option(metavar='METHOD...', help='Methods for CORS; all by default.', rich_help_panel=SECURITY),
    ] = None,
    allow_headers: Annotated[
        list[str] | None,
        typer.Option(metavar='HEADER...', help='Headers for CORS; all by default.', rich_help_panel=SECURITY),
    ] = None,
    enable_abort_handling: Annotated[
        bool, typer.Option('--enable-abort-handling', help='Serve /abort_request.', rich_help_panel=SECURITY)
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar='FILE', help="Jinja file that replaces the tokenizer's chat template.", rich_help_panel=ANSWERS
        ),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults: 'auto' (the model's generation_config.json), 'lmdeploy' (none), or a folder.",
            rich_help_panel=ANSWERS,
        ),
    ] = 'auto',
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Split reasoning off: 'default' (think tags; also deepseek-r1, qwen-qwq, qwen3).",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="Tool calls: 'qwen' (also qwen2d5, qwen3) or 'qwen3coder'.", rich_help_panel=ANSWERS),
    ] = None,
    logprobs_mode: Annotated[
        str | None,
        typer.Option(
            help="'raw_logprobs', which is also the default, or 'processed_logprobs': of what tokens are drawn from.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    device: options.Device = 'auto',
    dtype: options.Dtype = 'auto',
    session_len: options.SessionLen = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(help='Requests in one step; 256 on CUDA, 16 on CPU.', rich_help_panel=options.ENGINE),
    ] = None,
    cache_max_entry_count: options.CacheMaxEntryCount = 0.8,
    cache_block_seq_len: Annotated[
        int, typer.Option(help='Tokens per cache page.', rich_help_panel=options.ENGINE)
    ] = 64,
    num_gpu_blocks: Annotated[
        int, typer.Option(help='Cache pages (on any device); 0: by memory.', rich_help_panel=options.ENGINE)
    ] = 0,
    max_prefill_token_num: Annotated[
        int | None,
        typer.Option(help='Prompt tokens in one step; 8192 on CUDA, 512 on CPU.', rich_help_panel=options.ENGINE),
    ] = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    eager_mode: options.EagerMode = False,
    prefix_cache_state_budget: Annotated[
        int,
        typer.Option(
            help='States kept for prefix hits, where a model keeps some by slot; 0: by memory.',
            rich_help_panel=options.ENGINE,
        ),
    ] = 0,
    prefix_cache_decode_state_interval: Annotated[
        int, typer.Option(help='Tokens between kept states.', rich_help_panel=options.COMPATIBILITY)
    ] = 0,
    cudagraph_capture_batch_sizes: Annotated[
        list[int] | None,
        typer.Option(metavar='N...', help='Batch sizes of CUDA graphs.', rich_help_panel=options.ENGINE),
    ] = None,
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
    """Serve a model behind an OpenAI-compatible HTTP interface.

    Without a download: specdec serve api_server demo --speculative-algorithm dspark

    Then open the printed address for the chat page, and /docs for the interface.
    """
    _ = trust_remote_code
    options.refuse_other_backends(backend)
    engine_config = options.engine_config(
        adapters=adapters,
        quant_policy=quant_policy,
        device=device,
        dtype=dtype,
        tp=tp,
        rank_timeout=rank_timeout,
        ep=ep,
        session_len=session_len,
        max_batch_size=max_batch_size,
        cache_max_entry_count=cache_max_entry_count,
        block_size=cache_block_seq_len,
        num_gpu_blocks=num_gpu_blocks,
        max_prefill_token_num=max_prefill_token_num,
        enable_prefix_caching=enable_prefix_caching,
        eager_mode=eager_mode,
        prefix_cache_state_budget=prefix_cache_state_budget,
        prefix_cache_decode_state_interval=prefix_cache_decode_state_interval,
        cudagraph_capture_batch_sizes=cudagraph_capture_batch_sizes or None,
        logprobs_mode=logprobs_mode,
        revision=revision,
        download_dir=download_dir,
        language_model_only=language_model_only,
    )
    speculative = options.speculative_config(
        speculative_algorithm,
        speculative_draft_model,
        speculative_num_draft_tokens,
        speculative_dflash_block_size,
        draft_sampling=draft_sampling,
        verify_length=verify_length,
        confidence_threshold=confidence_threshold,
    )
    if ssl and not (ssl_keyfile and ssl_certfile):
        raise ConfigError('ssl', True, 'needs SSL_KEYFILE and SSL_CERTFILE in the environment')
    server = {
        'server_name': server_name,
        'server_port': 23333 if server_port is None else server_port,
        'model_name': model_name,
        'api_keys': tuple(api_keys or ()),
        'ssl_keyfile': ssl_keyfile if ssl else None,
        'ssl_certfile': ssl_certfile if ssl else None,
        'allow_origins': tuple(allow_origins or ('*',)),
        'allow_methods': tuple(allow_methods or ('*',)),
        'allow_headers': tuple(allow_headers or ('*',)),
        'allow_credentials': allow_credentials,
        'max_concurrent_requests': max_concurrent_requests,
        'max_log_len': max_log_len,
        'log_level': log_level,
        'generation_config': generation_config,
        'reasoning_parser': reasoning_parser,
        'tool_call_parser': tool_call_parser,
        'enable_abort_handling': enable_abort_handling,
        'disable_fastapi_docs': disable_fastapi_docs,
        'disable_metrics': disable_metrics,
        'shutdown_seconds': shutdown_seconds,
        'keep_alive_seconds': keep_alive_seconds,
    }
    _run(model, engine_config, speculative, server, chat_template)


def _run(
    model: str,
    engine_config: PytorchEngineConfig,
    speculative: SpeculativeConfig | None,
    server: dict[str, Any],
    chat_template: str | None,
) -> None:
    """Everything that can be refused is refused before the engine loads; the address is taken first."""
    try:
        from specdec.engine.process_client import BuildEngine, ProcessClient
        from specdec.engine.tokenizer import Tokenizer
        from specdec.models.hub import find_target
        from specdec.serve.api_server import create_app, run
        from specdec.serve.config import ServerConfig, bind, url_of
        from specdec.serve.parsers.answer_parser import ParserFactory
    except ModuleNotFoundError as error:
        remedy = f"needs the package {error.name!r}; install specdec with its extra: pip install '.[serve]'"
        raise ConfigError('serve', 'api_server', remedy) from None

    config = ServerConfig(**server)
    ParserFactory(config.reasoning_parser, config.tool_call_parser)
    set_log_level(config.log_level)
    template = options.chat_template_config(chat_template)
    tokenizer = Tokenizer.load(find_target(model, engine_config.revision, engine_config.download_dir), template)
    listener = bind(config)
    typer.echo(f'specdec {__version__}: loading {model}')
    try:
        client = ProcessClient(
            BuildEngine(model, engine_config, speculative), config.log_level, spawns=engine_config.tp > 1
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    try:
        _say_what_was_loaded(client, speculative)
        app = create_app(client, config, template, _settings(client, speculative), tokenizer)
        typer.echo(f'serving {app.state.service.model_name} at {url_of(config, listener)} (API: /docs, Ctrl-C ends)')
        run(app, config, listener)
    finally:
        client.close()


def _say_what_was_loaded(client: 'ProcessClient', speculative: SpeculativeConfig | None) -> None:
    info = client.info
    typer.echo(f'target: {info.folder}, {info.dtype} on {info.device}, vocabulary {info.vocab_size}')
    if speculative is None:
        typer.echo('draft: none, decoding is plain')
    else:
        source = speculative.model or 'packaged or bundled'
        typer.echo(f'draft: {speculative.method}, {source}; {info.num_drafts} drafted tokens verified per step')
    typer.echo(f'memory: {client.memory}')
    typer.echo(f'limits: session_len {info.session_len}, max_batch_size {info.max_batch_size}')


def _settings(client: 'ProcessClient', speculative: SpeculativeConfig | None) -> dict[str, str]:
    """What /metrics says of the engine."""
    info = client.info
    return {
        'device': info.device,
        'dtype': info.dtype,
        'session_len': str(info.session_len),
        'max_batch_size': str(info.max_batch_size),
        'speculative_method': 'none' if speculative is None else speculative.method,
        'num_draft_tokens': str(info.num_drafts),
    }
