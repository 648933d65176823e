"""The few S3 calls that the embedded broker's start needs, signed (AWS signature version 4).

The object store is SeaweedFS on loopback; no other S3 service is meant.
"""

import datetime as dt
import hashlib
import hmac
import http.client
from dataclasses import dataclass

from polar.errors import LogError

REGION = "us-east-1"
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Access to the embedded object store."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        """Never shows the secret."""
        return f"S3Credentials({self.access_key})"


def bucket_status(port: int, bucket: str, credentials: S3Credentials) -> int:
    """HTTP status of asking for the bucket: 200 there, 404 absent, 403 wrong credentials.
    0 when the store does not answer yet."""
    try:
        return _call("HEAD", port, bucket, credentials)
    except OSError:
        return 0


def create_bucket(port: int, bucket: str, credentials: S3Credentials) -> None:
    """Make the bucket unless it exists. Raises LogError when the store refuses."""
    if bucket_status(port, bucket, credentials) == http.HTTPStatus.OK:
        return
    status = _call("PUT", port, bucket, credentials)
    if status not in {http.HTTPStatus.OK, http.HTTPStatus.CONFLICT}:
        raise LogError(f"the embedded object store refused to make bucket {bucket}: HTTP {status}")


def _call(method: str, port: int, bucket: str, credentials: S3Credentials) -> int:
    host, path = f"127.0.0.1:{port}", f"/{bucket}"
    # Signatures carry the time of the request; the store refuses one far from its own clock.
    now = dt.datetime.now(dt.UTC)
    day, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": stamp}
    names = ";".join(sorted(headers))
    canonical = "\n".join(
        [method, path, "", *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names, _EMPTY_SHA256]
    )
    scope = f"{day}/{REGION}/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (day, REGION, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as response:
            response.read()
            return response.status
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()
