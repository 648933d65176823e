"""Keys stay secret, strangers get 401 in their own words, and no request costs more than its limit."""

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from polar.core.session_keys import admin_token, mask_keys
from polar.errors import SettingsError
from polar.gateway.http_protocol import MAX_HEAD_BYTES
from polar.telemetry.metrics import Exposition
from schemas.base import encode
from tests.unit.gateway.fake_engine import Answer, FakeEngine
from tests.unit.gateway.running import SECRET, RunningGateway, eventually, question, running_gateway

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": question(),
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1beta/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


def error_of(path: str, body: Any) -> str:
    """The message of an error that has the shape of the dialect's own API."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(body["error"]) >= {"type", "message"}
    elif path.startswith("/v1beta"):
        assert set(body["error"]) >= {"code", "message", "status"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


async def ask(
    gateway: RunningGateway, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    async with gateway.http.post(gateway.url + path, json=body, headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("path", REQUESTS)
async def test_strangers_get_401_in_the_shape_of_their_dialect(
    gateway: RunningGateway, engine: FakeEngine, path: str
) -> None:
    good = await gateway.open()
    for key in ("", "sk-polar-abc.def", good[:-3] + "xxx", "sk-other"):
        for where in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
            status, data = await ask(gateway, path, REQUESTS[path], where)
            assert status == 401
            assert error_of(path, json.loads(data))
        status, data = await ask(gateway, f"{path}?key={key}", REQUESTS[path])
        assert status == 401
        if key:
            status, data = await ask(gateway, f"/s/{key}{path}", REQUESTS[path])
            assert (status, error_of(path, json.loads(data)) != "") == (401, True)
    assert engine.requests == []


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_key_works_wherever_its_harness_puts_it(
    gateway: RunningGateway, engine: FakeEngine, path: str
) -> None:
    key = await gateway.open()
    for number, (prefix, headers) in enumerate(
        [
            ("", {"Authorization": f"Bearer {key}"}),
            ("", {"x-api-key": key}),
            ("", {"x-goog-api-key": key}),
            ("", {"Authorization": f"Bearer {key}", "x-api-key": "dummy"}),
            (f"/s/{key}", {"Authorization": "Bearer dummy-key"}),
            (f"/s/{key}", {}),
        ],
        start=1,
    ):
        status, data = await ask(gateway, prefix + path, REQUESTS[path], headers)
        assert status == 200, data
        assert len(engine.requests) == number
    assert (await ask(gateway, f"{path}?key={key}", REQUESTS[path]))[0] == 200
    assert await gateway.seal() == 7


async def test_no_key_appears_anywhere(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[bytes] = []
    async with running_gateway(tmp_path, engine.url, id="gw") as gateway:
        key = await gateway.open()
        forged = key[:-4] + "AAAA"
        expired = gateway.key(expires_at=1.0)
        keys = [key, forged, expired, admin_token(SECRET)]
        tool_output = f"OPENAI_API_KEY={key}\\nOPENAI_BASE_URL={gateway.url}/s/{key}/v1\\n{key}\n{keys[3]}"
        engine.script = [Answer(500, json={"error": {"message": "boom"}}), Answer(200, raw="<html>")]
        for path, body in REQUESTS.items():
            text = json.dumps(body).replace('"hi"', json.dumps(tool_output))
            for secret in keys:
                for prefix, query, headers in (
                    ("", "", {"Authorization": f"Bearer {secret}"}),
                    ("", f"?key={secret}", {}),
                    (f"/s/{secret}", "", {"x-api-key": secret}),
                ):
                    said.append((await ask(gateway, prefix + path + query, json.loads(text), headers))[1])
            said.append((await ask(gateway, f"/s/{key}/nowhere{path}", json.loads(text)))[1])
            said.append((await ask(gateway, f"/s/{key}{path}", ["no request", key]))[1])
        engine.talk = _die
        said.append((await ask(gateway, "/v1/chat/completions", question(key), {"x-api-key": key}))[1])
        _, state = await gateway.admin("GET", "/admin/state")
        said.append(json.dumps(state).encode())
        said.append(json.dumps(await gateway.admin("GET", "/admin/state", token=key)).encode())
        registry = CollectorRegistry()
        exposition = Exposition("gateway")
        exposition._sources.append(gateway.parts.metrics)
        registry.register(exposition)
        said.append(generate_latest(registry))
        await gateway.seal()
        await eventually(lambda: gateway.parts.spool.num_records == 0)
        said += [encode(event) for event in [*gateway.log.events, *gateway.log.heartbeats]]
        said += [json.dumps(request).encode() for request in engine.requests]
        said += [path.read_bytes() for path in (tmp_path / "gateway" / "gw").rglob("*") if path.is_file()]
        said.append(caplog.text.encode())
        assert len(gateway.log.calls()) >= 10
    everything = b"\n".join(said)
    assert b"sk-polar-***" in everything  # the agent's text is there, without the key
    for secret in keys:
        for piece in (secret, secret.partition(".")[2] or secret.removeprefix("adm-polar-")):
            assert piece.encode() not in everything
    # The claims alone (signature and all cut off) are nobody's business either.
    assert key.removeprefix("sk-polar-").partition(".")[0].encode() not in everything


async def _die(connection: Any, body: dict[str, Any]) -> None:
    connection.reset()


def test_masking_leaves_everything_else_alone() -> None:
    for data in (b"", b'{"a": "sk-polar is a prefix"}', b"sk-polar-", b"sk-proj-abcdefgh12345678"):
        assert mask_keys(data) == data
    assert mask_keys(b'{"k": "\\nsk-polar-eyJhIjoxfQ.c2lnbmF0dXJl"}') == b'{"k": "\\nsk-polar-***"}'
    assert mask_keys(b"cut sk-polar-eyJhIjoxfQ") == b"cut sk-polar-***"
    assert mask_keys(b"/s/sk-polar-eyJhIjoxfQ.abc/v1 adm-polar-0123456789 x") == (
        b"/s/sk-polar-***/v1 adm-polar-*** x"
    )


async def test_the_admin_api_is_closed_to_everybody_without_the_token(gateway: RunningGateway) -> None:
    key = await gateway.open()
    paths = {
        "/admin/state": "GET",
        "/admin/sessions/open": "POST",
        "/admin/sessions/seal": "POST",
        "/admin/engines/policy": "POST",
        "/admin/engines/drain": "POST",
    }
    for path, method in paths.items():
        for header in ({}, {"Authorization": ""}, {"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            async with gateway.http.request(method, gateway.url + path, json={}, headers=header) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (
                    401,
                    "invalid_admin_token",
                )


@pytest.mark.parametrize("where", ["header", "url", "many"])
async def test_a_head_without_end_is_refused_before_it_is_held(gateway: RunningGateway, where: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"POST /v1/chat/completions" + (b"" if where == "url" else b" HTTP/1.1\r\nhost: x\r\n"))
    writer.write({"header": b"x-long: ", "url": b"?a=", "many": b""}[where])
    sent = 0
    piece = b"x-h: 1\r\n" * 500 if where == "many" else b"a" * 4000
    with contextlib.suppress(ConnectionError):
        while sent < 4_000_000:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 5)
            sent += len(piece)
            await asyncio.sleep(0)
    data = b""
    with contextlib.suppress(ConnectionError):
        data = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert sent < 4_000_000 or data.startswith(b"HTTP/1.1 431")


async def test_a_head_within_the_limit_passes_again_and_again(gateway: RunningGateway) -> None:
    key = await gateway.open()
    padding = {f"x-pad-{number}": "p" * 4000 for number in range(MAX_HEAD_BYTES // 5000)}
    for number in range(4):  # on one connection
        body = question(str(number) + "x" * 200_000)
        status, _ = await ask(
            gateway, "/v1/chat/completions", body, {"Authorization": f"Bearer {key}", **padding}
        )
        assert status == 200


async def test_the_key_of_the_engines_comes_from_a_file(engine: FakeEngine, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    with pytest.raises(SettingsError, match="POLAR_GATEWAY_ENGINE_KEY_FILE"):
        async with running_gateway(tmp_path, engine.url, engine_key_file=key_file):
            pass
    key_file.write_text("upstream-secret\n")
    async with running_gateway(tmp_path, engine.url, engine_key_file=key_file) as gateway:
        await gateway.chat(await gateway.open())
        assert "upstream-secret" not in repr(gateway.parts.settings)
    assert engine.headers[0]["authorization"] == "Bearer upstream-secret"
