"""Refusals of a LarderCache, and its state after a call that fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import larder
from architectures.families import families
from larder.core import BadParameter, CacheError, LarderError, ModelError, UsageError
from larder.interop import LarderCache
from larder.models import text_body_of, wrap_model
from model_runs import some_ids
from tiny_models import tiny

IDS = torch.tensor([some_ids(50)])
H2O = "protect(sinks=2, recent=8) > column_mass() > uniform() > every_step()"
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("epicache", "leave episodes"),
        ("kvzip", "give tokenizer="),
        ("finch", "needs the question before prefill"),
        ("nothing", "nothing"),
    ],
)
def test_policies_unsupported_by_generate_are_refused(
    llama: Any, policy: str, message: str
) -> None:
    with pytest.raises(LarderError, match=message):
        LarderCache(llama, policy)


def test_training_and_compiled_models_are_refused() -> None:
    with pytest.raises(ModelError, match="eval"):
        LarderCache(tiny("llama").train(), "full")
    compiled = tiny("llama")
    compiled.compile(backend="eager")
    with pytest.raises(ModelError, match=r"before torch\.compile"):
        LarderCache(compiled, "full")
    compiled = tiny("llama")
    own, compiled.forward = compiled.forward, torch.compile(compiled.forward, backend="eager")
    with pytest.raises(ModelError, match=r"before torch\.compile"):
        LarderCache(compiled, "full")
    compiled.forward = torch.compiler.disable(own)
    LarderCache(compiled, "full")


def test_model_held_by_a_decoder_is_refused() -> None:
    with wrap_model(tiny("llama")) as decoder:
        with pytest.raises(ModelError, match="held by another decoder"):
            LarderCache(decoder.module, "full")


def test_model_compiled_after_attachment_is_refused() -> None:
    model = tiny("llama")
    cache = LarderCache(model, "full")
    model.compile(backend="eager")
    with torch.no_grad(), pytest.raises(ModelError, match=r"before torch\.compile"):
        model._call_impl(IDS, past_key_values=cache)  # what the compiled call traces


def test_already_cached_texts_are_refused(llama: Any) -> None:
    cache = LarderCache(llama, "full")
    whole = llama.generate(IDS, past_key_values=cache, max_new_tokens=4, **GREEDY)
    options = {**GREEDY, "past_key_values": cache, "max_new_tokens": 2}
    with pytest.raises(CacheError, match="no tokens that the cache has not read"):
        llama.generate(IDS[:, :20], **options)
    with pytest.raises(CacheError, match=r"row 0 starts at position 0, but .* has read 53 tokens"):
        llama.generate(whole[:, :53], **options)  # transformers passes the whole text again
    with pytest.raises(CacheError, match="row 0 starts at position 23, but"):
        llama.generate(IDS[:, :30], **options)  # and of a shorter one its end
    mask = torch.ones(1, 30).index_fill_(1, torch.tensor([0]), 0)
    with pytest.raises(CacheError, match="mask has 30 columns, but the call has 7 behind 53"):
        llama.generate(IDS[:, :30], attention_mask=mask, **options)
    with pytest.raises(CacheError, match="leave the assistant out of later turns"):
        llama.generate(whole, prompt_lookup_num_tokens=3, **options)
    assert cache.sequences[0].next_position == cache.get_seq_length() == 53
    expected = llama.generate(whole, **{**options, "past_key_values": None})
    assert torch.equal(llama.generate(whole, **options), expected)


def test_callers_dynamic_cache_inside_the_context_is_refused(llama: Any) -> None:
    """The caller's cache would stay empty, and later calls would lack the text."""
    with larder.applied(llama, "full") as run, torch.no_grad():
        with pytest.raises(UsageError, match="A DynamicCache was given inside larder.applied"):
            llama.generate(IDS, past_key_values=DynamicCache(), max_new_tokens=2, **GREEDY)
        own = DynamicCache()
        out = llama(IDS, past_key_values=own)
        assert out.past_key_values is run.cache
        with pytest.raises(UsageError, match="past_key_values of its output"):
            llama(IDS[:, :1], past_key_values=own)
        llama(IDS[:, :1], past_key_values=out.past_key_values)
    assert out.past_key_values.get_seq_length() == 51


def test_cache_filled_without_larder_is_refused(llama: Any) -> None:
    with larder.applied(llama, "snapkv", 40), torch.no_grad():
        with pytest.warns(UserWarning, match="no policy acts"):
            own = llama(IDS).past_key_values
        with pytest.raises(UsageError, match=r"holds 50 tokens .* from the first call on"):
            llama(IDS[:, :1], past_key_values=own)


def test_guidance_inside_the_context_is_refused(llama: Any) -> None:
    """Its logits processor keeps a cache of its own."""
    options = {**GREEDY, "max_new_tokens": 4, "guidance_scale": 1.5}
    expected = llama.generate(IDS, **options)
    with larder.applied(llama, "full"), pytest.warns(UserWarning, match="no policy acts"):
        with pytest.raises(UsageError, match=r"guidance_scale.* outside larder\.applied"):
            llama.generate(IDS, **options)
    got = llama.generate(IDS, past_key_values=LarderCache(llama, "full"), **options)
    assert torch.equal(got, expected)


def test_invalid_tokenizer_is_refused(llama: Any) -> None:
    with pytest.raises(BadParameter, match="must be the tokenizer .* got 'smollm2'"):
        LarderCache(llama, "kvzip", 40, tokenizer="smollm2")


def test_calls_with_gradients_are_refused(llama: Any) -> None:
    with pytest.raises(ModelError, match="no_grad"):
        llama(IDS, past_key_values=LarderCache(llama, "full"))


def test_cache_of_another_model_is_refused(llama: Any) -> None:
    cache, other = LarderCache(llama, "full"), tiny("llama")
    with torch.no_grad():
        with pytest.raises(ModelError, match="make one for this model"):
            other(IDS, past_key_values=cache)
        LarderCache(other, "full")
        with pytest.raises(ModelError, match="make one for this model"):
            other(IDS, past_key_values=cache)


def test_calls_that_do_not_fit_the_cache_are_refused(llama: Any) -> None:
    cache = LarderCache(llama, "full")
    with torch.no_grad():
        llama(IDS, past_key_values=cache)
        with pytest.raises(CacheError, match="1 rows, but the call has 2"):
            llama(IDS.expand(2, -1), past_key_values=cache)
        with pytest.raises(ModelError, match="output_attentions"):
            llama(IDS, past_key_values=cache, output_attentions=True)
        with pytest.raises(ModelError, match="4 dimensions"):
            llama(IDS, past_key_values=cache, attention_mask=torch.ones(1, 1, 50, 50))
        with pytest.raises(ModelError, match="1 rows of 49 columns, but the call has 1 rows of 50"):
            llama(IDS, past_key_values=cache, attention_mask=torch.ones(1, 49))
        with pytest.raises(ModelError, match="position_ids"):
            llama(IDS, past_key_values=LarderCache(llama, "full"), position_ids=IDS)
        with pytest.raises(CacheError, match="got 3"):
            cache.crop(3)
        right = torch.cat([torch.ones(1, 47), torch.zeros(1, 3)], 1).long()
        empty = LarderCache(llama, "full")
        with pytest.raises(ModelError, match="Row 0 ends with 3 columns of padding"):
            llama.generate(IDS, attention_mask=right, past_key_values=empty, max_new_tokens=2)
    assert cache.get_seq_length() == 50


def test_crop_of_a_moved_window_is_refused() -> None:
    model = tiny("gemma3")
    cache = LarderCache(model, "full")
    with torch.no_grad():
        for ids in (IDS, *IDS[:, :3].split(1, dim=1)):
            model(ids, past_key_values=cache)
    with pytest.raises(CacheError, match="only the last 1 have their entries in every head"):
        cache.crop(-2)


def test_candidates_under_eviction_at_every_step_are_refused(llama: Any) -> None:
    options = {**GREEDY, "max_new_tokens": 4, "prompt_lookup_num_tokens": 3}
    with larder.applied(llama, H2O, 40), pytest.raises(UsageError, match="prefill_only"):
        llama.generate(IDS, **options)
    with pytest.raises(UsageError, match="prefill_only"):
        llama.generate(IDS, past_key_values=LarderCache(llama, H2O, 40), **options)


def fail(*args: Any) -> None:
    raise RuntimeError("a layer failed")


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ids", [IDS, IDS[:, :1]], ids=["text", "step"])
def test_call_that_fails_leaves_no_trace(llama: Any, ids: Any) -> None:
    cache, implementation = LarderCache(llama, "full"), llama.config._attn_implementation
    with torch.no_grad():
        llama(IDS, past_key_values=cache)
        for failure, kind in ((fail, RuntimeError), (interrupt, KeyboardInterrupt)):
            hook = llama.model.layers[1].mlp.register_forward_hook(failure)
            with pytest.raises(kind):
                llama(ids, past_key_values=cache)
            hook.remove()
        got = llama(ids, past_key_values=cache).logits
        expected = llama(torch.cat([IDS, ids], 1)).logits[:, 50:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert llama.config._attn_implementation == implementation
    assert cache.sequences[0].next_position == 50 + ids.shape[1]


@pytest.mark.parametrize("name", ["Llama", "Llava"])
def test_concurrent_call_of_another_thread_is_refused(name: str) -> None:
    """The second call would roll the first one back, and run in its attention."""
    model: Any = next(family for family in families() if family.name == name).model()
    caches, refused = [LarderCache(model, "full") for _ in range(2)], list[Any]()

    def call(cache: LarderCache) -> Any:
        with torch.no_grad():
            return model(IDS, past_key_values=cache).logits

    def call_meanwhile(*args: Any) -> None:
        hook.remove()  # or a call that is not refused would start another
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(call, caches[1]).exception())

    body: Any = text_body_of(model)
    hook = body.layers[1].mlp.register_forward_hook(call_meanwhile)
    got = call(caches[0])
    assert refused and all("one thread at a time" in str(error) for error in refused)
    hook = body.layers[1].mlp.register_forward_hook(lambda *_: None)  # the same layers run
    assert torch.equal(got, call(caches[1]))
    hook.remove()
    assert caches[0].lengths() == caches[1].lengths()


def test_end_token_of_a_failed_call_is_read_again(llama: Any) -> None:
    rows, cache = IDS.expand(2, -1), LarderCache(llama, "full")
    end = torch.tensor([[llama.generation_config.eos_token_id], [5]])
    with torch.no_grad():
        llama(rows, past_key_values=cache)
        hook = llama.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError):
            llama(end, past_key_values=cache)
        hook.remove()
        llama(end, past_key_values=cache)
    assert cache.sequences[0].next_position == 51


def test_invalid_model_is_refused() -> None:
    with pytest.raises(ModelError, match="int is not a model of transformers: give one of"):
        LarderCache(3)


def test_call_without_a_cache_inside_the_context_is_warned_about_once(llama: Any) -> None:
    with larder.applied(llama, "snapkv", 40) as run, torch.no_grad():
        with pytest.warns(UserWarning, match="called without a cache inside larder.applied"):
            llama(IDS, use_cache=False)
        llama(IDS, use_cache=False)  # a second warning would be an error
        assert run.cache is None
        llama.generate(IDS, max_new_tokens=2, **GREEDY)
        assert run.cache is not None
    llama(IDS, use_cache=False)
    with larder.applied(llama, "snapkv", 40), torch.no_grad():
        with pytest.warns(UserWarning, match="no policy acts"):
            llama(IDS)  # as lm-eval's HFLM calls it
