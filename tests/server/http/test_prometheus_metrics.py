"""Access to `/metrics` by operators and tenants."""

from __future__ import annotations

import httpx2

from server.http.conftest import BOB
from server.http.running_server import Running
from server.http.test_http import chat, error


def test_metrics_of_all_tenants_are_for_operators(http: httpx2.Client, served: Running) -> None:
    http.post("/v1/chat/completions", json=chat("hello"))
    text = http.get("/metrics").text
    for line in (
        "larder_kv_cache_usage_perc 0.25",
        'larder_tier_bytes{tier="device"} 10.0',
        "larder_budget_violations_total 0.0",
        'larder_request_success_total{finished_reason="stop"} 1.0',
    ):
        assert line in text.splitlines()
    assert "larder_time_to_first_token_seconds_count" in text
    theirs = http.get("/metrics?names=vllm").text.splitlines()
    for line in (
        'vllm:kv_cache_usage_perc{engine="0",model_name="fake/model"} 0.25',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake/model"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="fake/model"} ',
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="fake/model",'
        'source="external_kv_transfer"} 0.0',
    ):
        assert any(each.startswith(line) for each in theirs)
    assert not [each for each in theirs if "larder_" in each]
    error(http.get("/metrics?names=other"), 400)
    result = http.get("/metrics", headers={"authorization": f"Bearer {BOB}"})
    assert error(result, 403)["code"] == "forbidden"
