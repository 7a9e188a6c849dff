"""Our numbers under the names that vLLM gives the same things, for dashboards that know those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client.metrics_core import Metric

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
