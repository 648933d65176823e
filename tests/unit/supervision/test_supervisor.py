"""Services are started by readiness, restarted when they crash, and never outlive the supervisor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar.supervision.processes import find_marked, sweep
from polar.supervision.supervisor import ServiceFailedError, ServiceSpec, Supervisor

SLEEPER = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


def make(tmp_path: Path, *services: ServiceSpec) -> Supervisor:
    return Supervisor(
        services, deployment=str(tmp_path), state_file=tmp_path / "up.json", log_dir=tmp_path / "logs"
    )


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (the kernel and other processes change it)
            await asyncio.sleep(0.02)


async def test_a_crashed_service_is_started_again(tmp_path: Path) -> None:
    supervisor = make(tmp_path, ServiceSpec("a", SLEEPER, {}))
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: supervisor.states["a"].status == "ready")
    first = supervisor.states["a"].pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.states["a"].status == "ready" and supervisor.states["a"].pid != first)
    assert supervisor.states["a"].restarts == 1
    stop.set()
    await running
    assert find_marked(str(tmp_path)) == []


async def test_a_service_waits_for_what_it_needs(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def is_there() -> bool:
        return flag.exists()

    seen: list[bool] = []
    second = ServiceSpec(
        "second", SLEEPER, {}, needs=("first", "once"), late_env=lambda: seen.append(flag.exists()) or {}
    )
    once = ServiceSpec("once", (sys.executable, "-S", "-c", "pass"), {}, one_shot=True)
    supervisor = make(tmp_path, second, ServiceSpec("first", SLEEPER, {}, is_ready=is_there), once)
    ready, stop = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, on_ready=ready.set))
    await until(lambda: supervisor.states["once"].status == "done")
    assert supervisor.states["second"].pid is None
    flag.touch()
    await asyncio.wait_for(ready.wait(), 10)
    assert seen == [True]
    assert json.loads((tmp_path / "up.json").read_text())["ready"] is True
    stop.set()
    await running


async def test_a_service_that_cannot_start_ends_the_start_with_its_last_words(tmp_path: Path) -> None:
    words = (sys.executable, "-S", "-c", "import sys; print('no model'); sys.exit(3)")
    supervisor = make(tmp_path, ServiceSpec("good", SLEEPER, {}), ServiceSpec("bad", words, {}))
    with pytest.raises(ServiceFailedError, match="no model") as caught:
        await asyncio.wait_for(supervisor.run(asyncio.Event()), 20)
    assert caught.value.exit_status == 3
    assert find_marked(str(tmp_path)) == []


async def test_orphans_of_a_crashed_service_are_gone_before_it_starts_again(tmp_path: Path) -> None:
    """A grandchild in a session of its own, as an engine's worker or a harness is."""
    pids = tmp_path / "pids"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        f"open({str(pids)!r}, 'a').write(f'{{child.pid}}\\n')\n"
        "time.sleep(600)\n"
    )
    supervisor = make(tmp_path, ServiceSpec("parent", (sys.executable, "-S", "-c", program), {}))
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 1)
    orphan = int(pids.read_text())
    os.kill(supervisor.states["parent"].pid or 0, signal.SIGKILL)
    await until(lambda: len(pids.read_text().split()) == 2)
    assert orphan not in find_marked(str(tmp_path))
    stop.set()
    await running
    assert find_marked(str(tmp_path)) == []


async def test_a_service_that_ignores_sigterm_is_killed_within_its_time(tmp_path: Path) -> None:
    is_deaf = tmp_path / "is-deaf"
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(is_deaf)!r}, 'w').close(); time.sleep(600)"
    )

    async def is_ready() -> bool:
        return is_deaf.exists()

    argv = (sys.executable, "-S", "-c", program)
    spec = ServiceSpec("deaf", argv, {}, is_ready=is_ready, stop_seconds=0.3)
    supervisor = make(tmp_path, spec)
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: supervisor.states["deaf"].status == "ready")
    stop.set()
    started = time.monotonic()
    await running
    assert time.monotonic() - started < 5
    assert supervisor.states["deaf"].last_exit == -signal.SIGKILL


def test_services_stop_after_those_that_need_them(tmp_path: Path) -> None:
    order = tmp_path / "order"
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[1] + ' ')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(tmp_path)!r} + '/up-' + sys.argv[1], 'w').close()\n"
        "time.sleep(600)\n"
    )

    def spec(name: str, *needs: str) -> ServiceSpec:
        async def is_up() -> bool:
            return (tmp_path / f"up-{name}").exists()

        argv = (sys.executable, "-S", "-c", program, name)
        return ServiceSpec(name, argv, {}, needs=needs, is_ready=is_up)

    async def main() -> None:
        supervisor = make(tmp_path, spec("broker"), spec("gateway", "broker"), spec("node", "gateway"))
        stop = asyncio.Event()
        await asyncio.wait_for(supervisor.run(stop, on_ready=stop.set), 20)

    asyncio.run(main())
    assert order.read_text().split() == ["node", "gateway", "broker"]


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    """kill -9 of the process that runs the supervisor, with a grandchild in its own session."""
    ready = tmp_path / "ready"
    program = f"""
import asyncio, pathlib, sys
from polar.supervision.lock import DataDirLock
from polar.supervision.supervisor import ServiceSpec, Supervisor
from polar.supervision.warden import start_warden

folder = pathlib.Path({str(tmp_path)!r})
sleep = "import time; time.sleep(600)"
inner = (
    "import subprocess, sys, time\\n"
    f"subprocess.Popen([sys.executable, '-S', '-c', '{{sleep}}'], start_new_session=True)\\n"
    "open(sys.argv[1], 'w').close()\\n"
    "time.sleep(600)"
)

async def is_up():
    return (folder / "inner").exists()

with DataDirLock(folder, "up") as lock:
    warden = start_warden(str(folder), lock=lock)
    spec = ServiceSpec("a", (sys.executable, "-S", "-c", inner, str(folder / "inner")), {{}}, is_ready=is_up)
    supervisor = Supervisor([spec], deployment=str(folder), state_file=folder / "up.json", log_dir=folder)
    asyncio.run(supervisor.run(asyncio.Event(), on_ready=(folder / "ready").touch))
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(find_marked(str(tmp_path))) == 2
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while find_marked(str(tmp_path)):
            assert time.monotonic() < deadline, "something outlived its parent"
            time.sleep(0.02)
    finally:
        sweep(str(tmp_path))
