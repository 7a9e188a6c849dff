"""The decode kernel lives beside torch's threads, other Python threads and forked children."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from larder.ops import ragged_attention
from larder.ops.cpu import decode_attention
from without_kernels import reference

FORKING = """
import os
import torch
from larder.ops.cpu.decode_attention import decode_attention

torch.set_num_threads(2)
entries = torch.ones(4096, 64)
case = torch.ones(2, 1, 64), entries, entries, torch.tensor([0]), torch.tensor([4096]), 0.1
assert decode_attention(*case)[0].allclose(torch.ones(()))
assert torch.get_num_threads() == 2
child = os.fork()
if not child:
    os._exit(0 if decode_attention(*case)[0].allclose(torch.ones(())) else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_concurrent_callers_beside_matrix_products_get_their_own_results():
    def worker(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(5000, 32, generator=generator)
        queries = torch.randn(4, 1, 32, generator=generator)
        arguments = (queries, keys, keys, torch.tensor([0, 4000]), torch.tensor([4000, 1000]), 0.2)
        expected = reference(ragged_attention)(*arguments)[0]
        square = torch.randn(64, 64, generator=generator)
        same = []
        for _ in range(20):
            square = torch.tanh(square @ square)
            given = decode_attention.decode_attention(*arguments)[0]
            same.append(torch.allclose(given, expected, atol=2e-5))
        return all(same)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(worker, range(8)))


@pytest.mark.extended
def test_forked_child_attends_with_torch_threads_kept():
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, check=False
    )
    assert done.stdout == "child 0\n", done.stderr


def test_without_a_threadsafe_layer_kernels_run_in_the_calling_thread(monkeypatch):
    monkeypatch.setattr(decode_attention, "THREADSAFE_LAYERS", ())
    decode_attention._start_numba_threads.cache_clear()
    try:
        assert len(decode_attention._split_bounds(1 << 20, 256)) == 2
    finally:
        decode_attention._start_numba_threads.cache_clear()
