"""How the HTTP server runs, as values; cli/serve.py makes them from flags. Next: api_server.py."""

import ipaddress
import socket
from dataclasses import dataclass

from specdec.errors import ConfigError

DEFAULT_PORT = 23333


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """LMDeploy's names. `max_concurrent_requests` None: four batches, at least 256.

    `shutdown_seconds`: how long running requests may go on after SIGTERM before they are aborted.
    """

    server_name: str = '0.0.0.0'
    server_port: int = DEFAULT_PORT
    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allow_origins: tuple[str, ...] = ('*',)
    allow_methods: tuple[str, ...] = ('*',)
    allow_headers: tuple[str, ...] = ('*',)
    allow_credentials: bool = False
    max_concurrent_requests: int | None = None
    max_log_len: int | None = None
    log_level: str = 'WARNING'
    generation_config: str = 'auto'
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_abort_handling: bool = False
    disable_fastapi_docs: bool = False
    disable_metrics: bool = False
    shutdown_seconds: float = 30.0
    keep_alive_seconds: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.server_port < 65536:
            raise ConfigError('server_port', self.server_port, 'must lie in [0, 65536); 0 picks a free port')
        if self.max_concurrent_requests is not None and self.max_concurrent_requests < 1:
            raise ConfigError('max_concurrent_requests', self.max_concurrent_requests, 'must be at least 1')
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError('max_log_len', self.max_log_len, 'must be at least 0')
        if not self.shutdown_seconds >= 0:
            raise ConfigError('shutdown_seconds', self.shutdown_seconds, 'must be at least 0')
        if '' in self.api_keys:
            raise ConfigError('api_keys', '', 'a key cannot be empty')

    @property
    def is_encrypted(self) -> bool:
        return self.ssl_certfile is not None


def bind(config: ServerConfig) -> socket.socket:
    """The listening address, taken before anything is loaded. ConfigError if it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.server_name, config.server_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError('server_name', config.server_name, f'is no address here ({error})') from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError('server_port', config.server_port, f'cannot be had ({error.strerror})') from None
    listener.set_inheritable(False)
    return listener


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """An address that a browser on this machine can open."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = 'localhost'
    elif address.version == 6:
        host = f'[{host}]'
    return f'http{"s" if config.is_encrypted else ""}://{host}:{port}'
