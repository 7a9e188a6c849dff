from .attachment import attached as attached
from .cache import LarderCache as LarderCache
from .dynamic_cache import dynamic_cache_of as dynamic_cache_of
from .lm_eval_arguments import GenerationOptions as GenerationOptions
from .lm_eval_arguments import batch_size_of as batch_size_of
from .policy_context import AppliedPolicy as AppliedPolicy
from .press_policy import entry_digests as entry_digests
from .press_policy import matched_indices as matched_indices
