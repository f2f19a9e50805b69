"""PyTorch's own operators with our kernels in their place: results, and what goes around them.

In C++, so these tests are for ``--cpp-operators``. On the CPU all sizes are ours here, not only
those that ours is faster for.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from support import Arguments, random_generator
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch_support import assert_right, random_operands, to_array

import iree_lnbwd.torch as lnbwd
from iree_lnbwd import CompileError, LayerNormGrads, NormSpec
from iree_lnbwd.calls import modules
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD
from iree_lnbwd.torch import InductorStatus, Status, override_status, overrides, overrides_in_python
from iree_lnbwd.torch.inductor.state import Folded

NAME = "aten::native_layer_norm_backward"
BACKWARD = torch.ops.aten.native_layer_norm_backward.default
MASKS = [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]
# Raised inside PyTorch 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


@pytest.fixture(autouse=True)
def disabled_again(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    yield
    lnbwd.disable()


@pytest.fixture
def enabled(disabled_again: None) -> None:
    lnbwd.enable()


def counted(status: Status, device: str = "cpu", name: str = NAME) -> dict[str | None, int]:
    """The calls of an operator, by the reason why they went to PyTorch's kernel."""
    return {c.reason: c.number for c in status.calls if (c.name, c.device) == (name, device)}


def tensors(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Random input, weight and bias, of which gradients are wanted."""
    seed = int(random_generator().integers(2**62))
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator, dtype=dtype) for s in (shape, shape[-1], shape[-1])]
    x, weight, bias = (tensor.requires_grad_() for tensor in made)
    return x, weight, bias


def normalized(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


# --- results ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_gradients_of_layer_norm_are_ours(dtype: str, device: str) -> None:
    # In half precision, PyTorch saves coarse statistics on the CPU, unless the weight is f32. On
    # GPUs it refuses such a mixture.
    of_weight = "f32" if device == "cpu" and dtype != "f64" else dtype
    spec = NormSpec((24,), dtype, weight_dtype=of_weight, bias_dtype=of_weight)
    operands = random_operands(spec, (3, 5), device=device)
    gradients = operands.gradients(operands.forward_by_pytorch())
    assert_right(gradients, operands.arguments)
    assert counted(lnbwd.status(), device) == {None: 1}


@pytest.mark.usefixtures("enabled")
def test_coarse_statistics_count_as_they_are() -> None:
    """PyTorch saves them in the input's type on the CPU."""
    operands = random_operands(NormSpec((24,), "bf16"), (7,))
    given = [tensor.detach() for tensor in operands.differentiated]
    _, mean, rstd = torch.native_layer_norm(given[0], (24,), *given[1:], 1e-5)
    assert mean.dtype == torch.bfloat16
    found = BACKWARD(
        operands.grad_output, given[0], (24,), mean, rstd, *given[1:], [True, True, True]
    )
    of = operands.arguments
    exact = Arguments(
        of.grad_output, of.input, (24,), to_array(mean.float()), to_array(rstd.float()), of.weight,
        of.bias,
    )  # fmt: skip
    assert_right(LayerNormGrads(*found), exact)


@pytest.mark.drawn
@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: tuple[bool, bool, bool], device: str) -> None:
    x, weight, bias = (t.detach().to(device) for t in tensors(6, 10, dtype=torch.float32))
    grad_output = torch.ones_like(x)
    _, mean, rstd = torch.native_layer_norm(x, (10,), weight, bias, 1e-5)
    arguments = (grad_output, x, (10,), mean, rstd, weight, bias, mask)
    ours = BACKWARD(*arguments)
    assert counted(lnbwd.status(), device) == {None: 1}
    lnbwd.disable()
    for mine, theirs, wanted in zip(ours, BACKWARD(*arguments), mask, strict=True):
        assert (mine is not None) == (theirs is not None) == wanted
        if wanted:
            assert (mine.dtype, mine.shape, mine.stride()) == (
                theirs.dtype, theirs.shape, theirs.stride(),
            )  # fmt: skip
            torch.testing.assert_close(mine, theirs)


def with_and_without(
    compute: Callable[[], Any], device: str = "cpu", *, are_called: bool = True
) -> None:
    """The same by our kernels as by PyTorch's; ``are_called``: and they do run."""
    lnbwd.disable()
    theirs = compute()
    with lnbwd.enabled():
        ours = compute()
    assert counted(lnbwd.status(), device).keys() == ({None} if are_called else set())
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("change", ["transposed", "strided", "expanded", "cut", "a row"])
def test_inputs_of_any_strides(change: str, device: str) -> None:
    x, weight, bias = (t.detach().to(device) for t in tensors(8, 6, 10))
    given = {
        "transposed": x.transpose(0, 1),
        "strided": x[:, ::2],
        "expanded": x.expand(2, 8, 6, 10),
        "cut": x[:, :, 1:],
        "a row": x[0, 0],
    }[change]
    columns = given.shape[-1]
    leaves = [t.requires_grad_() for t in (given.detach(), weight[:columns], bias[:columns])]

    def gradients() -> Any:
        return torch.autograd.grad(normalized(*leaves), leaves, given.sin())

    with_and_without(gradients, device)


# --- around them -----------------------------------------------------------------------------


class Subclass(nn.LayerNorm):
    """A model's own."""


def test_a_module_of_any_class() -> None:
    x = tensors(4, 10)[0]
    module = nn.Sequential(nn.Linear(10, 10), Subclass(10)).double()
    with_and_without(lambda: torch.autograd.grad(module(x).sin().sum(), [*module.parameters()]))


def test_forward_mode() -> None:
    """The derivative of a gradient along a tangent. PyTorch takes the backward apart for it."""
    x, weight, bias = (t.detach() for t in tensors(4, 10))

    def derivative() -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.cos()).requires_grad_()
            (slope,) = torch.autograd.grad(
                normalized(dual, weight, bias).sin().sum(), dual, create_graph=True
            )
            return forward_ad.unpack_dual(slope).tangent

    with_and_without(derivative, are_called=False)


def test_jacobians_and_batches() -> None:
    x, weight, bias = (t.detach() for t in tensors(4, 10))
    with_and_without(
        lambda: torch.autograd.functional.jacobian(
            lambda x, weight: normalized(x, weight, bias), (x, weight), vectorize=True
        )
    )

    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return normalized(row, weight, bias).square().sum()

    with_and_without(lambda: torch.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(weight, x))


def test_derivatives_of_any_order() -> None:
    given = tensors(3, 5)
    with lnbwd.enabled():
        assert torch.autograd.gradcheck(normalized, given, check_batched_grad=True)
        assert torch.autograd.gradcheck(normalized, given, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(normalized, given)
    assert lnbwd.status().pytorchs == 0 < lnbwd.status().ours


def test_jagged_tensors() -> None:
    rows, weight, bias = tensors(9, 10)
    parts = [rows[:2], rows[2:3], rows[3:]]

    def gradients() -> Any:
        jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        output = normalized(jagged, weight, bias).values()
        return torch.autograd.grad(output, (rows, weight, bias), rows.detach().sin())

    with_and_without(gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    given = tensors(4, 10)

    def gradients() -> list[Tensor | None]:
        for tensor in given:
            tensor.grad = None
        checkpoint(normalized, *given, use_reentrant=reentrant).sin().sum().backward()
        return [tensor.grad for tensor in given]

    with_and_without(gradients)


@pytest.mark.filterwarnings("ignore")  # raised inside PyTorch's compilers
@pytest.mark.parametrize(
    ("backend", "is_called"),
    [
        ("eager", True),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_compiled(backend: str, is_called: bool) -> None:
    """Inductor takes the operator apart."""
    given = tensors(4, 10)
    torch._dynamo.reset()
    compiled = torch.compile(normalized, fullgraph=True, backend=backend)
    with_and_without(
        lambda: torch.autograd.grad(compiled(*given).sin().sum(), given), are_called=is_called
    )
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd() -> None:
    given = tensors(4, 10)

    def gradients() -> list[Tensor | None]:
        for tensor in given:
            tensor.grad = None
        loss = normalized(*given).sin().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            torch.autograd.backward(loss)
        return [tensor.grad for tensor in given]

    torch._dynamo.reset()
    with_and_without(gradients)
    torch._dynamo.reset()


def test_under_autocast(device: str) -> None:
    """The bits of replaced modules; PyTorch's own sums are in half precision on the CPU."""
    x = tensors(4, 10, dtype=torch.float32)[0].detach().to(device)
    model = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10)).to(device)
    replaced = copy.deepcopy(model)
    lnbwd.replace_norms(replaced)

    def gradients(model: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            output = model(x)
        loss = output.float().sin().sum()
        found: tuple[Tensor, ...] = torch.autograd.grad(loss, list(model.parameters()))
        return found

    with lnbwd.enabled():
        found = gradients(model)
    assert counted(lnbwd.status(), device) == {None: 1}
    assert all(map(torch.equal, found, gradients(replaced)))


def test_torchscript() -> None:
    """Whose graph calls PyTorch's function."""
    x = tensors(4, 10)[0]
    module = torch.jit.script(nn.LayerNorm(10).double())
    with_and_without(
        lambda: [torch.autograd.grad(module(x).sin().sum(), x) for _ in range(3)], are_called=True
    )


def test_tensors_under_a_mode_and_without_memory() -> None:
    """What has no values is none of ours, and inference is."""
    lnbwd.enable()
    x = torch.ones(4, 10, device="meta", requires_grad=True)
    assert torch.autograd.grad(normalized(x).sum(), x)[0].is_meta
    with torch._subclasses.FakeTensorMode():
        y = torch.ones(4, 10, requires_grad=True)
        assert torch.autograd.grad(normalized(y).sum(), y)[0].shape == (4, 10)
    assert counted(lnbwd.status()) == {}
    with torch.inference_mode():
        z = torch.ones(4, 10)
        _, mean, rstd = torch.native_layer_norm(z, (10,), None, None, 1e-5)
        dx, _, _ = BACKWARD(z, z, (10,), mean, rstd, None, None, (True, False, False))
    assert dx.is_inference()
    assert counted(lnbwd.status()) == {None: 1}


# --- what goes to PyTorch's kernel ------------------------------------------------------------


def test_no_rows(caplog: pytest.LogCaptureFixture) -> None:
    with lnbwd.enabled():
        x, weight, bias = (t.requires_grad_() for t in (torch.ones(0, 6), *torch.ones(2, 6)))
        dx, dgamma, dbeta = torch.autograd.grad(
            normalized(x, weight, bias).sum(), (x, weight, bias)
        )
    assert dx.shape == (0, 6)
    assert torch.count_nonzero(torch.cat((dgamma, dbeta))) == 0
    assert counted(lnbwd.status()) == {"PyTorch's kernel alone takes such arguments": 1}
    assert not caplog.records


@pytest.mark.usefixtures("enabled")
def test_errors_are_pytorchs() -> None:
    x = torch.ones(4, 10)
    _, mean, rstd = torch.native_layer_norm(x, (10,), None, None, 1e-5)
    arguments = (x, x, (10,), mean, rstd.double(), None, None, (True, False, False))
    with pytest.raises(RuntimeError) as ours:
        BACKWARD(*arguments)
    (reason,) = counted(lnbwd.status())
    assert reason is not None
    assert reason.startswith("TypeError: rstd: expected")
    lnbwd.disable()
    with pytest.raises(RuntimeError) as theirs:
        BACKWARD(*arguments)
    assert str(ours.value) == str(theirs.value)


def test_a_module_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for once, told once, and counted always."""
    asked = []

    def compiled(*arguments: Any) -> Any:
        asked.append(arguments)
        raise CompileError("iree-compile: not found")

    x = torch.randn(3, 11, requires_grad=True)  # of no other test, whose module would be known
    expected = torch.autograd.grad(normalized(x).square().sum(), x)
    monkeypatch.setattr(modules, "_compiled", compiled)
    with caplog.at_level(logging.WARNING):
        lnbwd.enable()
        for _ in range(3):
            found = torch.autograd.grad(normalized(x).square().sum(), x)
            assert torch.equal(found[0], expected[0])
    reason = "CompileError: iree-compile: not found"
    assert counted(lnbwd.status()) == {reason: 3}
    assert len(asked) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == f"PyTorch's own kernel runs for some calls of {NAME} on cpu: {reason}"
    lnbwd.disable()
    lnbwd.enable()
    torch.autograd.grad(normalized(x).sum(), x)
    assert len(asked) == 2
    lnbwd.disable()


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(overrides_in_python, "_compute", interrupted)
    x = torch.ones(4, 13, requires_grad=True)  # a call that no other test has made known
    with lnbwd.enabled(), pytest.raises(KeyboardInterrupt):
        normalized(x).sum().backward()


def test_there_are_not_too_many_reasons() -> None:
    record = overrides_in_python._Record()
    for number in range(2 * overrides_in_python._REASONS_KEPT):
        record.add(overrides_in_python.Fallback(LAYER_NORM_BACKWARD, "cpu", str(number)))
        record.refuse(number, "")
    assert len(record.counts()) == overrides_in_python._REASONS_KEPT + 1
    assert sum(record.counts().values()) == 2 * overrides_in_python._REASONS_KEPT


# --- on and off ------------------------------------------------------------------------------


def runs_ours() -> bool:
    before = lnbwd.status().ours
    x = torch.ones(4, 10, requires_grad=True)
    normalized(x).sum().backward()
    return lnbwd.status().ours > before


def test_on_and_off() -> None:
    untouched = torch._C._dispatch_dump(NAME)
    assert not runs_ours()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lnbwd.enable()
        once = torch._C._dispatch_dump(NAME)
        lnbwd.enable()
    assert torch._C._dispatch_dump(NAME) == once != untouched
    assert runs_ours()
    lnbwd.disable()
    lnbwd.disable()
    assert torch._C._dispatch_dump(NAME) == untouched
    assert not runs_ours()
    assert lnbwd.status().ours == 1  # of before
    lnbwd.enable()
    assert lnbwd.status().ours == 0


def test_blocks_restore_what_was() -> None:
    with lnbwd.enabled():
        assert runs_ours()
        with lnbwd.enabled(forwards=True):
            assert runs_ours()
        assert runs_ours()
        lnbwd.disable()
        with lnbwd.enabled():
            assert runs_ours()
        assert not runs_ours()
    assert not runs_ours()
    lnbwd.enable()
    with pytest.raises(ZeroDivisionError), lnbwd.enabled():
        raise ZeroDivisionError
    assert runs_ours()


@pytest.mark.parametrize("name", ["forwards", "override_others"])
def test_flags_are_flags(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected True or False, got int"):
        lnbwd.enable(**{name: 1})  # type: ignore[arg-type]
    assert not lnbwd.status().enabled


def test_what_ours_does_not_take_goes_to_the_kernel_that_was_there() -> None:
    """PyTorch's own, or another's, with the same results."""
    calls: list[int] = []
    leaves = tensors(0, 10, dtype=torch.float32)
    reached = leaves[0].detach().cos()

    def gradients() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.autograd.grad(normalized(*leaves), leaves, reached)
        return found

    expected = gradients()
    with lnbwd.enabled():
        assert all(map(torch.equal, gradients(), expected))
    before = torch.library.get_kernel(NAME, "CPU")

    def theirs(keys: Any, *arguments: Any) -> Any:
        calls.append(1)
        return before.call_boxed(keys, *arguments)

    library = register_another(theirs)
    with lnbwd.enabled(override_others=True):
        assert all(map(torch.equal, gradients(), expected))
    assert len(calls) == 1
    assert counted(lnbwd.status()) == {overrides._LEFT[0]: 1}
    library._destroy()
    with lnbwd.enabled():
        gradients()
    assert len(calls) == 1


def register_another(kernel: Callable[..., Any]) -> Any:
    """Another library's kernel on the CPU, until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        library.impl("native_layer_norm_backward", kernel, "CPU", with_keyset=True)
    return library


def test_kernels_of_others() -> None:
    calls = []
    before = torch.library.get_kernel(NAME, "CPU")

    def theirs(keys: Any, *arguments: Any) -> Any:
        calls.append(1)
        return before.call_boxed(keys, *arguments)

    library = register_another(theirs)
    lnbwd.enable()
    (operator,) = (o for o in lnbwd.status().operators if o[:2] == (NAME, "cpu"))
    assert operator.kept is not None
    assert operator.kept.startswith("another kernel is in its place, enable(override_others=True)")
    assert __file__ in operator.kept
    assert not runs_ours()
    lnbwd.enable(override_others=True)
    assert len(calls) == 1
    assert runs_ours()
    assert len(calls) == 1
    lnbwd.enable()
    assert not runs_ours()
    lnbwd.disable()
    library._destroy()
    lnbwd.enable()
    assert runs_ours()
    library = register_another(theirs)  # later than ours
    (operator,) = (o for o in lnbwd.status().operators if o[:2] == (NAME, "cpu"))
    assert operator.kept is not None
    assert operator.kept.startswith("another kernel was registered later: registered at ")
    library._destroy()
    assert runs_ours()


def test_threads() -> None:
    """They call while others switch: every gradient is right, and every call is counted."""
    x = torch.randn(64, 10, dtype=torch.float64)
    leaf = x.requires_grad_()
    expected = torch.autograd.grad(normalized(leaf).sin().sum(), leaf)[0]
    wrong, done = [], threading.Event()

    def call() -> None:
        for _ in range(150):
            of = x.detach().requires_grad_()
            found = torch.autograd.grad(normalized(of).sin().sum(), of)[0]
            if not torch.allclose(found, expected, rtol=1e-12, atol=1e-14):
                wrong.append(found)

    def switch() -> None:
        while not done.is_set():
            with lnbwd.enabled():
                lnbwd.status()

    lnbwd.enable()
    callers = [threading.Thread(target=call) for _ in range(3)]
    switchers = [threading.Thread(target=switch) for _ in range(2)]
    for thread in (*callers, *switchers):
        thread.start()
    for thread in callers:
        thread.join()
    done.set()
    for thread in switchers:
        thread.join()
    assert not wrong


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tensors, by calls of both kernels, nor anything at all by switching."""
    import weakref

    lnbwd.enable()
    watched = []
    for dtype in (torch.float32, torch.float64):
        for rows in (4, 0):
            x = torch.ones(rows, 10, dtype=dtype, requires_grad=True)
            (gradient,) = torch.autograd.grad(normalized(x).sum(), x)
            watched += [weakref.ref(x), weakref.ref(gradient)]
    del x, gradient
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    lnbwd.disable()
    assert overrides_in_python.RECORD._refused == {}


def test_status_is_a_table() -> None:
    lnbwd.enable()
    x = torch.ones(4, 10, requires_grad=True)
    for _ in range(12):
        normalized(x).sum().backward()
    normalized(torch.ones(0, 10, requires_grad=True)).sum().backward()
    status = lnbwd.status()
    assert (status.enabled, status.ours, status.pytorchs) == (True, 12, 1)
    lines = [line.split(maxsplit=4) for line in str(status).splitlines()]
    assert lines[:2] == [["enabled:", "yes"], ["operator", "device", "kernel", "calls", "why"]]
    assert [NAME, "cpu", "iree-lnbwd", "12"] in lines
    why = "PyTorch's kernel alone takes such arguments"
    assert [NAME, "cpu", "PyTorch", "1", why] in lines
    lnbwd.disable()
    assert str(lnbwd.status()).startswith("enabled: no\n")


def test_status_says_if_no_kernel_is_ours() -> None:
    kept = override_status.Operator(NAME, "cpu", "without a C++ compiler")
    inductor = InductorStatus(None, (), Folded())
    said = override_status.Status(True, (kept, kept._replace(device="cuda")), (), "", inductor)
    assert str(said).startswith("enabled: yes, but no kernel is iree-lnbwd's\n")
    said = override_status.Status(True, (kept, kept._replace(kept=None)), (), "", inductor)
    assert str(said).startswith("enabled: yes\n")
