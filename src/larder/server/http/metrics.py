"""The numbers of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from larder.server.engine_client import EngineClient, ServerStats
from larder.server.request import Report

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5)


class Metrics:
    """What `/metrics` tells: the hub's own numbers, and how long answers took."""

    def __init__(self, hub: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatsCollector(hub))
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token."
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two tokens, on average over an answer."
        )
        self._wait = self._histogram(
            "request_queue_time_seconds", "From a request to its first pass through the model."
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its end.")
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens read for a request.", TOKENS
        )

    def observe(self, report: Report) -> None:
        """Count a finished answer."""
        self._first.observe(report.first_seconds)
        self._wait.observe(report.wait_seconds)
        self._whole.observe(report.seconds)
        self._computed.observe(max(0, report.prompt_tokens - report.cached_tokens))
        if report.new_tokens > 1:
            spent = report.seconds - report.first_seconds
            self._between.observe(spent / (report.new_tokens - 1))

    def add(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Have another number told, read whenever it is asked for."""
        Gauge(f"larder_{name}", what, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def text_as_vllm(self, model: str) -> bytes:
        """What vLLM would tell as well, under its names.

        Args:
            model: that answers.
        """
        return generate_latest(_VllmCollector(self._registry, model))

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"larder_{name}", told, registry=self._registry, buckets=buckets)


class _VllmCollector(Collector):
    """A registry's numbers under the names of vLLM."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        return as_vllm_metrics(self._registry.collect(), self._model)


class _StatsCollector(Collector):
    """Reads a hub's numbers whenever they are asked for."""

    def __init__(self, hub: EngineClient) -> None:
        self._hub = hub

    def describe(self) -> Iterator[Metric]:
        return _families(ServerStats())

    def collect(self) -> Iterator[Metric]:
        return _families(self._hub.stats())


def _families(stats: ServerStats) -> Iterator[Metric]:
    yield from _gauges(stats)
    yield from _tokens(stats)
    yield from _counters(stats)


def _gauges(stats: ServerStats) -> Iterator[Metric]:
    yield _gauge("kv_cache_usage_perc", "Share of the device's budget.", _share(stats, "device"))
    yield _gauge(
        "kv_offload_cpu_cache_usage_perc", "Share of the host's budget.", _share(stats, "host")
    )
    yield _gauge("num_requests_running", "Requests that are read or answered.", stats.running)
    yield _gauge("num_requests_waiting", "Requests that wait for room.", stats.waiting)
    yield _labelled_gauge("sessions", "Sessions by state.", "state", stats.sessions)
    told = "Sessions with turns that only memory has, for the store did not take them."
    yield _gauge("sessions_not_durable", told, stats.sessions_not_durable)
    yield _labelled_gauge("tier_bytes", "Bytes held or on their way.", "tier", stats.tier_bytes)
    yield _labelled_gauge("peak_bytes", "The most that was held.", "tier", stats.peak_bytes)
    yield _labelled_gauge("budget_bytes", "Bytes that may be held.", "tier", stats.budget_bytes)


def _tokens(stats: ServerStats) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens)
    yield _counter("generation_tokens", "Tokens of answers.", stats.new_tokens)
    yield _counter("prefix_cache_queries", "Prompt tokens looked for.", stats.prompt_tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens not read again.", stats.cached_tokens)
    yield _counter("prompt_tokens_cached", "Prompt tokens not read again.", stats.cached_tokens)
    external = stats.prompt_tokens - stats.cached_tokens + stats.restored_tokens
    told = "Prompt tokens looked for in slower tiers."
    yield _counter("external_prefix_cache_queries", told, max(external, 0))
    told = "Prompt tokens that came back from slower tiers."
    yield _counter("external_prefix_cache_hits", told, stats.restored_tokens)
    yield _counter("tokens_restored", "Cached tokens of slower tiers.", stats.restored_tokens)
    yield _counter("tokens_recomputed", "Tokens read once more.", stats.recomputed_tokens)
    yield _counter("tokens_evicted", "Entries dropped, per head.", stats.evicted_tokens)
    yield _counter("tokens_merged", "Entries merged, per head.", stats.merged_tokens)
    computed = max(stats.prompt_tokens - stats.cached_tokens, 0)
    here = max(stats.cached_tokens - stats.restored_tokens, 0)
    sources = {"computed": computed, "cached": here, "restored": stats.restored_tokens}
    family = CounterMetricFamily(
        "larder_prompt_tokens_by_source", "Where prompt tokens came from.", labels=["source"]
    )
    for source, value in sources.items():
        family.add_metric([source], value)
    yield family


def _counters(stats: ServerStats) -> Iterator[Metric]:
    told = "Times that more was held than may be; must stay 0."
    yield _counter("budget_violations", told, stats.budget_violations)
    yield _counter("num_preemptions", "Answers that had to give way; none ever has to.", 0)
    yield _counter("decode_steps", "Passes that generate.", stats.steps)
    yield _counter("prefill_blocks", "Passes that read.", stats.blocks)
    yield _counter("ssd_written_bytes", "Bytes written to disk.", stats.written_bytes)
    yield _labelled_counter(
        "request_success", "Requests by their end.", "finished_reason", stats.done
    )
    yield _labelled_counter("admission_rejections", "Requests refused.", "code", stats.refused)
    told = "Sessions that may have been meant, and could not be had."
    yield _labelled_counter("sessions_passed_over", told, "reason", stats.passed_over)
    told = "Sessions whose saved text is damaged, gone on with from the text of a request."
    yield _labelled_counter("sessions_begun_again", told, "reason", stats.begun_again)
    told = "Turns that the store did not take when they were complete."
    yield _labelled_counter("turns_not_durable", told, "reason", stats.turns_not_durable)
    yield _labelled_counter("kv_parked", "Caches moved to a slower tier.", "tier", stats.parked)
    yield _labelled_counter("kv_restored", "Caches brought back.", "tier", stats.restored)
    told = "Saved sessions and caches that were not taken back; their text is read again."
    yield _labelled_counter("restore_rejected", told, "reason", stats.rejected)
    told = "Turns, caches and pins that the store has not taken."
    yield _labelled_counter("store_unwritten", told, "reason", stats.unwritten)


def _share(stats: ServerStats, tier: str) -> float:
    """How much of a tier's budget is taken; 0 where it has none."""
    limit = stats.budget_bytes.get(tier, 0)
    return stats.tier_bytes.get(tier, 0) / limit if limit else 0.0


def _gauge(name: str, told: str, value: float | int) -> Metric:
    return GaugeMetricFamily(f"larder_{name}", told, value=value)


def _counter(name: str, told: str, value: float | int) -> Metric:
    return CounterMetricFamily(f"larder_{name}", told, value=value)


def _labelled_gauge(name: str, told: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"larder_{name}", told, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _labelled_counter(name: str, told: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"larder_{name}", told, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
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
# What labels say there, where it is spelled differently here.
VLLM_LABEL_VALUES: Mapping[str, str] = MappingProxyType(
    {
        "computed": "local_compute",
        "cached": "local_cache_hit",
        "restored": "external_kv_transfer",
    }
)


def as_vllm_metrics(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """Those of our families that vLLM has, as it would tell them.

    Args:
        model: for the label `model_name`.
    """
    for family in families:
        name = family.name.removeprefix(LARDER_PREFIX)
        if name not in VLLM_NAMES:
            continue
        made = Metric(VLLM_PREFIX + name, family.documentation, family.type)
        for sample in family.samples:
            own = {key: VLLM_LABEL_VALUES.get(value, value) for key, value in sample.labels.items()}
            labels = {"model_name": model, "engine": "0", **own}
            # When a counter was made is no number of theirs that anybody reads.
            if not sample.name.endswith("_created"):
                spelled = VLLM_PREFIX + sample.name.removeprefix(LARDER_PREFIX)
                made.add_sample(spelled, labels, sample.value, sample.timestamp, sample.exemplar)
        yield made
