"""Library of C kernels, compiled when Larder is installed.

The wheel carries it for its platform; installing from source compiles it where a C compiler is
found. Without it, numba compiles kernels at their first call, which takes seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from larder.core.errors import DependencyError

MODULE = "larder.ops.cpu._c"  # extension by which the installation names the library's file
TORCH_CPU = ("libtorch_cpu.so", "libtorch_cpu.dylib")

LAYOUT = 8  # of the structs below; raised with `larder_layout` of c/decode_attention.c

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64


class AttentionCall(ctypes.Structure):
    """`struct attention` of c/decode_attention.c."""

    _fields_ = [
        ("queries", POINTER),
        ("keys", POINTER),
        ("values", POINTER),
        ("bias", POINTER),
        ("logits", POINTER),
        ("starts", POINTER),
        ("lengths", POINTER),
        ("outs", POINTER),
        ("lses", POINTER),
        ("heads", INTEGER),
        ("num_queries", INTEGER),
        ("head_dim", INTEGER),
        ("item_bytes", INTEGER),
        ("logits_stride", INTEGER),
        ("scaling", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("step", POINTER),
        ("kv_heads", INTEGER),
        ("splice", POINTER),
        ("coded", POINTER),
    ]


class CodedSide(ctypes.Structure):
    """`struct coded_side` of c/coded_entries.h."""

    _fields_ = [
        *((name, POINTER) for name in ("codes", "offsets", "scales", "channels", "factors")),
        *((name, POINTER) for name in ("outlier_places", "outliers")),
        *((name, INTEGER) for name in ("row_bytes", "bits", "width", "group", "is_by_row")),
        ("num_outliers", INTEGER),
    ]


class CodedEntries(ctypes.Structure):
    """`struct coded_entries` of c/coded_entries.h."""

    _fields_ = [
        ("keys", CodedSide),
        ("values", CodedSide),
        ("groups", POINTER),
        ("group_starts", POINTER),
    ]


class BlockCall(ctypes.Structure):
    """`struct block_call` of c/block_attention.c."""

    _fields_ = [
        *((name, POINTER) for name in ("queries", "keys", "values", "bias", "starts", "lengths")),
        *((name, POINTER) for name in ("new_keys", "new_values", "limits")),
        *((name, POINTER) for name in ("outs", "lses", "sums")),
        *((name, INTEGER) for name in ("heads", "group_len", "query_len", "new_len")),
        *((name, INTEGER) for name in ("head_dim", "item_bytes", "is_largest")),
        ("scaling", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class TreeSearchCall(ctypes.Structure):
    """`struct tree_search` of c/tree_search.c."""

    _fields_ = [
        *((name, POINTER) for name in ("queries", "keys", "starts", "levels", "beams")),
        *((name, POINTER) for name in ("page_bases", "cell_bases", "members", "fills", "nexts")),
        *((name, POINTER) for name in ("firsts", "centers", "scales", "means", "ranked", "seen")),
        *(
            (name, INTEGER)
            for name in ("heads", "trees", "head_dim", "item_bytes", "page", "count")
        ),
        ("threads", INTEGER),
    ]


class WeighingCall(ctypes.Structure):
    """`struct weighing` of c/attention_weights.c."""

    _fields_ = [
        ("logits", POINTER),
        ("starts", POINTER),
        ("lengths", POINTER),
        ("weights", POINTER),
        ("logits_stride", INTEGER),
        ("heads", INTEGER),
        ("group_len", INTEGER),
        ("query_len", INTEGER),
        ("join", INTEGER),
    ]


class CodeTables(ctypes.Structure):
    """`struct code_tables` of c/transform_attention.c."""

    _fields_ = [("rows", POINTER), ("classes", INTEGER), ("first_raw", INTEGER)]


class MoveCall(ctypes.Structure):
    """`struct move` of c/removal.c."""

    _fields_ = [
        ("storages", POINTER),
        ("row_bytes", POINTER),
        ("count", INTEGER),
        ("kept", POINTER),
        ("starts", POINTER),
        ("new_starts", POINTER),
        ("lengths", POINTER),
        ("new_lengths", POINTER),
        ("heads", INTEGER),
        ("shares", INTEGER),
        ("next", INTEGER),
    ]


class EvictionCall(ctypes.Structure):
    """`struct eviction` of c/decode_eviction.h."""

    _fields_ = [
        ("layers", POINTER),
        ("count", INTEGER),
        ("roomy", INTEGER),
        *((name, ctypes.c_float) for name in ("rate", "rest", "slack")),
        ("threads", ctypes.c_int32),
        ("next", INTEGER),
        ("columns", POINTER),
        ("scoring", INTEGER),
        ("sinks", INTEGER),
        ("spared", ctypes.c_double),
        *((name, INTEGER) for name in ("window", "sampled", "seed")),
    ]


class NearestCall(ctypes.Structure):
    """`struct nearest` of c/entry_merge.c."""

    _fields_ = [
        *((name, POINTER) for name in ("rows", "starts", "lengths", "marked", "query_rows")),
        *((name, POINTER) for name in ("cosines", "nearest")),
        *((name, INTEGER) for name in ("head_dim", "item_bytes", "count", "next")),
    ]


class FoldingCall(ctypes.Structure):
    """`struct folding` of c/entry_merge.c."""

    _fields_ = [
        *((name, POINTER) for name in ("sources", "targets", "heads", "likeness", "given")),
        *((name, POINTER) for name in ("before", "moved", "froms", "intos", "weights")),
        *((name, INTEGER) for name in ("count", "groups")),
        *((name, ctypes.c_float) for name in ("rate", "rest", "slack", "own")),
    ]


class SpreadingCall(ctypes.Structure):
    """`struct spreading` of c/entry_merge.h."""

    _fields_ = [
        *((name, POINTER) for name in ("mass", "starts", "lengths", "new_lengths", "kept")),
        *((name, POINTER) for name in ("gone", "drawn", "froms", "intos")),
        *((name, POINTER) for name in ("key_weights", "value_weights")),
        *((name, INTEGER) for name in ("count", "window")),
    ]


class SummingCall(ctypes.Structure):
    """`struct summing` of c/entry_merge.c."""

    _fields_ = [
        *((name, POINTER) for name in ("stored", "starts", "lengths", "sources", "targets")),
        *((name, POINTER) for name in ("weights", "into", "sums")),
        *((name, INTEGER) for name in ("dim", "item_bytes", "count")),
    ]


def integers(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Array of int64 for a call."""
    return (INTEGER * len(numbers))(*numbers)


@cache
def c_library() -> ctypes.CDLL | None:
    """The loaded library, or None where it was not compiled.

    Raises:
        DependencyError: it was compiled from other sources.
    """
    found = find_spec(MODULE)
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    layout: Callable[[], int] | None = getattr(library, "larder_layout", None)
    if layout is None or layout() != LAYOUT:
        raise DependencyError(
            f"The C kernels in {found.origin} were compiled from other sources than those of this "
            "Larder: install it again, in a checkout with `make install`."
        )
    library.larder_set_openmp.argtypes = [POINTER]
    library.larder_set_openmp(_openmp_of_torch())
    _declare(library)
    _declare_conversion(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Give the functions the types of their arguments and results."""
    library.larder_decode_attention.argtypes = [ctypes.POINTER(AttentionCall)]
    library.larder_coded_attention.argtypes = [
        ctypes.POINTER(AttentionCall),
        ctypes.POINTER(CodedEntries),
    ]
    for suffix in ("", "_float32"):
        for name in ("attention_inputs", "layer_output"):
            getattr(library, f"larder_{name}{suffix}").argtypes = [POINTER, POINTER]
        linear = getattr(library, f"larder_linear{suffix}")
        linear.argtypes = [*[POINTER] * 3, *[INTEGER] * 3, POINTER, ctypes.c_int32]
        getattr(library, f"larder_most_rows{suffix}").restype = INTEGER
    _declare_recall(library)
    library.larder_decode_step.argtypes = [ctypes.POINTER(AttentionCall), POINTER, POINTER]
    library.larder_top_masks.argtypes = [POINTER, INTEGER, INTEGER, INTEGER, POINTER]
    library.larder_weights_from_logits.argtypes = [ctypes.POINTER(WeighingCall)]
    library.larder_keep_highest.argtypes = [*[POINTER] * 3, INTEGER, INTEGER, POINTER]
    library.larder_keep_highest.restype = None
    library.larder_check_kept.argtypes = [*[POINTER] * 5, INTEGER, POINTER]
    library.larder_check_kept.restype = INTEGER
    library.larder_plan_removal.argtypes = [*[POINTER] * 5, INTEGER, INTEGER, *[POINTER] * 3]
    library.larder_plan_removal.restype = INTEGER
    library.larder_move_rows.argtypes = [ctypes.POINTER(MoveCall)]
    library.larder_move_rows.restype = None
    if hasattr(library, "larder_remove_planned"):
        library.larder_plan_removals.argtypes = [POINTER, INTEGER, INTEGER]
        library.larder_plan_removals.restype = INTEGER
        library.larder_remove_planned.argtypes = [POINTER, INTEGER, INTEGER]
        library.larder_remove_planned.restype = None
    library.larder_evict_step.argtypes = [ctypes.POINTER(EvictionCall)]
    library.larder_evict_step.restype = None
    library.larder_journal_bytes.argtypes = [POINTER]
    library.larder_journal_bytes.restype = INTEGER
    library.larder_undo_evictions.argtypes = [POINTER, INTEGER]
    library.larder_undo_evictions.restype = None
    library.larder_nearest_rows.argtypes = [ctypes.POINTER(NearestCall), ctypes.c_int32]
    library.larder_nearest_rows.restype = None
    library.larder_threshold_folds.argtypes = [ctypes.POINTER(FoldingCall)]
    library.larder_threshold_folds.restype = INTEGER
    library.larder_normalize_folds.argtypes = [INTEGER, ctypes.c_float, *[POINTER] * 4]
    library.larder_normalize_folds.restype = INTEGER
    library.larder_spread_folds.argtypes = [ctypes.POINTER(SpreadingCall)]
    library.larder_spread_folds.restype = INTEGER
    library.larder_sum_rows.argtypes = [ctypes.POINTER(SummingCall)]
    library.larder_sum_rows.restype = INTEGER
    library.larder_transform_attention.argtypes = [POINTER]
    _declare_range_coder(library)
    if hasattr(library, "larder_encode_planes"):
        _declare_planes(library)


def _declare_recall(library: ctypes.CDLL) -> None:
    """The same of trees of keys and slots of pages; a library of an older version lacks some."""
    library.larder_load_pages.argtypes = [POINTER]
    library.larder_tree_search.argtypes = [ctypes.POINTER(TreeSearchCall)]
    if hasattr(library, "larder_recall_step"):
        library.larder_recall_step.argtypes = [POINTER]
    if hasattr(library, "larder_tree_insert"):
        library.larder_tree_insert.argtypes = [POINTER]
        library.larder_tree_parents.argtypes = [POINTER]
        library.larder_tree_levels.argtypes = [INTEGER, INTEGER, *[POINTER] * 7]
        library.larder_tree_levels.restype = None


def _declare_range_coder(library: ctypes.CDLL) -> None:
    """Declare functions of the range coder, and of entries of blocks of any coder."""
    library.larder_decode_components.argtypes = [
        *[POINTER] * 2,
        *[INTEGER] * 2,
        *[POINTER, INTEGER],
        ctypes.c_double,
        *[POINTER] * 2,
    ]
    library.larder_decode_rows.argtypes = [POINTER]
    library.larder_encode_components.argtypes = [*[POINTER] * 2, *[INTEGER] * 2, *[POINTER] * 3]
    library.larder_encode_components.restype = INTEGER
    library.larder_coded_bits.argtypes = [*[POINTER] * 2, *[INTEGER] * 2, *[POINTER] * 3]
    library.larder_coded_bits.restype = ctypes.c_double


def _declare_planes(library: ctypes.CDLL) -> None:
    """Declare functions of the bit-plane coder, which a library of an older version lacks."""
    library.larder_encode_planes.argtypes = [*[INTEGER] * 2, *[POINTER] * 3]
    library.larder_encode_planes.restype = INTEGER
    library.larder_count_planes.argtypes = [*[INTEGER] * 2, *[POINTER] * 3]
    library.larder_count_planes.restype = INTEGER
    library.larder_planes_are_whole.argtypes = [*[INTEGER] * 2, POINTER, INTEGER]
    library.larder_decode_planes.argtypes = [
        *[INTEGER] * 2,
        *[POINTER, INTEGER],
        ctypes.c_double,
        *[POINTER] * 2,
    ]


def _declare_conversion(library: ctypes.CDLL) -> None:
    """Declare functions that convert files."""
    if not hasattr(library, "larder_dequantize_blocks"):
        return
    library.larder_dequantize_blocks.argtypes = [ctypes.c_int32, POINTER, INTEGER, POINTER]
    library.larder_token_pairs.argtypes = [
        ctypes.c_char_p,
        POINTER,
        ctypes.c_int32,
        INTEGER,
        POINTER,
    ]
    library.larder_token_pairs.restype = INTEGER


def _openmp_of_torch() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch is linked with, or None."""
    folder = Path(torch.__path__[0]) / "lib"
    for path in (folder / name for name in TORCH_CPU):
        if path.exists():
            function = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
            return ctypes.cast(function, POINTER).value if function else None
    return None
