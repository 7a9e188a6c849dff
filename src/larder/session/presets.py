"""Published methods by name, each a sentence of parts. Budgets and blocks are left open.

The bare name of a paper is the paper's method. Methods that attend to the whole prompt before they
drop, merge or round anything read `whole()`; `NAME_blockwise` bounds memory while it reads. Papers
that decide while they read are block-wise by themselves: StreamingLLM, KeyDiff, InfiniPot, CAOTE,
RoCo (strides of the prompt in its released code), SirLLM, LaCache, DuoAttention.
`snapkv_blockwise`, `kvzip_blockwise`, `infinipot_summarize` and `oraclekv` are the forms that
EpiCache compares with: block by block, with heads that share a budget. `snapkv_pooled` is SnapKV
with such heads. A sentence that spells no protection keeps 4 sinks and 32 recent tokens.

`epicache` protects nothing, as its paper and code. A layer keeps at least .015 of the average, so
that none is left empty and sharper alphas still differ (paper: no floor, code: a quarter). It reads
as many episodes together as an accelerator's memory holds, and one after the other on a CPU, where
that is faster and holds least; `epicache_batched` reads all of them together.

`razor_attention`, `duo_attention` and `kvzip_heads` keep their retrieval heads whole where the
budget allows it; where it does not, `snapkv` says what these keep, which the papers have no need
for. `squeeze_attention`, `cam` and `kvmerger` stand on top of another method: here on H2O.

`finch` reads its question behind every block and forgets it; the question stays where it is asked,
behind what is kept. Blocks compete for one budget (inferred; the paper keeps a share of each).

`laq` and `dapq` are made for contexts that end with the question. Here questions come later: `laq`
drafts an answer to a general request in its place, and `dapq` goes without.

`kv_direct` loses nothing: what its budget has no room for is computed again whenever it is needed.

From `icecache` to `exact_topk`, what is rejected is parked and found again. Sinks and windows are
inside the budget; where papers have them for budgets of thousands they are smaller here
(`pqcache`, `token_select`, `retrieval_attention`, `icecache_small`). `icecache_ahead` is its
paper's IceCache (P). Where a paper does not say that its first layers are spared, none are.
`rocketkv`, `sentencekv` and `mpcache` cut the text once for good before they search what is left.

Checked against released code: `rocketkv` (window 32, kernel 63, exponent of the cut; its ratio
there follows from what the cut left, here it is 6), `mpcache` (clusters, shares within, slant;
there the last fifth of the text is observed and thresholds per data set leave 15 to 66 % of it,
here the window is SnapKV's and 75 % stay) and `lserve` (half of the heads stream, digests of 16
entries; there pages of 64 hold four of them, a choice stands for 4 steps, and 128 first and 256
latest tokens stay under a budget of 4096). `fasa` is checked against a note on the paper only.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, str] = {
    "full": "whole() > unlimited()",
    "epicache": (
        'episodes() > episodic() > protect(sinks=0, recent=0) > patched(prompt="episode") > '
        "sensitivity(floor=0.015)"
    ),
    "epicache_batched": (
        'episodes() > episodic(together="all") > protect(sinks=0, recent=0) > '
        'patched(prompt="episode") > sensitivity(floor=0.015)'
    ),
    "streaming_llm": "blockwise() > protect(sinks=4, recent=0) > sinks_and_window() > uniform()",
    "streaming_llm_compact": (
        "blockwise() > protect(sinks=4, recent=0) > sinks_and_window() > uniform() > compact() > "
        "every_step()"
    ),
    "snapkv": "whole() > snapkv() > uniform()",
    "snapkv_pooled": "whole() > snapkv() > pooled()",
    "snapkv_blockwise": "blockwise() > snapkv() > pooled()",
    "keydiff": "blockwise() > keydiff() > uniform()",
    "kvzip": "whole() > reconstruct() > global()",
    "kvzip_blockwise": "blockwise() > reconstruct() > pooled()",
    "infinipot": ("blockwise() > protect(sinks=0, recent=0) > infinipot() > uniform() > compact()"),
    "infinipot_summarize": 'blockwise() > patched(prompt="summarize") > pooled()',
    "oraclekv": 'blockwise() > patched(prompt="guidance") > pooled()',
    "sirllm": "blockwise() > protect(sinks=4, recent=0) > novelty() > uniform()",
    "laq": 'whole() > lookahead(prompt="guidance") > uniform()',
    "dapq": "whole() > positions_first() > uniform()",
    "exact_question": 'blockwise() > patched(prompt="question") > pooled()',
    "finch": (
        "blockwise() > protect(sinks=0, recent=0) > "
        'patched(prompt="question", variant="paper") > scaled_mean() > group_mean() > uniform() > '
        "compact()"
    ),
    "h2o": "whole() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()",
    "h2o_blockwise": (
        "blockwise() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()"
    ),
    "d2o": (
        "blockwise() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > "
        "fold_ema() > every_step()"
    ),
    "d2o_whole": (
        "whole() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > "
        "fold_ema() > every_step()"
    ),
    "tova": "whole() > protect(sinks=0, recent=0) > last_query() > uniform() > every_step()",
    "roco": "blockwise() > protect(sinks=0, recent=10) > roco() > uniform() > every_step()",
    "morphkv": "whole() > protect(sinks=0, recent=0) > morph() > uniform() > every_step()",
    "lazy_eviction": (
        "whole() > protect(sinks=0, recent=0.12) > recurrence() > uniform() > lagged()"
    ),
    "scope": (
        "whole() > protect(sinks=0, recent=0) > snapkv(window=8) > uniform() > "
        'split(scorer="last_query() > sum() > group_mean()")'
    ),
    "leverage": "blockwise() > leverage() > uniform()",
    "expected": "whole() > expected() > ada()",
    "lagkv": "whole() > protect(sinks=16, recent=0) > lagkv() > uniform()",
    "keynorm": "blockwise() > keynorm() > uniform()",
    "chunkkv": "whole() > snapkv() > chunk() > uniform()",
    "chunkkv_reuse": "whole() > snapkv() > layer_mean() > chunk(layers=2) > uniform()",
    "defensivekv": (
        "whole() > protect(sinks=0, recent=0) > snapkv(kernel=1) > defensive() > group_max() > "
        'criticality(epsilon=0, mass=0.9, norms="share") > pooled()'
    ),
    "layer_defensivekv": (
        "whole() > protect(sinks=0, recent=0) > snapkv(kernel=1) > defensive() > group_max() > "
        'criticality(epsilon=0, mass=0.9, norms="share") > global()'
    ),
    "criticalkv": "whole() > snapkv() > criticality() > uniform()",
    "caote": "blockwise() > snapkv() > caote() > uniform()",
    "pyramidkv": "whole() > snapkv(window=8) > pyramid()",
    "adakv": "whole() > snapkv() > ada()",
    "cake": (
        "whole() > protect(sinks=0, recent=0) > "
        'snapkv(kernel=5, pool="mean") > mean_variance() > group_mean() > cake()'
    ),
    "prefixkv": "whole() > snapkv() > mean() > layer_mean() > prefixkv()",
    "dynamickv": "whole() > protect(sinks=0, recent=0) > snapkv(window=8) > dynamic()",
    "headkv": "blockwise() > snapkv() > headkv()",
    "compresskv": (
        "whole() > protect(sinks=0, recent=0) > "
        'snapkv(window=8, kernel=5, pool="mean") > retrieval() > eviction_error()'
    ),
    "razor_attention": (
        "whole() > protect(sinks=4, recent=0.4) > snapkv() > retrieval_heads() > razor()"
    ),
    "duo_attention": (
        "blockwise() > protect(sinks=4, recent=0.25) > snapkv() > "
        'retrieval_heads(share=0.5, trial="passkeys")'
    ),
    "kvzip_heads": (
        "blockwise() > protect(sinks=4, recent=0.25) > snapkv() > "
        'retrieval_heads(share=0.5, trial="copy")'
    ),
    "squeeze_attention": (
        "whole() > protect(sinks=0, recent=0.5) > column_mass() > squeeze() > every_step()"
    ),
    "kvcompose": "whole() > reconstruct() > group_and_layer() > composite()",
    "windowkv": "whole() > snapkv() > layer_mean() > window() > pyramid()",
    "kvmerger": "blockwise() > column_mass() > uniform() > kvmerger()",
    "cam": (
        "blockwise() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > cam() > "
        "every_step()"
    ),
    "chelsea": "blockwise() > sinks_and_window() > uniform() > chelsea() > lagged(tokens=64)",
    "elastic_cache": "blockwise() > column_mass() > uniform() > elastic()",
    "lacache": (
        "blockwise() > protect(sinks=4, recent=32) > sinks_and_window() > ladder() > every_step()"
    ),
    "kivi": "whole() > sinks_and_window() > uniform() > quantized(bits=2) > every_step()",
    "kivi_blockwise": (
        "blockwise() > sinks_and_window() > uniform() > quantized(bits=2) > every_step()"
    ),
    "mikv": "whole() > snapkv() > uniform() > mikv() > every_step()",
    "arkv": (
        'whole() > snapkv(kernel=5, pool="mean") > mean_variance() > group_mean() > '
        "uniform() > arkv()"
    ),
    "qaq": "blockwise() > sinks_and_window() > uniform() > qaq() > every_step()",
    "think": "whole() > snapkv() > uniform() > think()",
    "minicache": "whole() > sinks_and_window() > uniform() > minicache()",
    "icecache": (
        "blockwise() > protect(sinks=32, recent=16) > sinks_and_window(sinks=32) > uniform() > "
        "park() > dci() > lagged(tokens=16)"
    ),
    "icecache_ahead": (
        "blockwise() > protect(sinks=32, recent=16) > sinks_and_window(sinks=32) > uniform() > "
        'park() > dci(fetch="ahead") > lagged(tokens=16)'
    ),
    "icecache_small": (
        "blockwise() > protect(sinks=8, recent=8) > sinks_and_window(sinks=8) > uniform() > "
        "park() > dci(page=4) > lagged(tokens=4)"
    ),
    "quest": (
        "blockwise() > protect(sinks=0, recent=16) > sinks_and_window(sinks=0) > uniform() > "
        "park() > bounds(page=16) > lagged(tokens=16)"
    ),
    "arkvale": (
        "blockwise() > protect(sinks=32, recent=32) > sinks_and_window(sinks=32) > uniform() > "
        'park() > bounds(page=32, digest="arkvale") > lagged(tokens=32)'
    ),
    "clusterkv": (
        "blockwise() > protect(sinks=16, recent=32) > sinks_and_window(sinks=16) > uniform() > "
        "park() > clusters() > lagged(tokens=16)"
    ),
    "pqcache": (
        "blockwise() > protect(sinks=32, recent=0.5) > sinks_and_window(sinks=32) > uniform() > "
        "park() > pq(dense=0) > lagged(tokens=16)"
    ),
    "sparq": (
        "blockwise() > protect(sinks=0, recent=0.25) > sinks_and_window(sinks=0) > uniform() > "
        "park() > sparq(dense=0) > lagged(tokens=16)"
    ),
    "token_select": (
        "blockwise() > protect(sinks=16, recent=0.2) > sinks_and_window(sinks=16) > uniform() > "
        'park() > votes(dense=0, prefill="recalled") > lagged(tokens=16)'
    ),
    "retrieval_attention": (
        "blockwise() > protect(sinks=32, recent=32) > sinks_and_window(sinks=32) > uniform() > "
        "park() > graph(tokens=100, dense=0) > lagged(tokens=16)"
    ),
    "retroinfer": (
        "blockwise() > protect(sinks=4, recent=64) > sinks_and_window() > uniform() > "
        "park() > wave(dense=0) > lagged(tokens=16)"
    ),
    "sentencekv": (
        "whole() > protect(sinks=4, recent=32) > snapkv() > uniform() > "
        'park(cut="budgets", size=3) > sentences(dense=0) > lagged(tokens=16)'
    ),
    "fasa": (
        "blockwise() > protect(sinks=4, recent=32) > sinks_and_window() > uniform() > "
        "park() > fasa(dense=0) > lagged(tokens=16)"
    ),
    "rocketkv": (
        "whole() > protect(sinks=0, recent=32) > snapkv(kernel=63) > uniform() > "
        'park(cut="split") > rocket(ratio=6, dense=0) > lagged(tokens=16)'
    ),
    "mpcache": (
        "whole() > protect(sinks=4, recent=32) > snapkv() > uniform() > "
        'park(cut="share", size=0.75) > mpcache(dense=0) > lagged(tokens=16)'
    ),
    "lserve": (
        "blockwise() > protect(sinks=4, recent=32) > sinks_and_window() > "
        'retrieval_heads(share=0.5, trial="passkeys") > park(cut="streaming") > bounds(dense=0) > '
        "lagged(tokens=16)"
    ),
    "kv_direct": (
        "blockwise() > protect(sinks=0, recent=0.5) > sinks_and_window(sinks=0) > uniform() > "
        "recompute() > every_step()"
    ),
    "exact_topk": (
        "blockwise() > protect(sinks=32, recent=16) > sinks_and_window(sinks=32) > uniform() > "
        "park() > flat() > lagged(tokens=16)"
    ),
    "random": "blockwise() > random() > uniform()",
}
