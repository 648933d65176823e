"""`polar broker`: run the embedded broker, or one node of an unpacked Apache Kafka."""

from pathlib import Path
from typing import Annotated

import typer

Port = Annotated[int, typer.Option(help="Port on 127.0.0.1.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder for its files [default: POLAR_DATA_DIR/broker].")]
KafkaHome = Annotated[
    Path | None,
    typer.Option(help="Unpacked Apache Kafka distribution (needs Java 17) instead of the embedded broker."),
]


def broker(port: Port = 9092, data_dir: DataDir = None, kafka_home: KafkaHome = None) -> None:
    """Start a broker on loopback and keep it until SIGTERM; the data survive kill -9."""
    from polar.cli.running import run_service
    from polar.settings import LogSettings
    from polar.telemetry.logs import configure

    configure("broker")
    folder = data_dir or LogSettings().data_dir / "broker"
    run_service(_serve(folder, port, kafka_home))


async def _serve(folder: Path, port: int, kafka_home: Path | None) -> None:
    import asyncio

    from polar.kafka.brokers import open_broker

    process = open_broker("kafka-home" if kafka_home else "embedded", folder, port, kafka_home)
    await asyncio.to_thread(process.start)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(process.stop)
