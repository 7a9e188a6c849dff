"""Guards of conftest.py: network, home folder, random seeds and type checks."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import AbstractArray, Float, Float32, Int, jaxtyped
from jaxtyping._storage import get_shape_memo
from torch import Tensor

from type_checking import (
    ASKED,
    CHECKED_CALLS,
    COMPILED,
    PACKAGE,
    UNCHECKED,
    Compiled,
    begin_test,
    checked,
    checked_modules,
    fits,
)


def test_network_is_unreachable() -> None:
    with socket.socket() as out, pytest.raises(RuntimeError, match="reached for the network"):
        out.connect(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match="reached for the network"):
        socket.create_connection(("example.org", 80), timeout=1)


def test_localhost_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


@pytest.mark.parametrize("turn", [1, 2])
def test_home_is_private_to_each_test(larder_home: Path, session_home: Path, turn: int) -> None:
    assert Path(os.environ["LARDER_HOME"]) == larder_home
    assert larder_home.parent == session_home
    larder_home.mkdir()  # nothing is there, of the other turn neither


@pytest.mark.parametrize("turn", [1, 2])
def test_random_numbers_are_seeded_per_test(turn: int) -> None:
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert drawn == pytest.approx((0.8444218515, 0.5488135039, 0.4962565899))


def test_wrong_types_are_detected() -> None:
    from larder.core import Message

    with pytest.raises(Exception, match=r"role|str"):
        Message(role=3, content="")  # type: ignore[arg-type]


def paired(keys: Float[Tensor, "S D"], values: Float[Tensor, "S D"]) -> Float[Tensor, " S"]:
    return keys[:, 0] + values[: len(keys), 0]


def cut(keys: Float[Tensor, "S D"]) -> Float[Tensor, "S D"]:
    return keys[1:]


def each(keys: Float[Tensor, "S D"], count: int) -> Iterator[Float[Tensor, " D"]]:
    yield from keys[:count]


@dataclass(frozen=True)
class Pair:
    keys: Float[Tensor, "S D"]
    values: Float[Tensor, "S D"]


def test_dimension_names_have_one_size_within_a_call() -> None:
    for target in (paired, Pair):
        strict = checked(target)
        strict(torch.ones(3, 2), torch.ones(3, 2))
        strict(torch.ones(4, 5), torch.ones(4, 5))
        for keys, values in (((3, 2), (4, 2)), ((3, 2), (3, 1)), ((3,), (3,))):
            begin_test()
            with pytest.raises(Exception, match=r"keys|values"):
                strict(torch.ones(keys), torch.ones(values))


KINDS = [Float[Tensor, "S D"], Float[Tensor, "S S"], Float[Tensor, " _"], Int[Tensor, "D _ D"]]
MORE = [Float32[Tensor, "3 D"], Float[Tensor, "*S D"], Float[Tensor, "S+1"], Float[np.ndarray, "S"]]
SHAPES = [(3, 2), (2, 2), (3,), (2, 5, 2), (2, 5, 3), (4,), ()]


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_tensor_is_recognized_like_jaxtyping(kind: type[AbstractArray]) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
            result = []
            for asked in (fits, ASKED):
                with jaxtyped("context"):  # pyright: ignore
                    assert fits(Float[Tensor, " S"], torch.ones(3))
                    given = torch.ones(shape, dtype=dtype)
                    result.append((asked(kind, given), get_shape_memo()[:2]))
            assert result[0] == result[1]


def adding(more: int) -> Callable[..., int]:
    def add(number: int, factor: int = more) -> int:
        return factor * number + more

    return checked(add)


def compiled_of_adding() -> list[Compiled]:
    """Of this file's `add` alone: other tests of the same process have inner functions too."""
    return [each for each in COMPILED.values() if each.code.co_qualname == "adding.<locals>.add"]


def test_inner_functions_share_compiled_checks_only() -> None:
    two, three = adding(2), adding(3)
    assert (two(1), three(1), two(1, factor=5), three(5)) == (4, 6, 7, 18)
    [compiled] = compiled_of_adding()
    assert adding(4)(1) == 8
    assert [compiled] == compiled_of_adding()
    for function in (two, three, adding(5)):
        begin_test()
        with pytest.raises(Exception, match="number"):
            function("1")
        with pytest.raises(Exception, match="factor"):
            function(1, factor="1")


def test_first_calls_of_every_test_are_checked() -> None:
    double = adding(2)
    for _ in range(CHECKED_CALLS - 1):
        double(1)
    with pytest.raises(Exception, match="number"):
        double("1")
    with pytest.raises(TypeError, match="can only concatenate"):  # of the function itself
        double("1")
    begin_test()
    with pytest.raises(Exception, match="number"):
        double("1")


def test_results_and_generators_are_checked() -> None:
    with pytest.raises(Exception, match="return"):
        checked(cut)(torch.ones(3, 2))
    assert len([*checked(each)(torch.ones(3, 2), 2)]) == 2
    with pytest.raises(Exception, match="count"):
        [*checked(each)(torch.ones(3, 2), "2")]


def test_every_module_but_the_kernels_is_checked() -> None:
    modules = set(checked_modules(PACKAGE, UNCHECKED))
    assert "larder.core" in modules
    assert not {"larder", "larder.ops", "larder.ops.cpu"} & modules


def test_type_checks_do_not_consume_random_numbers() -> None:
    @checked
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @jaxtyped(typechecker=beartype)
    def last(numbers: list[int]) -> int:
        return numbers[-1]

    before = random.getstate()
    assert total([1, 2, 3]) == 6 and last([1, 2, 3]) == 3
    assert random.getstate() == before
    with pytest.raises(Exception, match="total"):
        total(["one", "two"])  # pyright: ignore
