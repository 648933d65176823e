"""GET /metrics for Prometheus: the numbers of this process, read at each scrape.

Who counts keeps the numbers and hands a function here; nothing is copied in between. A source
that fails is left out of that scrape and logged: a metric must not end a service.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from polar.core.metrics import Metrics
from polar.errors import SettingsError
from polar.settings import ProcessSettings

logger = logging.getLogger(__name__)

_TOTAL = "_total"
_BY = "_by_"
_LOOP_SECONDS = 5.0
"""A loop that is busy for longer costs the scrape its numbers."""

Family = CounterMetricFamily | GaugeMetricFamily


class Exposition(Collector):
    """All sources of one process; `service` is a label of every number."""

    def __init__(self, service: str) -> None:
        self.service = service
        self._sources: list[Callable[[], Metrics]] = []

    def add(self, read: Callable[[], Metrics]) -> None:
        """Read these numbers at every scrape from now on, in the event loop that runs now, if one does.

        Scrapes come in threads of their own; in its loop a source needs no locks.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._sources.append(read)
            return

        async def read_there() -> Metrics:
            return read()

        def read_in_loop() -> Metrics:
            return asyncio.run_coroutine_threadsafe(read_there(), loop).result(_LOOP_SECONDS)

        self._sources.append(read_in_loop)

    def collect(self) -> Iterator[Family]:
        """Families in the order of the sources; of two with one name the first counts."""
        seen: set[str] = set()
        for read in self._sources:
            try:
                values = dict(read())
            except Exception:
                logger.exception("metrics could not be read")
                continue
            for name, value in values.items():
                if name not in seen:
                    seen.add(name)
                    yield self._family(name, value)

    def _family(self, name: str, value: float | Metrics) -> Family:
        plain = name.removesuffix(_TOTAL)
        kind = CounterMetricFamily if name.endswith(_TOTAL) else GaugeMetricFamily
        if isinstance(value, float | int):
            family = kind(f"polar_{plain}", plain.replace("_", " "), labels=("service",))
            family.add_metric((self.service,), float(value))
            return family
        label = plain.rpartition(_BY)[2]
        family = kind(f"polar_{plain}", plain.replace("_", " "), labels=("service", label))
        for key, number in value.items():
            family.add_metric((self.service, key), float(number))  # type: ignore[arg-type]
        return family


_process = Exposition("")


def expose(read: Callable[[], Metrics]) -> None:
    """Add a source of numbers to this process's /metrics."""
    _process.add(read)


def serve_metrics(service: str, settings: ProcessSettings) -> None:
    """Answer GET /metrics, in threads, where POLAR_METRICS_PORT asks for it. Raises SettingsError."""
    _process.service = service
    if not settings.metrics_port:
        return
    registry = CollectorRegistry()
    registry.register(_process)
    try:
        start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        raise SettingsError(
            f"{service}: cannot listen on {settings.metrics_host}:{settings.metrics_port} "
            f"({error.strerror}); set POLAR_METRICS_PORT to a free port, or to 0 for none"
        ) from error
