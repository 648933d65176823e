"""One engine, its gateways and the log, in memory; the laws of weight-sync are checked after each call.

Law: an engine that runs samples under weights that every live gateway names as settled or pending.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from polar.weightsync.engine_client import EngineClient
from polar.weightsync.engine_sync import EngineSync
from polar.weightsync.gateways import Gateways
from schemas.engines import EngineState
from schemas.nodes import GatewayHeartbeat
from schemas.policies import Canary, PolicyPublished, PolicyVersion

ENGINE = "http://engine.test"
BASE = "sha-base"
PROMPT, COMPLETION = (1, 2, 3), (4, 5)


def logprobs_of(sha: str) -> list[float]:
    """Every set of weights has log-probs of its own."""
    return [-(sum(sha.encode()) % 97) / 10 - index for index in range(len(PROMPT) + len(COMPLETION) - 1)]


def published(
    lineage: str, step: int, sha: str, *, tolerance: float = 1e-3, canary: bool = True
) -> PolicyPublished:
    made = Canary(
        prompt_ids=PROMPT,
        completion_ids=COMPLETION,
        logprobs=logprobs_of(sha)[len(PROMPT) - 1 :],
        tolerance=tolerance,
    )
    return PolicyPublished(
        policy="policy",
        version=PolicyVersion(lineage=lineage, step=step),
        weights_path=f"/weights/{sha}",
        weights_sha256=sha,
        canary=made if canary else None,
    )


def heartbeat(url: str) -> GatewayHeartbeat:
    return GatewayHeartbeat(gateway_id=url, incarnation="1", seq=0, url=url)


@dataclass
class FakeGateway:
    settled: str = "base:0"
    pending: str | None = None
    status: int = 200
    is_down: bool = False

    def names(self) -> set[str]:
        return {self.settled} if self.pending is None else {self.settled, self.pending}


@dataclass
class World:
    calls: list[str] = field(default_factory=list)
    """Routes of the engine and `GATEWAY phase version`, in order."""
    gateways: dict[str, FakeGateway] = field(default_factory=lambda: {"http://gw.test": FakeGateway()})
    states: list[EngineState] = field(default_factory=list)
    on_disk: dict[str, str] = field(default_factory=dict)
    """Folder → digest of what lies there, where it is not its name."""
    versions: dict[str, set[str]] = field(default_factory=lambda: {BASE: {"base:0"}})
    """Weights → the versions that name them."""

    weights: str = BASE
    version: str = "default"
    is_paused: bool = False
    is_down: bool = False
    is_updating: bool = False
    corrupt: bool = False
    """The next loads arrive damaged, which only the canary notices."""
    fail: dict[str, int] = field(default_factory=dict)
    """Route → how many of its next calls answer 500."""
    die_at: str = ""
    """Route in whose middle the engine dies."""
    hang_before: str = ""
    hang_after: str = ""
    hung: asyncio.Event = field(default_factory=asyncio.Event)

    # -- what the tests drive -------------------------------------------------------------------

    def publish(self, policy: PolicyPublished) -> PolicyPublished:
        self.versions.setdefault(policy.weights_sha256, set()).add(str(policy.version))
        self.digests[str(policy.version)] = policy.weights_sha256
        return policy

    digests: dict[str, str] = field(default_factory=dict)

    def new_sync(self, *, timeout_seconds: float = 0.05, configured: str | None = None) -> EngineSync:
        """A freshly started weight-sync."""
        transport = httpx.MockTransport(self._answer)
        gateways = Gateways(
            ",".join(self.gateways) if configured is None else configured,
            "token", timeout_seconds=timeout_seconds, transport=transport,
        )  # fmt: skip
        self.told = gateways
        engine = EngineClient("engine-0", ENGINE, timeout_seconds=timeout_seconds, transport=transport)

        async def note(state: EngineState) -> None:
            self.states.append(state)

        return EngineSync(engine, gateways, note, policy="policy", digests=self.digests)

    def restart_engine(self) -> None:
        self.weights, self.version, self.is_paused, self.is_updating = BASE, "default", False, False
        self.is_down = False

    # -- the HTTP side --------------------------------------------------------------------------

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        if request.url.host == "engine.test":
            return await self._on_engine(request, body)
        gateway = self.gateways[f"http://{request.url.host}"]
        return await self._around(
            f"{request.url.host} {body['phase']}",
            f"{body['version']['lineage']}:{body['version']['step']}",
            lambda: self._on_gateway(gateway, body),
        )

    async def _around(self, name: str, detail: str, act: Callable[[], httpx.Response]) -> httpx.Response:
        self.calls.append(f"{name} {detail}".strip())
        if name == self.hang_before:
            await self._hang()
        answer = act()
        self._check_law()
        if name == self.hang_after:
            await self._hang()
        return answer

    async def _hang(self) -> None:
        self.hung.set()
        await asyncio.Event().wait()

    def _on_gateway(self, gateway: FakeGateway, body: dict[str, Any]) -> httpx.Response:
        if gateway.is_down:
            raise httpx.ConnectError("refused")
        if gateway.status == 200:
            version = f"{body['version']['lineage']}:{body['version']['step']}"
            if body["phase"] == "pending":
                gateway.pending = version
            else:
                gateway.settled, gateway.pending = version, None
        return httpx.Response(gateway.status, json={"ok": True})

    async def _on_engine(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        route = request.url.path
        if self.is_down:
            raise httpx.ConnectError("refused")
        if route in {"/weight_info", "/is_paused", "/v1/models"}:
            answers = {
                "/weight_info": {"weight_version": self.version},
                "/is_paused": {"is_paused": self.is_paused},
                "/v1/models": {"data": [{"id": "policy"}]},
            }
            return httpx.Response(200, json=answers[route])
        return await self._around(route, "", lambda: self._act(route, request, body))

    def _act(self, route: str, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        if route == self.die_at:
            self.is_down, self.die_at = True, ""
            raise httpx.ReadError("connection lost")
        if self.fail.get(route, 0) > 0:
            self.fail[route] -= 1
            return httpx.Response(500, text="Internal Server Error")
        if route == "/pause":
            assert request.url.params["mode"] == "keep"
            assert request.url.params["clear_cache"] == "true"
            self.is_paused = True
        elif route == "/resume":
            self.is_paused = False
        elif route == "/start_weight_update":
            if self.is_updating:
                return httpx.Response(500, text="already active")
            self.is_updating = True
        elif route == "/update_weights":
            return self._update(body["update_info"])
        elif route == "/finish_weight_update":
            self.is_updating = False
            self.version = body.get("weight_version") or self.version
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        elif route == "/weight_checker":
            return httpx.Response(200, json={"checksums": {"w": self.weights}})
        elif route == "/v1/completions":
            return self._canary(request, body)
        return httpx.Response(200, json={"status": "ok"})

    def _update(self, info: dict[str, str]) -> httpx.Response:
        assert self.is_paused, "an update without a pause kills vLLM"
        assert self.is_updating
        found = self.on_disk.get(info["path"], info["path"].removeprefix("/weights/"))
        if found != info["sha256"]:
            self.is_updating = False
            return httpx.Response(500, text="digest differs")
        self.weights = f"{found} damaged" if self.corrupt else found
        return httpx.Response(200, json={"message": "Weights updated"})

    def _canary(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        assert request.headers["X-Polar-Purpose"] == "canary"
        assert not self.is_paused, "a paused engine would not answer"
        entries = [None] + [
            {str(token): {"logprob": logprob}}
            for token, logprob in zip(body["prompt"][1:], logprobs_of(self.weights), strict=True)
        ]
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": entries}]})

    def _check_law(self) -> None:
        if self.is_paused or self.corrupt:
            return
        allowed = self.versions[self.weights]
        for url, gateway in self.gateways.items():
            if not gateway.is_down:
                assert gateway.names() & allowed, (
                    f"{self.weights} is sampled, {url} believes {gateway.names()}"
                )
