"""Flags of `vllm serve` that `larder serve` does not have, and what to give in their place."""

from __future__ import annotations

import re

# Lines of flags that are answered alike, then the answer, indented.
TABLE = """
--api-key
  Give --keys FILE, lines of 'NAME KEY', or set LARDER_API_KEYS.
--gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override
  Give --kv-budget, the bytes of caches beside the weights, such as 2GiB.
--swap-space --kv-offloading-size --kv-offloading-backend
  Give --host-budget, the bytes of caches in host memory, such as 4GiB.
--kv-transfer-config --kv-events-config --ec-transfer-config
  Give --store, a store that machines share.
--kv-cache-dtype --calculate-kv-scales
  Give a --policy that quantizes, such as kivi; --codec is for what is saved.
--data-parallel-size --data-parallel-size-local --data-parallel-rank --data-parallel-start-rank
--data-parallel-address --data-parallel-rpc-port --data-parallel-backend
--data-parallel-external-lb --data-parallel-hybrid-lb --api-server-count --headless
--distributed-executor-backend
  Give --ray --replicas N.
--tensor-parallel-size --pipeline-parallel-size --decode-context-parallel-size
--prefill-context-parallel-size --enable-expert-parallel --enable-eplb --nnodes --node-rank
--master-addr --master-port
  A replica runs on one device: leave it out, or give --ray --replicas N for more machines.
--max-num-batched-tokens --enable-chunked-prefill --long-prefill-token-threshold
--max-num-partial-prefills --max-long-partial-prefills
  Prompts are always read in chunks: give --prefill-chunk, or --inter-token-latency, which
  sizes chunks.
--max-num-seqs --preemption-mode --async-scheduling --stream-interval
  Leave it out: memory (--kv-budget) decides how many requests run.
--enable-lora --lora-modules --max-loras --max-cpu-loras --max-lora-rank --lora-dtype
--fully-sharded-loras
  Give --adapter NAME=FOLDER once for each adapter; requests choose it by their field model.
--enable-prefix-caching --prefix-caching-hash-algo
  Leave it out: prefixes are always cached.
--enable-auto-tool-choice --exclude-tools-when-tool-choice-none --tool-parser-plugin
--reasoning-parser-plugin --tool-server
  Leave it out: tools are served where the chat template writes them, in the form of
  --tool-call-parser or of the template.
--structured-outputs-config --guided-decoding-backend
  Leave it out: llguidance serves constrained decoding; pip install 'larder[structured]'.
--default-chat-template-kwargs
  Leave it out: requests have the field chat_template_kwargs, and --chat-template FILE can set
  defaults.
--chat-template-content-format --trust-request-chat-template --response-role
--return-tokens-as-token-ids
  Leave it out: the chat template is the model's or that of --chat-template FILE, never a
  request's.
--enable-prompt-tokens-details --enable-per-request-metrics --enable-tokenizer-info-endpoint
  Leave it out: it is always on.
--enable-force-include-usage
  Leave it out: a stream ends with its usage if the request has stream_options.include_usage.
--revision --code-revision --tokenizer-revision --hf-token --download-dir --load-format
--config-format --model-loader-extra-config --ignore-patterns
  Give --model, a local folder or a .gguf file; HF_TOKEN and HF_HOME in the environment hold
  for downloads.
--tokenizer --tokenizer-mode --skip-tokenizer-init --hf-overrides --hf-config-path
--trust-remote-code --quantization --rope-scaling --rope-theta --model-impl
  Leave it out: what the folder of --model says holds, and code of a model is never run.
--generation-config --override-generation-config
  Give --temperature, --top-p, --top-k, --max-new-tokens: defaults of requests.
--task --runner --convert --pooler-config --override-pooler-config
  Leave it out: the model generates; give --embedding-model NAME for /v1/embeddings beside it.
--speculative-config --speculative-model --num-speculative-tokens
  Leave it out: there is no speculative decoding.
--enforce-eager --compilation-config --optimization-level --cudagraph-capture-sizes
--max-cudagraph-capture-size --max-seq-len-to-capture --attention-backend --block-size
--disable-sliding-window --disable-custom-all-reduce --disable-hybrid-kv-cache-manager
--cpu-offload-gb --enable-sleep-mode --additional-config
  Leave it out: nothing of this is chosen by hand.
--uds --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --enable-ssl-refresh
--root-path --allowed-origins --allowed-methods --allowed-headers --allow-credentials
--middleware --enable-request-id-headers --disable-fastapi-docs
  Put a proxy in front of --host and --port.
--h11-max-incomplete-event-size --h11-max-header-count
  Leave it out: headers have 64 KiB and 128 lines at most.
--disable-log-requests --enable-log-requests --enable-log-outputs --max-log-len
--log-config-file --uvicorn-log-level --disable-uvicorn-access-log --disable-log-stats
--otlp-traces-endpoint --collect-detailed-traces --disable-frontend-multiprocessing
  Leave it out: no text and no request is logged; figures are at /metrics.
--max-logprobs --logprobs-mode --logits-processors --logits-processor-pattern
  Leave it out: requests may ask for 20, of the model's own logits.
--limit-mm-per-prompt --allowed-media-domains --allowed-local-media-path --mm-processor-kwargs
--mm-processor-cache-gb
  Leave it out: a request has 64 images at most, and nothing is fetched.
--config
  Give the options on the command line.
"""
ANSWERS = {
    flag: " ".join(answer.split())
    for flags, answer in re.findall(r"((?:^--.*\n)+)((?:^ .*\n)+)", TABLE, re.MULTILINE)
    for flag in flags.split()
}
# Short flags by their first letter, which is all that the parser reports of `-tp 2` or `-O3`.
SHORT_FLAGS = {
    "-t": ("-tp", "--tensor-parallel-size"),
    "-p": ("-pp", "--pipeline-parallel-size"),
    "-d": ("-dp", "--data-parallel-size"),
    "-q": ("-q", "--quantization"),
    "-O": ("-O", "--optimization-level"),
    "-n": ("-n", "--nnodes"),
    "-r": ("-r", "--node-rank"),
}


def answer(option: str) -> str | None:
    """Message with what replaces a flag of `vllm serve`; None for any other option.

    Args:
        option: as it was given: with `_` for `-`, as `--no-FLAG`, or with a path behind a dot
            (`--compilation-config.mode`), which vLLM reads, too; of a short flag the first letter.
    """
    if option in SHORT_FLAGS:
        short, flag = SHORT_FLAGS[option]
        return f"{short} ({flag}) is a flag of vllm serve. {ANSWERS[flag]}"
    flag = option.partition(".")[0].replace("_", "-")
    found = ANSWERS.get(flag) or ANSWERS.get(f"--{flag.removeprefix('--no-')}")
    return None if found is None else f"{option} is a flag of vllm serve. {found}"
