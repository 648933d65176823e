"""What `polar up` starts: the same deployment again from the same data directory."""

import asyncio
from pathlib import Path

import pytest

from polar.cli.deployment import FIXED_PORTS, UpOptions, _answers, _listens, resolve
from polar.cli.services import SERVICES
from polar.supervision.supervisor import ServiceSpec


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("POLAR_")]:
        monkeypatch.delenv(name)


def by_name(services: tuple[ServiceSpec, ...]) -> dict[str, ServiceSpec]:
    return {service.name: service for service in services}


def test_all_services_run_and_start_after_what_they_need(tmp_path: Path) -> None:
    deployment = resolve(UpOptions(tmp_path))
    services = by_name(deployment.services)
    assert services.keys() == {service.name for service in SERVICES} | {"topics", "trainer"}
    assert services["topics"].one_shot
    assert services["topics"].needs == ("broker",)
    for service in deployment.services:
        assert set(service.needs) <= services.keys()
        assert service.env["POLAR_DATA_DIR"] == str(tmp_path)
        assert service.env["POLAR_BOOTSTRAP_SERVERS"] == "127.0.0.1:9092"
    assert deployment.ports == {name: port for name, port in FIXED_PORTS.items() if name != "relay"}


def test_the_relay_stands_between_gateway_and_engine(tmp_path: Path) -> None:
    deployment = resolve(UpOptions(tmp_path, relay=True, free_ports=True))
    env = deployment.env
    relay = f"engine-0=http://127.0.0.1:{deployment.ports['relay']}"
    assert env["POLAR_GATEWAY_ENGINES"] == env["POLAR_WEIGHT_SYNC_ENGINES"] == relay
    assert by_name(deployment.services)["gateway"].needs == ("topics", "relay")


def test_a_restart_is_the_same_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_PACKER_GROUPS_PER_BATCH", "5")
    monkeypatch.setenv("POLAR_SERVICE", "up")
    monkeypatch.setenv("POLAR_DEPLOYMENT", "elsewhere")
    first = resolve(UpOptions(tmp_path, model_path=Path("/m"), relay=True, free_ports=True))
    assert not {"POLAR_SERVICE", "POLAR_DEPLOYMENT"} & first.env.keys()
    for name in ("POLAR_PACKER_GROUPS_PER_BATCH", "POLAR_SERVICE", "POLAR_DEPLOYMENT"):
        monkeypatch.delenv(name)
    again = resolve(UpOptions(tmp_path))
    assert (again.env, again.ports, again.broker) == (first.env, first.ports, first.broker)
    assert [service.name for service in again.services] == [service.name for service in first.services]


def test_the_gateway_follows_the_engines_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE_CHAT_TEMPLATE", "/t.jinja")
    first = resolve(UpOptions(tmp_path, model_path=Path("/one"), free_ports=True)).env
    assert (first["POLAR_GATEWAY_MODEL_PATH"], first["POLAR_GATEWAY_CHAT_TEMPLATE"]) == ("/one", "/t.jinja")
    assert resolve(UpOptions(tmp_path, model_path=Path("/two"))).env["POLAR_GATEWAY_MODEL_PATH"] == "/two"
    monkeypatch.setenv("POLAR_GATEWAY_MODEL_PATH", "/own")
    assert resolve(UpOptions(tmp_path)).env["POLAR_GATEWAY_MODEL_PATH"] == "/own"


def test_the_present_environment_goes_before_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_TRAINER_LEARNING_RATE", "1e-5")
    resolve(UpOptions(tmp_path))
    monkeypatch.setenv("POLAR_TRAINER_LEARNING_RATE", "1e-4")
    assert resolve(UpOptions(tmp_path)).env["POLAR_TRAINER_LEARNING_RATE"] == "1e-4"


def test_an_outside_kafka_is_not_started(tmp_path: Path) -> None:
    deployment = resolve(UpOptions(tmp_path, bootstrap_servers="kafka:9092"))
    assert deployment.broker == "external"
    assert "broker" not in by_name(deployment.services)
    assert by_name(deployment.services)["topics"].needs == ()
    assert deployment.env["POLAR_FETCH_MAX_WAIT_MS"] == "500"
    assert resolve(UpOptions(tmp_path)).env["POLAR_BOOTSTRAP_SERVERS"] == "kafka:9092"


def test_a_kafka_distribution_is_run_and_remembered(tmp_path: Path) -> None:
    deployment = resolve(UpOptions(tmp_path / "d", kafka_home=tmp_path / "kafka"))
    again = resolve(UpOptions(tmp_path / "d"))
    for each in (deployment, again):
        assert each.broker == each.env["POLAR_BROKER_KIND"] == "kafka-home"
        assert each.env["POLAR_BROKER_KAFKA_HOME"] == str(tmp_path / "kafka")
        assert each.env["POLAR_FETCH_MAX_WAIT_MS"] == "500"
    assert resolve(UpOptions(tmp_path / "e")).env["POLAR_FETCH_MAX_WAIT_MS"] == "200"


async def test_a_service_is_ready_when_its_route_answers_200() -> None:
    answer = [b"503 Service Unavailable"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = answer[0] if head.startswith(b"GET /ready ") else b"404 Not Found"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ready = _answers(port, "/ready")
    assert not await ready()
    answer[0] = b"200 OK"
    assert await ready()
    assert await _listens(port)()
    server.close()
    await server.wait_closed()
    assert not await ready()
    assert not await _listens(port)()
