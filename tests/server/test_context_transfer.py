"""Context caches that a model takes from another one of its shape (DroidSpeak)."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore

from larder import Policy
from larder.core import ModelError, UsageError
from larder.models import LoadedModel, with_adapters
from larder.server import ContextTransfer
from server_core import Served, characters, user
from tiny_models import tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
ONE, TWO = "Box 7 holds 12 coins. " * 3, "Box 9 holds 4 keys. " * 3
SIZES = [len(text.rstrip()) + 2 for text in (ONE, TWO)]
ASKED = [user("What does box 7 hold?")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(tiny("qwen3", layers=2), config).save_pretrained(str(folder))
    own, adapted = with_adapters(characters(), {"lora": str(folder)})
    return {"base": own, **adapted}


def served(models: dict[str, LoadedModel], layers: tuple[int, int]) -> dict[str, Served]:
    """Both models, of which the adapter takes what the base has read."""
    both = {name: Served(loaded, "ape") for name, loaded in models.items()}
    transfer = ContextTransfer("lora", "base", layers)
    transfer.connect({name: each.core for name, each in both.items()})
    return both


@pytest.mark.parametrize("layers", [(0, 2), (1, 2)])
def test_adapter_reuses_context_caches_of_its_base(models, layers) -> None:
    both = served(models, layers)
    own = Served(models["lora"], "ape").ask(ASKED, contexts=(ONE, TWO))
    read = both["base"].ask(ASKED, contexts=(ONE, TWO)).result
    assert read.cached_tokens == 0
    scoped = "a@lora"
    taken = both["lora"].ask(ASKED, tenant=scoped, contexts=(ONE, TWO))
    assert taken.result.cached_tokens == sum(SIZES) and not taken.result.lossless
    if layers == (0, 2):  # all layers are its own reading
        assert taken.text == own.text
    stranger = both["lora"].ask(ASKED, tenant="b@lora", contexts=(ONE, TWO)).result
    assert stranger.cached_tokens == 0
    assert both["base"].ask(ASKED, contexts=(ONE,)).result.cached_tokens == SIZES[0]


def test_base_does_not_reuse_context_caches_of_its_adapter(models) -> None:
    both = served(models, (1, 2))
    both["lora"].ask(ASKED, tenant="a@lora", contexts=(ONE,))
    assert both["base"].ask(ASKED, contexts=(ONE,)).result.cached_tokens == 0


def test_hidden_states_count_into_host_memory(models) -> None:
    with_states, without = served(models, (1, 2))["base"], Served(models["base"], "ape")
    for each in (with_states, without):
        each.ask(ASKED, contexts=(ONE,))
    source = with_states.core.contexts.own_source("a")
    chunks = with_states.core.contexts._chunks
    states = len(chunks._held) - len(without.core.contexts._chunks._held)
    assert states == 1 and source.state_layers == (1,)
    width, size = models["base"].decoder.spec.width, models["base"].decoder.spec.dtype.itemsize
    more = chunks.nbytes - without.core.contexts._chunks.nbytes
    assert more == SIZES[0] * width * size


def test_incompatible_transfers_are_refused(models) -> None:
    both = {name: Served(loaded, "ape").core for name, loaded in models.items()}
    with pytest.raises(ModelError, match="Layer 2 is none of the model"):
        ContextTransfer("lora", "base", (1, 3)).connect(both)
    with pytest.raises(ModelError, match="this model itself"):
        ContextTransfer("base", "base", (1, 2)).connect(both)
    transfer = ContextTransfer.parse("lora=base:1-2")
    assert transfer == ContextTransfer("lora", "base", (1, 2))
    transfer.check(("base", "lora"), Policy.parse("cacheblend"))
    with pytest.raises(UsageError, match="needs two models"):
        transfer.check(("base",), Policy.parse("cacheblend"))
    for policy in ("full", "ragcache", "kvcomm", "cachecraft"):
        with pytest.raises(UsageError, match="keeps what it makes of them as exact"):
            transfer.check(("base", "lora"), Policy.parse(policy))
    for text in ("lora", "lora=base", "lora=base:2-1", "lora=base:x-2"):
        with pytest.raises(UsageError):
            ContextTransfer.parse(text)
