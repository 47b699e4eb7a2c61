"""Server processes for tests: started on a free port of the loopback, stopped by SIGTERM, watched from outside."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import httpx
import psutil

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 120
STOP_SECONDS = 60


class ServerProcess:
    """A command that prints 'serving NAME at URL' when it is ready; `log` has everything it writes."""

    def __init__(self, *command: str, wait: bool = True, **environment: str) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        settings = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': '1', 'OMP_NUM_THREADS': '1'}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=settings | environment,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = ''
        if wait:
            self.wait_until_ready()

    @classmethod
    def demo(cls, *flags: str, **environment: str) -> 'ServerProcess':
        """The packaged model behind the real command; with the DSpark draft unless `flags` name a method."""
        draft = () if '--speculative-algorithm' in flags else ('--speculative-algorithm', 'dspark')
        address = ('--server-name', '127.0.0.1', '--server-port', '0')
        return cls('-m', 'specdec.cli.main', 'serve', 'api_server', 'demo', *address, *draft, *flags, **environment)

    @classmethod
    def echo(cls, folder: Path, **settings: object) -> 'ServerProcess':
        """The real server around an engine that repeats its prompt; see echo_server.py."""
        flags = [f'{name}={value!r}' for name, value in settings.items()]
        return cls('-m', 'tests.helpers.echo_server', str(folder), *flags)

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: self._address() is not None or self.process.poll() is not None, START_SECONDS)
        address = self._address()
        assert address is not None, self.log
        self.url = address
        self.wait_for(self._answers)

    def _address(self) -> str | None:
        found = re.search(r'^serving \S+ at (\S+)', self.log, re.M)
        return found and found[1]

    def _answers(self) -> bool:
        try:
            return httpx.get(f'{self.url}/health', verify=False).status_code < 600
        except httpx.TransportError:
            assert self.process.poll() is None, self.log
            return False

    @property
    def log(self) -> str:
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors='replace')

    def wait_for(self, condition: Callable[[], object], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f'not within {seconds} s; the server says:\n{self.log}'
            time.sleep(0.05)

    # --------------------------------------------------------------------------------------------- from outside
    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if 'spawn_main' in ' '.join(child.cmdline())]
        return found

    def cpu_seconds(self) -> tuple[float, float]:
        """(of the server, of the engine)"""
        times = [process.cpu_times() for process in (psutil.Process(self.process.pid), self.engine)]
        return times[0].user + times[0].system, times[1].user + times[1].system

    def rss(self) -> int:
        """Bytes, of both processes."""
        return sum(p.memory_info().rss for p in (psutil.Process(self.process.pid), self.engine))

    def metrics(self, **headers: str) -> dict[str, float]:
        """Sample name without prefix, with what labels it has beside the common ones, to value."""
        text = httpx.get(f'{self.url}/metrics', headers=headers).text
        found = {}
        for line in text.splitlines():
            if not line.startswith('#'):
                name, _, value = line.rpartition(' ')
                name = re.sub(r'(engine|model_name)="[^"]*",?', '', name).replace('{}', '').replace(',}', '}')
                found[name.removeprefix('specdec:')] = float(value)
        return found

    def wait_until_idle(self) -> None:
        """Until nothing runs, waits or holds pages."""
        names = ('num_requests_running', 'num_requests_waiting', 'gpu_cache_usage_perc', 'num_api_requests_routed')

        def idle() -> bool:
            metrics = self.metrics()
            return not any(metrics[name] for name in names)

        self.wait_for(idle)

    # ----------------------------------------------------------------------------------------------------- end
    def stop(self) -> int:
        """SIGTERM; the exit status. No process may be left."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            finally:
                self.kill()
            _, alive = psutil.wait_procs(family, timeout=10)
            assert not alive, f'left over: {alive}'
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> 'ServerProcess':
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.log)
            self.kill()
            return
        self.stop()


@contextmanager
def disconnecting_stream(url: str, body: dict[str, object]) -> Iterator[Iterator[str]]:
    """Lines of a streamed answer; leaving the block closes the connection at once."""
    with httpx.Client(timeout=60) as client, client.stream('POST', url, json=body) as response:
        assert response.status_code == 200, response.read()
        yield response.iter_lines()
