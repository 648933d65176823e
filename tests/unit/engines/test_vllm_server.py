"""Starting, waiting and stopping, with a small program in vLLM's place."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from polar.engines import vllm_server
from polar.engines.vllm_server import VllmServer, serve
from polar.errors import EngineError
from polar.settings import EngineSettings

HEALTHY = """
import http.server, os, signal, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
child = subprocess.Popen(["sleep", "60"])
print("child", child.pid, flush=True)
{extra}
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
BROKEN = "import sys; print('no such model'); sys.exit(3)"


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return EngineSettings(model_path=tmp_path, port=free.getsockname()[1])


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(
        vllm_server,
        "launch_command",
        lambda settings, seed: [sys.executable, "-c", program, str(settings.port)],
    )


@pytest.mark.parametrize(
    "extra", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["willing", "stubborn"]
)
def test_nothing_is_left_after_a_stop(
    extra: str, settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, HEALTHY.format(extra=extra))
    log = tmp_path / "log"
    shares: list[float] = []
    server = VllmServer(settings, log_file=log)
    server.start()
    assert server.wait_until_healthy(timeout_seconds=20, progress=lambda _, share: shares.append(share)) < 20
    assert shares[-1] == 1.0
    assert server.poll() is None
    child = int(log.read_text().split()[1])
    os.kill(child, 0)
    server.stop(grace_seconds=0.3)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
    server.stop()


def test_a_server_that_ends_while_starting_says_why(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, BROKEN)
    server = VllmServer(settings, log_file=tmp_path / "log")
    server.start()
    with pytest.raises(EngineError, match=r"ended with status 3 while starting:\nno such model"):
        server.wait_until_healthy(timeout_seconds=20)
    server.stop()


async def test_serve_stops_everything_when_cancelled(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, HEALTHY.format(extra=""))
    task = asyncio.create_task(serve(settings))
    url = f"http://127.0.0.1:{settings.port}"
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(answers, url):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not answers(url)


async def test_serve_reports_a_server_that_ends(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, BROKEN)
    with pytest.raises(EngineError, match="ended with status 3"):
        await serve(settings)


def answers(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
