"""Norms as functions of Python's that are written in C++. For ``--cpp-operators``."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from iree_lnbwd.ops.operands import names
from iree_lnbwd.torch import replace_norms
from iree_lnbwd.torch.operator_table import (
    ALL_GRADIENTS,
    ALL_NORMS,
    OUTPUT,
    OWN_RMS_NORM,
    PYTORCHS_LAYER_NORM,
    WITH_OUTPUT,
    Gradients,
    Norm,
    operator,
)

COLUMNS = 24
EPS = 1e-5

every_norm = pytest.mark.parametrize("norm", WITH_OUTPUT, ids=lambda norm: norm.name)


@pytest.fixture(autouse=True)
def in_cpp(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")


class Subclass(Tensor):  # type: ignore[misc]
    """One of a user's."""


def arguments(norm: Norm, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Of a plain call, with gradients of all."""
    x = torch.randn(3, 5, COLUMNS, dtype=dtype, requires_grad=True)
    weight, bias = (nn.Parameter(torch.randn(COLUMNS, dtype=dtype)) for _ in range(2))
    return [x, weight, bias, COLUMNS, EPS, *([0.5, False, None] if norm.own_forward else [])]


def by_operator(norm: Norm, given: list[Any]) -> Any:
    return operator(norm.name + OUTPUT)(*given)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("left_out", [(), (1,), (2,), (1, 2)])
def test_a_plain_call_has_the_operators_bits(
    norm: Norm, dtype: torch.dtype, left_out: tuple[int, ...]
) -> None:
    given = arguments(norm, dtype)
    for index in left_out:
        given[index] = None
    if norm.own_forward and 1 in left_out:
        given[5] = 0.0  # added to no weight
    leaves = [each for each in given[:3] if each is not None]
    expected = by_operator(norm, given)
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, dy)
    for function in (norm.output_alone, norm.plain_output):
        output = function(*given)
        assert type(output) is Tensor
        assert torch.equal(output, expected)
        assert all(map(torch.equal, torch.autograd.grad(output, leaves, dy), gradients))
        with torch.inference_mode():
            assert torch.equal(function(*given), expected)
        with torch.no_grad():
            assert not function(*given).requires_grad


def test_an_rms_norm_has_an_eps_of_its_own() -> None:
    given = arguments(OWN_RMS_NORM)
    given[4] = None
    expected = by_operator(OWN_RMS_NORM, given)
    assert torch.equal(OWN_RMS_NORM.output_alone(*given), expected)
    assert torch.equal(OWN_RMS_NORM.plain_output(*given), expected)


@contextlib.contextmanager
def changed_class(given: list[Any]) -> Iterator[None]:
    given[1] = given[1].detach().as_subclass(Subclass)
    yield


@contextlib.contextmanager
def integer_eps(given: list[Any]) -> Iterator[None]:
    given[4] = 1
    yield


class Functions(TorchFunctionMode):  # type: ignore[misc]
    """Lets everything pass."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Lets everything pass."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def mode(make: Callable[[], Any]) -> Callable[[list[Any]], Any]:
    return lambda _given: make()


@every_norm
@pytest.mark.parametrize(
    "around",
    [
        changed_class,
        integer_eps,
        mode(Functions),
        mode(Operators),
        mode(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
        mode(lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
    ids=["subclass", "integer", "function mode", "dispatch mode", "profiler", "autocast"],
)
def test_what_is_not_plain_goes_pytorchs_way(
    norm: Norm, around: Callable[[list[Any]], contextlib.AbstractContextManager[Any]]
) -> None:
    given = arguments(norm)
    with around(given):
        assert norm.plain_output(*given) is None
        output, expected = norm.output_alone(*given), by_operator(norm, given)
    assert type(output) is type(expected)
    assert torch.equal(output, expected)


@every_norm
def test_parameters_of_another_type_or_rank_are_not_plain(norm: Norm) -> None:
    given = arguments(norm)
    for index, other in [(1, torch.ones(COLUMNS).double()), (2, torch.ones(1, COLUMNS))]:
        changed = [*given]
        changed[index] = other
        assert norm.plain_output(*changed) is None


@every_norm
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_and_traces_see_the_operator(norm: Norm) -> None:
    given = [each.detach() if isinstance(each, Tensor) else each for each in arguments(norm)]
    rest = given[1:]
    expected = by_operator(norm, given)

    def alone(x: Tensor) -> Tensor:
        assert norm.plain_output(x, *rest) is None
        output: Tensor = norm.output_alone(x, *rest)
        return output

    assert torch.allclose(torch.func.vmap(alone)(given[0]), expected, atol=1e-5)
    torch.func.grad(lambda x: alone(x).sum())(given[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        output = torch.autograd.forward_ad.unpack_dual(norm.output_alone(dual, *rest))
        assert output.tangent is not None
    traced = torch.jit.trace(alone, (given[0],), check_trace=False)
    assert f"iree_lnbwd::{norm.name}" in str(traced.graph)


@every_norm
def test_errors_are_the_operators(norm: Norm) -> None:
    given = arguments(norm)
    with_changes: list[list[Any]] = [
        [None, *given[1:]],
        [given[0], torch.ones(7), *given[2:]],
        [*given[:3], 7, *given[4:]],
        [*given[:3], 1 << 70, *given[4:]],
        [*given[:4], "a", *given[5:]],
        given[:4],
        [*given, 1],
        [],
    ]
    for changed in with_changes:
        with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)) as expected:
            by_operator(norm, changed)
        with pytest.raises(expected.type) as found:
            norm.output_alone(*changed)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@every_norm
def test_nothing_is_kept(norm: Norm) -> None:
    given = arguments(norm)

    def counts() -> list[int]:
        gc.collect()  # of other tests: it lets go of None
        return [sys.getrefcount(each) for each in (*given[:3], None)]

    for function in (norm.output_alone, norm.plain_output):
        function(*given)
        before = counts()
        for _ in range(1000):
            function(*given)
            function(*given[:4], 1, *given[5:])
        assert all(abs(a - b) < 100 for a, b in zip(counts(), before, strict=True))


def test_other_threads_run_meanwhile() -> None:
    given = arguments(PYTORCHS_LAYER_NORM)
    given[0] = torch.randn(1 << 17, COLUMNS)
    counted = 0
    ended = threading.Event()

    def call() -> None:
        for _ in range(20):
            PYTORCHS_LAYER_NORM.output_alone(*given)
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # so that a thread goes on only where another lets it
    try:
        thread = threading.Thread(target=call)
        thread.start()
        while not ended.wait(1e-4):
            counted += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counted > 5


def test_a_replaced_module_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what else it would find out about a call."""
    model = nn.Sequential(nn.LayerNorm(COLUMNS))
    replace_norms(model)
    x = torch.randn(3, COLUMNS)
    expected = nn.functional.layer_norm(x, (COLUMNS,), model[0].weight, model[0].bias)

    def is_asked() -> Any:
        raise AssertionError("a plain call was looked at in Python")

    forward = model[0].forward
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_tracing_state", is_asked)
        assert torch.equal(forward(x), expected)
        with pytest.raises(AssertionError, match="looked at"), torch.autocast("cpu"):
            forward(x)


def test_no_tensor_at_all_ends_no_process() -> None:
    """PyTorch takes None for any tensor, and hands on one that is undefined."""
    x = torch.ones(4, COLUMNS)
    operators: tuple[Norm | Gradients, ...] = (*ALL_NORMS, *ALL_GRADIENTS)
    for each in operators:
        for index, name in enumerate(names_of(each)):
            tensors: list[Tensor | None] = [x] * len(names_of(each))
            tensors[index] = None
            refusals = (TypeError, ValueError, RuntimeError)
            is_needed = name == each.op.data.name
            refused = pytest.raises(TypeError, match=f"^{name}: expected a tensor, got None")
            with refused if is_needed else contextlib.suppress(*refusals):
                each.operator(*tensors, *options_of(each))


def names_of(each: Norm | Gradients) -> tuple[str, ...]:
    """Of the tensors that it takes."""
    return each.arguments if isinstance(each, Gradients) else names(each.arguments)


def options_of(each: Norm | Gradients) -> list[Any]:
    """Right ones."""
    options: list[Any] = [[COLUMNS]]
    if isinstance(each, Norm):
        options += [EPS, *([0.0, False, None] if each.own_forward else [])]
    else:
        options += [[True] * len(each.op.gradients), EPS, 0.0]
    options += [1] * each.takes_sets
    if isinstance(each, Gradients) and (each.stores_copy or each.sums_input):
        options.append(torch.float32)
    return options
