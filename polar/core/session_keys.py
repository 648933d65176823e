"""Self-validating session keys: what a harness presents as its API key.

A key is `sk-polar-` + base64url(JSON claims) + `.` + base64url(HMAC-SHA256). Node and
gateways share the secret; no event has to arrive before a key works, and no key is ever on
the log. Administrators' tokens are derived from the same secret.
"""

import base64
import binascii
import hmac
import json
import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.tasks import LimitSpec, SamplingSpec

PREFIX = "sk-polar-"
_MAC_BYTES = 18


_SIGN = b"-polar-"
_SECRETS = re.compile(rb"(sk-polar|adm-polar)-[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)?")
"""Cut-off keys too: half the claims of a session are nobody's business either."""


class SessionClaims(BaseModel):
    """What a key says about its session."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    session_id: str
    group_id: str
    gateway_id: str
    """The gateway replica that owns the session."""
    expires_at: float
    """Unix seconds."""
    trainable: bool = True
    sampling: SamplingSpec = SamplingSpec()
    limits: LimitSpec = LimitSpec()
    calls_end_at: float | None = None
    """Unix seconds at which `limits.max_seconds` are over."""

    def at(self, now: float) -> Self:
        """The same, if they hold now. Raises InvalidKeyError when they have expired."""
        if now >= self.expires_at:
            raise InvalidKeyError("expired", f"the key of session {self.session_id} has expired")
        return self


class InvalidKeyError(ValueError):
    """The key opens no session; `reason` says why without repeating the key."""

    def __init__(self, reason: Literal["unknown", "expired", "other_gateway"], message: str) -> None:
        super().__init__(message)
        self.reason: Literal["unknown", "expired", "other_gateway"] = reason


def _mac(secret: bytes, purpose: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + payload, "sha256")[:_MAC_BYTES]


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def mint(secret: bytes, claims: SessionClaims) -> str:
    """The key for these claims: URL-safe, about 400 characters."""
    payload = json.dumps(claims.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()
    return f"{PREFIX}{_b64(payload)}.{_b64(_mac(secret, b'session', payload))}"


def validate(secret: bytes, key: str, *, gateway_id: str) -> SessionClaims:
    """Claims of a key, expired or not. Raises InvalidKeyError when it is forged or another gateway's."""
    payload_text, dot, mac_text = key.removeprefix(PREFIX).partition(".")
    try:
        payload, mac = _unb64(payload_text), _unb64(mac_text)
    except (binascii.Error, ValueError):
        payload, mac = b"", b""
    if (
        not key.startswith(PREFIX)
        or not dot
        or not hmac.compare_digest(mac, _mac(secret, b"session", payload))
    ):
        raise InvalidKeyError("unknown", "this API key belongs to no session of this deployment")
    try:
        claims = SessionClaims.model_validate_json(payload)
    except ValidationError as error:
        raise InvalidKeyError("unknown", "this API key was made by another version of polar") from error
    if claims.gateway_id != gateway_id:
        raise InvalidKeyError("other_gateway", f"this session is owned by gateway {claims.gateway_id}")
    return claims


def mask_keys(data: bytes) -> bytes:
    """The bytes without session keys and administrators' tokens that stand in them.

    An agent that lists its environment sends its own key in a message; what is masked before
    anything reads it is in no prompt, no record and no error.
    """
    if data.rfind(_SIGN) < 0:  # from behind it is looked for in less than half the time
        return data
    return _SECRETS.sub(rb"\1-***", data)


def admin_token(secret: bytes) -> str:
    """Bearer token for the gateway's admin endpoints (open, seal, engine-policy)."""
    return f"adm-polar-{_b64(_mac(secret, b'admin', b'v1'))}"
