"""Prometheus metrics of the server, also under the names of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from larder.server.engine_client import EngineClient
from larder.server.request import Report
from larder.server.stats import ServerStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5)
# vLLM's label values where ours differ.
VLLM_LABEL_VALUES: Mapping[str, str] = MappingProxyType(
    {"computed": "local_compute", "cached": "local_cache_hit", "restored": "external_kv_transfer"}
)


class Metrics:
    """Registry behind `/metrics`: statistics of the engine client and latencies of answers."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatsCollector(client))
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token."
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two tokens, on average over an answer."
        )
        self._wait = self._histogram(
            "request_queue_time_seconds", "From a request to its first forward pass."
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its end.")
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed for a request.", TOKENS
        )

    def observe(self, report: Report) -> None:
        """Record the latencies of a finished answer."""
        self._first.observe(report.first_seconds)
        self._wait.observe(report.wait_seconds)
        self._whole.observe(report.seconds)
        self._computed.observe(max(0, report.prompt_tokens - report.cached_tokens))
        if report.new_tokens > 1:
            spent = report.seconds - report.first_seconds
            self._between.observe(spent / (report.new_tokens - 1))

    def add(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Register a gauge that calls `value` at each collection."""
        Gauge(f"larder_{name}", description, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def text_as_vllm(self, model: str) -> bytes:
        """Metrics that vLLM has too, under its names.

        Args:
            model: value of the label `model_name`.
        """
        return generate_latest(_VllmCollector(self._registry, model))

    def _histogram(
        self, name: str, description: str, buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        return Histogram(f"larder_{name}", description, registry=self._registry, buckets=buckets)


class _VllmCollector(Collector):
    """Collector of a registry's metrics under the names of vLLM."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        return as_vllm_metrics(self._registry.collect(), self._model)


class _StatsCollector(Collector):
    """Collector of an engine client's statistics."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> Iterator[Metric]:
        return _families(ServerStats())

    def collect(self) -> Iterator[Metric]:
        return _families(self._client.stats())


def _families(stats: ServerStats) -> Iterator[Metric]:
    yield from _gauges(stats)
    yield from _tokens(stats)
    yield from _counters(stats)


def _gauges(stats: ServerStats) -> Iterator[Metric]:
    yield _gauge("kv_cache_usage_perc", "Share of the device's budget.", _share(stats, "device"))
    yield _gauge(
        "kv_offload_cpu_cache_usage_perc", "Share of the host's budget.", _share(stats, "host")
    )
    yield _gauge("num_requests_running", "Requests in prefill or decode.", stats.running)
    yield _gauge("num_requests_waiting", "Requests waiting for admission.", stats.waiting)
    yield _gauge("sessions", "Sessions by state.", stats.sessions, "state")
    description = "Sessions with turns that are only in memory because the store failed."
    yield _gauge("sessions_not_durable", description, stats.sessions_not_durable)
    yield _gauge("tier_bytes", "Bytes in use or reserved.", stats.tier_bytes, "tier")
    yield _gauge("peak_bytes", "Peak bytes in use.", stats.peak_bytes, "tier")
    yield _gauge("budget_bytes", "Capacity in bytes.", stats.budget_bytes, "tier")


def _tokens(stats: ServerStats) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens)
    yield _counter("generation_tokens", "Generated tokens.", stats.new_tokens)
    yield _counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens
    )
    yield _counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens)
    yield _counter("prompt_tokens_cached", "Prompt tokens found in the cache.", stats.cached_tokens)
    external = stats.prompt_tokens - stats.cached_tokens + stats.restored_tokens
    description = "Prompt tokens looked up in slower tiers."
    yield _counter("external_prefix_cache_queries", description, max(external, 0))
    description = "Prompt tokens restored from slower tiers."
    yield _counter("external_prefix_cache_hits", description, stats.restored_tokens)
    yield _counter(
        "tokens_restored", "Cached tokens restored from slower tiers.", stats.restored_tokens
    )
    yield _counter("tokens_recomputed", "Tokens computed again.", stats.recomputed_tokens)
    yield _counter("tokens_evicted", "Entries evicted, per head.", stats.evicted_tokens)
    yield _counter("tokens_merged", "Entries merged, per head.", stats.merged_tokens)
    computed = max(stats.prompt_tokens - stats.cached_tokens, 0)
    in_memory = max(stats.cached_tokens - stats.restored_tokens, 0)
    sources = {"computed": computed, "cached": in_memory, "restored": stats.restored_tokens}
    yield _counter("prompt_tokens_by_source", "Prompt tokens by source.", sources, "source")


def _counters(stats: ServerStats) -> Iterator[Metric]:
    description = "Times that a tier exceeded its capacity; must stay 0."
    yield _counter("budget_violations", description, stats.budget_violations)
    description = "Running requests that gave up their memory to one of a lower priority number."
    yield _counter("num_preemptions", description, stats.preemptions)
    yield _counter("decode_steps", "Decode steps.", stats.steps)
    yield _counter("prefill_blocks", "Prefill blocks.", stats.blocks)
    yield _counter("ssd_written_bytes", "Bytes written to disk.", stats.written_bytes)
    yield _counter("request_success", "Finished requests by reason.", stats.done, "finished_reason")
    yield _counter("admission_rejections", "Requests refused.", stats.refused, "code")
    description = "Candidate sessions that could not be loaded."
    yield _counter("sessions_passed_over", description, stats.passed_over, "reason")
    description = "Sessions with a damaged transcript, continued from the text of a request."
    yield _counter("sessions_restarted", description, stats.restarted, "reason")
    description = "Turns that the store failed to write when they were complete."
    yield _counter("turns_not_durable", description, stats.turns_not_durable, "reason")
    yield _counter("kv_parked", "Caches moved to a slower tier.", stats.parked, "tier")
    yield _counter("kv_restored", "Caches restored.", stats.restored, "tier")
    description = "Saved sessions and caches that were not restored; their text is computed again."
    yield _counter("restore_rejected", description, stats.rejected, "reason")
    description = "Turns, caches and pins that the store failed to write."
    yield _counter("store_unwritten", description, stats.unwritten, "reason")


def _share(stats: ServerStats, tier: str) -> float:
    """Fraction of a tier's capacity in use; 0 without a limit."""
    limit = stats.budget_bytes.get(tier, 0)
    return stats.tier_bytes.get(tier, 0) / limit if limit else 0.0


def _gauge(
    name: str, description: str, values: float | int | Mapping[str, int], label: str = ""
) -> Metric:
    family = GaugeMetricFamily(f"larder_{name}", description, labels=[label] if label else [])
    return _with_values(family, values)


def _counter(
    name: str, description: str, values: float | int | Mapping[str, int], label: str = ""
) -> Metric:
    family = CounterMetricFamily(f"larder_{name}", description, labels=[label] if label else [])
    return _with_values(family, values)


def _with_values(
    family: GaugeMetricFamily | CounterMetricFamily, values: float | int | Mapping[str, int]
) -> Metric:
    """The family with one value, or with one for each value of its label."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            family.add_metric([key], value)
    else:
        family.add_metric([], values)
    return family


LARDER_PREFIX, VLLM_PREFIX = "larder_", "vllm:"
VLLM_NAMES = frozenset(
    {
        "admission_rejections",
        "e2e_request_latency_seconds",
        "external_prefix_cache_hits",
        "external_prefix_cache_queries",
        "generation_tokens",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "kv_offload_cpu_cache_usage_perc",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "prompt_tokens_by_source",
        "prompt_tokens_cached",
        "request_prefill_kv_computed_tokens",
        "request_queue_time_seconds",
        "request_success",
        "time_to_first_token_seconds",
    }
)


def as_vllm_metrics(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """Metric families that vLLM has too, under its names and labels.

    Args:
        model: value of the label `model_name`.
    """
    for family in families:
        name = family.name.removeprefix(LARDER_PREFIX)
        if name not in VLLM_NAMES:
            continue
        renamed = Metric(VLLM_PREFIX + name, family.documentation, family.type)
        for sample in family.samples:
            own = {key: VLLM_LABEL_VALUES.get(value, value) for key, value in sample.labels.items()}
            labels = {"model_name": model, "engine": "0", **own}
            # Creation times of counters are left out.
            if not sample.name.endswith("_created"):
                sample_name = VLLM_PREFIX + sample.name.removeprefix(LARDER_PREFIX)
                renamed.add_sample(
                    sample_name, labels, sample.value, sample.timestamp, sample.exemplar
                )
        yield renamed
