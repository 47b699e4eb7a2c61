"""`python -m tests.helpers.echo_server FOLDER name=value ...`: the real server around the echo engine.

Names are ServerConfig's, and `session_len`, `max_batch_size` of the engine.
"""

import ast
import sys

from specdec.engine.process_client import ProcessClient
from specdec.serve.api_server import create_app, run
from specdec.serve.config import ServerConfig, bind, url_of
from tests.helpers.echo_engine import BuildEcho


def main() -> None:
    folder, *pairs = sys.argv[1:]
    settings = {name: ast.literal_eval(value) for name, _, value in (pair.partition('=') for pair in pairs)}
    engine = {name: settings.pop(name) for name in ('session_len', 'max_batch_size') if name in settings}
    config = ServerConfig(**{'server_name': '127.0.0.1', 'server_port': 0, **settings})
    listener = bind(config)
    client = ProcessClient(BuildEcho(folder, **engine), 'INFO')
    app = create_app(client, config)
    print(f'serving echo at {url_of(config, listener)}')
    run(app, config, listener)


if __name__ == '__main__':
    main()
