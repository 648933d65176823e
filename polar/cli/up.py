"""`polar up`: all services on this machine, restarted when they crash, gone when it is."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.exits import Exit

if TYPE_CHECKING:
    from polar.cli.deployment import Deployment, UpOptions
    from polar.supervision.lock import DataDirLock

DataDir = Annotated[
    Path | None, typer.Option(help="Everything it keeps: log, spools, checkpoints [default: POLAR_DATA_DIR].")
]
KafkaHome = Annotated[
    Path | None, typer.Option(help="Run this unpacked Apache Kafka (Java 17) instead of the embedded broker.")
]
Bootstrap = Annotated[str | None, typer.Option(help="Use the Kafka brokers at this host:port list.")]
Model = Annotated[
    str | None,
    typer.Option(help="`smollm2`, `tiny` or a Hugging Face folder [default: POLAR_ENGINE_MODEL_PATH]."),
]
FreePorts = Annotated[bool, typer.Option("--free-ports", help="Choose free ports instead of the usual ones.")]
Relay = Annotated[
    bool, typer.Option("--relay", help="Keep every raw engine answer: a relay between gateway and engine.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON line when everything is ready.")]


def up(
    data_dir: DataDir = None,
    kafka_home: KafkaHome = None,
    bootstrap_servers: Bootstrap = None,
    model: Model = None,
    free_ports: FreePorts = False,
    relay: Relay = False,
    as_json: Json = False,
) -> int:
    """Run the whole loop on this machine until Ctrl-C or SIGTERM.

    A crashed service is started again. Killed and started again with the same data directory,
    everything goes on where it was. Logs are in DATA_DIR/logs.
    """
    if kafka_home is not None and bootstrap_servers is not None:
        raise typer.BadParameter("--kafka-home and --bootstrap-servers exclude each other")
    from polar.cli.deployment import UpOptions, resolve
    from polar.settings import LogSettings
    from polar.supervision.lock import DataDirLock
    from polar.telemetry.logs import configure

    configure("up")
    folder = (data_dir or LogSettings().data_dir).absolute()
    with DataDirLock(folder, "up") as lock:
        options = UpOptions(
            data_dir=folder,
            kafka_home=kafka_home,
            bootstrap_servers=bootstrap_servers,
            model_path=_model_path(model, folder),
            free_ports=free_ports,
            relay=relay or None,
        )
        return _run(options, resolve(options), lock, as_json=as_json)


def _model_path(model: str | None, data_dir: Path) -> Path | None:
    """Folder of the model; prepares the built-in ones. None: as the settings or a kept deployment say."""
    import os

    if model is None:
        if "POLAR_ENGINE_MODEL_PATH" in os.environ or (data_dir / "deployment.json").exists():
            return None
        model = "smollm2"
    if model in {"smollm2", "tiny"}:
        from polar.demo.preparing import prepare_model

        return prepare_model(model)
    path = Path(model).absolute()
    if not (path / "config.json").is_file():
        raise typer.BadParameter(f"--model {model}: no config.json there; give a Hugging Face folder")
    return path


def _run(options: "UpOptions", deployment: "Deployment", lock: "DataDirLock", *, as_json: bool) -> int:
    import asyncio
    import signal

    from polar.supervision.processes import sweep
    from polar.supervision.supervisor import ServiceFailedError, Supervisor
    from polar.supervision.warden import start_warden

    sweep(str(options.data_dir))  # what an earlier start left behind
    warden = start_warden(str(options.data_dir), lock=lock)

    def on_ready() -> None:
        if as_json:
            sys.stdout.write(json.dumps({"ready": True, **deployment.summary()}) + "\n")
            sys.stdout.flush()
        else:
            api = deployment.summary()["rollout_api"]
            typer.echo(f"ready: {api} (logs: {options.data_dir}/logs)", err=True)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, stop.set)
        supervisor = Supervisor(
            deployment.services,
            deployment=str(options.data_dir),
            state_file=options.data_dir / "up.json",
            log_dir=options.data_dir / "logs",
            on_change=_show,
        )
        await supervisor.run(stop, on_ready=on_ready)

    try:
        asyncio.run(main())
    except ServiceFailedError as error:
        typer.echo(f"polar: {error}", err=True)
        return Exit.MISSING if error.exit_status == Exit.MISSING else Exit.FAILED
    finally:
        if warden.stdin is not None:
            warden.stdin.close()
        warden.wait()
    return Exit.OK


def _show(name: str, state: object) -> None:
    status = getattr(state, "status", "")
    if status in {"ready", "done", "restarting", "failed"}:
        typer.echo(f"  {name}: {status}", err=True)
