"""Published methods by name, each a sentence of parts. Budgets and blocks are left open.

`epicache` reads as many episodes together as an accelerator's memory holds, and one after the other
on a CPU, where that is faster and holds least; `epicache_batched` reads all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, str] = {
    "full": "whole() > unlimited()",
    "epicache": 'episodes() > episodic() > patched(prompt="episode") > sensitivity()',
    "epicache_batched": (
        'episodes() > episodic(together="all") > patched(prompt="episode") > sensitivity()'
    ),
    "streaming_llm": "blockwise() > protect(sinks=4, recent=0) > sinks_and_window() > uniform()",
    "snapkv": "blockwise() > snapkv() > pooled()",
    "snapkv_whole": "whole() > snapkv() > pooled()",
    "keydiff": "blockwise() > keydiff() > uniform()",
    "kvzip": "blockwise() > reconstruct() > pooled()",
    "kvzip_whole": "whole() > reconstruct() > global()",
    "infinipot": 'blockwise() > patched(prompt="summarize") > pooled()',
    "exact_question": 'blockwise() > patched(prompt="question") > pooled()',
    "h2o": "blockwise() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()",
    "d2o": (
        "blockwise() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > "
        "fold_ema() > every_step()"
    ),
    "d2o_whole": (
        "whole() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > "
        "fold_ema() > every_step()"
    ),
    "random": "blockwise() > random() > uniform()",
}
