"""Prometheus metrics: counts and times, never a text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

ROUTES = ("/", "/v1/predict", "/healthz", "/readyz", "/metrics", "/openapi.json")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_POWERS_OF_TWO = tuple(float(2**power) for power in range(15))


class Metrics:
    """The counters of one server, in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("cramlm_requests", "Responses by path and status.", ("path", "status"))
        self._seconds = Histogram(
            "cramlm_request_seconds",
            "Time from the end of the request's headers to the end of the response.",
            ("path",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._abandoned = self._counter("cramlm_abandoned_requests", "Requests whose client disconnected before the response.")
        self._texts = self._counter("cramlm_texts", "Texts computed.")
        self._tokens = self._counter("cramlm_tokens", "Tokens computed, special tokens included.")
        self._batch_texts = self._histogram("cramlm_batch_texts", "Texts computed together.", _POWERS_OF_TWO[:11])
        self._batch_tokens = self._histogram("cramlm_batch_tokens", "Tokens computed together.", _POWERS_OF_TWO)
        self._batch_seconds = self._histogram("cramlm_batch_seconds", "Time to tokenize and compute a batch.", _SECONDS)
        self.queue_texts = Gauge("cramlm_queue_texts", "Texts in the queue.", registry=self._registry)
        self.ready = Gauge("cramlm_ready", "1 while the server accepts texts, 0 while it loads or drains.", registry=self._registry)
        ProcessCollector(registry=self._registry)

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count a response. Unknown paths share one name, so that clients cannot make the page grow."""
        route = path if path in ROUTES else "other"
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_disconnect(self) -> None:
        """Count a client that disconnected before the response."""
        self._abandoned.inc()

    def count_batch(self, *, texts: int, tokens: int, seconds: float) -> None:
        """Count a batch."""
        self._texts.inc(texts)
        self._tokens.inc(tokens)
        self._batch_texts.observe(texts)
        self._batch_tokens.observe(tokens)
        self._batch_seconds.observe(seconds)

    def page(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, documentation, labels, registry=self._registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self._registry)
