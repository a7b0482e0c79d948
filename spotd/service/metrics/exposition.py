"""A reading as the text that Prometheus reads, with the figures of this process."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from spotd.service.metrics.families import families
from spotd.service.metrics.reading import Reading


class _Once(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def text_of(reading: Reading) -> bytes:
    """Return the metrics in the text format, version 0.0.4. To be called in a thread."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Once(list(families(reading))))
    return generate_latest(registry)
