"""One throw-away session: a gateway on a free port, an agent command behind it, its calls in a folder.

    command ──▶ gateway in this process ──▶ upstream
                       └── spool ──▶ FileLog ──▶ archive folder

Invariant: whatever the command does, its session is sealed and the folder is an archive when
`capture` returns. The key dies with the gateway.
"""

import asyncio
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from polar.archive.folder import ArchiveManifest
from polar.capture.file_log import FileLog
from polar.capture.upstream import Upstream
from polar.core.harness_environment import UNSET, gateway_environment
from polar.core.session_keys import SessionClaims, admin_token, mint
from polar.errors import GatewayError
from polar.gateway.app import serving_until_left
from polar.gateway.parts import running_parts
from polar.settings import GatewaySettings, LogSettings
from schemas.sessions import Outcome
from schemas.tasks import SamplingSpec

_KEY_SECONDS = 30 * 24 * 3600.0
_READY_SECONDS = 30.0


async def capture(
    command: Sequence[str],
    upstream: Upstream,
    folder: Path,
    *,
    api_key: str,
    trainable: bool,
    temperature: float,
) -> tuple[int, ArchiveManifest]:
    """(the command's exit status, what was kept). Raises SettingsError, GatewayError."""
    log = FileLog(folder)
    secret = secrets.token_hex(32).encode()
    session_id = f"capture-{secrets.token_hex(4)}/0/0/0"
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    claims = SessionClaims(
        session_id=session_id,
        group_id=session_id.partition("/")[0],
        gateway_id="capture",
        expires_at=time.time() + _KEY_SECONDS,
        trainable=trainable,
        sampling=SamplingSpec(temperature=temperature),
    )
    try:
        async with AsyncExitStack() as stack:
            data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-capture-"))
            log_settings = LogSettings(data_dir=Path(data_dir))
            key_file = Path(data_dir) / "upstream-key"
            key_file.touch(mode=0o600)
            key_file.write_text(api_key)
            settings = GatewaySettings(
                id=claims.gateway_id, public_url=url, model=upstream.model, engine_kind=upstream.kind,
                engines=f"upstream={upstream.url}", engine_key_file=key_file,
            )  # fmt: skip
            parts = await stack.enter_async_context(
                running_parts(log_settings, settings, secret, lambda: log)
            )
            await stack.enter_async_context(serving_until_left(parts, secret, listener))
            http = await stack.enter_async_context(
                aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {admin_token(secret)}"})
            )
            await _until_ready(http)
            await _post(http, "/admin/sessions/open", claims.model_dump(mode="json", include=_OPENED))
            status = await _run(command, gateway_environment(url, mint(secret, claims), os.environ))
            outcome = Outcome.COMPLETED if status == 0 else Outcome.AGENT_ERROR
            sealing = {"session_id": session_id, "outcome": outcome, "reason": f"exit status {status}"}
            await _post(http, "/admin/sessions/seal", sealing)
            await parts.sender.drained()
    finally:
        manifest = log.close()
    return status, manifest


_OPENED = {"session_id", "group_id", "sampling", "trainable", "expires_at"}


async def _until_ready(http: aiohttp.ClientSession) -> None:
    last = "no answer"
    try:
        async with asyncio.timeout(_READY_SECONDS):
            while True:
                async with http.get("/ready") as response:
                    if response.status == 200:
                        return
                    last = str((await response.json()).get("detail"))
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise GatewayError(f"the capture's gateway is not ready: {last}") from error


async def _post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    async with http.post(path, json=body) as response:
        if response.status != 200:
            raise GatewayError(f"{path} answers {response.status}: {(await response.text())[:300]}")


async def _run(command: Sequence[str], added: dict[str, str]) -> int:
    """Run the command in this terminal; its exit status, 128 + signal where one ended it.

    Ctrl-C reaches it from the terminal; SIGTERM is handed on. Raises FileNotFoundError.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    process = await asyncio.create_subprocess_exec(*command, env={**inherited, **added})
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, process.terminate)
    try:
        status = await process.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return status if status >= 0 else 128 - status
