"""What is measured: mock engine, broker, gateways with open sessions, each on its processors."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from bench.gateway.load import Client, request
from bench.gateway.processes import Process, free_port
from bench.gateway.workload import MODEL, write_stream
from bench.record import ROOT
from polar.core.session_keys import SessionClaims, admin_token, mint
from polar.gateway import rendering_probe
from polar.gateway.renderer import load_renderer
from polar.kafka.brokers import BrokerProcess, open_broker
from polar.kafka.topics import ensure_topics
from polar.secret import load_secret
from polar.settings import LogSettings
from schemas.ids import group_of, session_id
from schemas.policies import BASE_VERSION

KAFKA_HOME = "KAFKA_HOME"
ENGINE_ID = "engine-0"
_KEY_SECONDS = 24 * 3600


class NoCompilerError(RuntimeError):
    """The mock engine is C and there is nothing to compile it with."""


class MockEngine:
    """The compiled mock engine, running."""

    def __init__(self, folder: Path, processors: set[int], tokenizer: Path | None) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise NoCompilerError(
                "the mock engine is C: install a compiler (package gcc or clang) or name one in CC"
            )
        program, stream = folder / "mock_engine", folder / "stream.tsv"
        source = Path(__file__).with_name("mock_engine.c")
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        write_stream(stream)
        renderings = folder / "renderings.tsv"
        renderings.write_text("" if tokenizer is None else _probe_renderings(tokenizer))
        self.port = free_port()
        self.process = Process(
            [str(program), str(self.port), str(stream), MODEL, str(renderings)],
            processors=processors,
            log=folder / "engine.log",
        )
        self.process.wait_for(f"http://127.0.0.1:{self.port}/health", seconds=10)


class Broker:
    """The log of the deployment: Apache Kafka where KAFKA_HOME is set, else the embedded broker."""

    def __init__(self, folder: Path) -> None:
        home = os.environ.get(KAFKA_HOME)
        self.kind = "apache" if home else "embedded"
        self.folder = folder
        port = free_port()
        self._broker: BrokerProcess = open_broker(
            "kafka-home" if home else "embedded", folder, port, Path(home) if home else None
        )
        self._broker.start()
        self.settings = LogSettings(bootstrap_servers=self._broker.bootstrap_servers, data_dir=folder)
        asyncio.run(ensure_topics(self.settings))

    def stop(self) -> None:
        """End its processes."""
        self._broker.stop()


class Gateway:
    """One `polar gateway` process."""

    def __init__(
        self, name: str, broker: Broker, engine: MockEngine, processors: set[int], tokenizer: Path | None
    ) -> None:
        self.name = name
        self.port = free_port()
        self._broker = broker
        self._num_sessions = 0
        self.last_session = ""
        """Id of the session of the last key."""
        folder = broker.folder
        env = {
            "PYTHONPATH": str(ROOT),
            "POLAR_DATA_DIR": str(folder),
            "POLAR_BOOTSTRAP_SERVERS": broker.settings.bootstrap_servers,
            "POLAR_GATEWAY_ID": name,
            "POLAR_GATEWAY_PORT": str(self.port),
            "POLAR_GATEWAY_ENGINES": f"{ENGINE_ID}=http://127.0.0.1:{engine.port}",
            "POLAR_GATEWAY_MODEL": MODEL,
            "POLAR_GATEWAY_MAX_IN_FLIGHT": "512",
        }
        if tokenizer is not None:
            env["POLAR_GATEWAY_MODEL_PATH"] = str(tokenizer)
        self.process = Process(
            [sys.executable, "-m", "polar.cli.main", "gateway"],
            processors=processors,
            log=folder / f"{name}.log",
            env=env,
            cwd=folder,
        )
        self.process.wait_for(f"http://127.0.0.1:{self.port}/ready")
        self._secret = load_secret(broker.settings)
        asyncio.run(self._announce_policy())

    def state(self) -> dict[str, Any]:
        """What /admin/state tells."""
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/admin/state",
            headers={"Authorization": f"Bearer {admin_token(self._secret)}"},
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return cast("dict[str, Any]", json.load(answer))

    def keys(self, count: int) -> list[str]:
        """Keys of so many new, open sessions."""
        first = self._num_sessions
        self._num_sessions += count
        self.last_session = session_id(f"bench-{self.name}", first + count - 1, 0, 1)
        sessions = [session_id(f"bench-{self.name}", number, 0, 1) for number in range(first, first + count)]
        return asyncio.run(self._open(sessions))

    async def _open(self, sessions: Sequence[str]) -> list[str]:
        expires_at = time.time() + _KEY_SECONDS
        bodies = [
            {"session_id": session, "group_id": group_of(session), "expires_at": expires_at}
            for session in sessions
        ]
        await self._administer("/admin/sessions/open", bodies)
        return [
            mint(
                self._secret,
                SessionClaims(
                    session_id=session,
                    group_id=group_of(session),
                    gateway_id=self.name,
                    expires_at=expires_at,
                ),
            )
            for session in sessions
        ]

    async def _announce_policy(self) -> None:
        """What weight-sync does first: from then on no call asks the engine for its version."""
        version = BASE_VERSION.model_dump(mode="json")
        body = {"engine_id": ENGINE_ID, "phase": "settled", "version": version}
        await self._administer("/admin/engines/policy", [body])

    async def _administer(self, path: str, bodies: Sequence[object]) -> None:
        client = Client(self.port)
        limit = asyncio.Semaphore(64)
        token = admin_token(self._secret)

        async def post(body: object) -> None:
            async with limit:
                await client.call(request(self.port, json.dumps(body).encode(), key=token, path=path))

        await asyncio.gather(*map(post, bodies))
        client.close()
        if client.timings.failed:
            raise RuntimeError(f"{path}: {client.timings.trouble}")


def _probe_renderings(tokenizer: Path) -> str:
    """What this tokenizer and template make of the conversations by which a gateway proves an engine."""
    renderer = load_renderer(tokenizer, None, protects=True)
    lines = []
    for words, messages, tools in (
        ("a.txt", rendering_probe._WITH_TOOL, (rendering_probe._TOOL,)),
        ("Another?", rendering_probe._PLAIN, ()),
    ):
        ids = renderer.prompt(messages, renderer.tools(tools, words), {})
        lines.append(f"{words}\t{','.join(map(str, ids))}\n")
    return "".join(lines)
