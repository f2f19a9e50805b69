"""What a call, a load and a compilation do once: counted where it is done, as it is done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from emulated_arrays import Namespace, emulated_gpu
from support import (
    ARGUMENTS,
    Arguments,
    assert_matches_reference,
    random_arguments,
    random_generator,
)

from iree_lnbwd import LayerNormGrads, NormSpec, layer_norm_backward, load, runtime
from iree_lnbwd.calls import modules
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.compiling import compiler, ir
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops import arguments
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.stores import shipping
from iree_lnbwd.vmfb import description

SPEC = NormSpec((96,))
HOST = DeviceUri.parse("local-task")


@contextmanager
def counted(*functions: Callable[..., Any]) -> Iterator[Counter[str]]:
    """How often each of these functions is entered, by this thread."""
    names = {function.__code__: function.__name__ for function in functions}
    entered: Counter[str] = Counter()

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            entered[names[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield entered
    finally:
        sys.setprofile(before)


@pytest.fixture
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))


def test_a_module_that_is_compiled_is_specialised_once(cache_of_its_own: None) -> None:
    columns = int(random_generator().integers(1000, 2000))
    with counted(ir.module, compiler.build_planned) as entered:
        op = loaded(NormSpec((columns,)), HOST)
    assert entered == {"module": 1, "build_planned": 1}
    assert op.spec.columns == columns


@pytest.mark.parametrize("how", ["a file", "memory"])
def test_a_module_is_opened_once_for_a_load_and_its_calls(how: str, tmp_path: Path) -> None:
    path = shipping.compile(SPEC, "host", tmp_path).path
    given = random_arguments(random_generator(), SPEC, (7,))
    with counted(description.vm_module, description.open_module) as entered:
        op = load(path) if how == "a file" else runtime.load_built(path.read_bytes())
        gradients = given.backward_by(op), given.backward_by(op)
    assert entered == {"vm_module": 1, "open_module": 1}
    for one in gradients:
        assert_matches_reference(one, given)


CHECKS = (arguments.check_options, arguments.bind_arrays, interop.views)


def test_a_call_is_bound_once() -> None:
    given = random_arguments(random_generator(), SPEC, (7,))
    given.backward()
    with counted(*CHECKS) as entered:
        gradients = given.backward()
    assert entered == {"check_options": 1, "bind_arrays": 1, "views": 1}
    assert_matches_reference(gradients, given)
    op = loaded(SPEC, HOST)
    with counted(*CHECKS) as entered:
        given.backward_by(op)
    assert entered == {"bind_arrays": 1, "views": 1}


@pytest.fixture
def gpu() -> Iterator[Namespace]:
    """Arrays on an emulated GPU, on which the function computes."""
    with emulated_gpu(find_target("sm_90")) as arrays:
        yield arrays


def on_gpu(arrays: Namespace, given: Arguments) -> tuple[Any, ...]:
    return tuple(
        None if (array := getattr(given, name)) is None else arrays.asarray(array)
        for name in ARGUMENTS
    )


def call(gpu_arrays: tuple[Any, ...], **options: Any) -> LayerNormGrads:
    grad_output, input, *others = gpu_arrays
    gradients = layer_norm_backward(grad_output, input, 96, *others, **options)
    return LayerNormGrads(*(g if g is None else g.numpy() for g in gradients))


def test_a_call_on_a_gpu_is_bound_once_for_its_kind(gpu: Namespace) -> None:
    """Of the first call all is asked; of others like it, no more than whether they are like it."""
    asked = (*CHECKS[1:], runtime.Norm.learn, gpu_module.KnownCall.run)
    first, second = (random_arguments(random_generator(), SPEC, (rows,)) for rows in (7, 7))
    for given, once in ((first, 1), (second, 0), (first, 0)):
        with counted(*asked, loaded.__wrapped__) as entered:
            gradients = call(on_gpu(gpu, given))
        of_the_first = {"bind_arrays": once, "views": once, "learn": once, "loaded": once}
        assert entered == Counter({"run": 1, **of_the_first})
        assert_matches_reference(gradients, given)


def test_calls_of_other_options_are_of_another_kind(gpu: Namespace) -> None:
    """Also where Python takes the options for equal."""
    given = random_arguments(random_generator(), SPEC, (7,))
    arrays = on_gpu(gpu, given)
    whole = call(arrays)
    assert call(arrays, output_mask=(True, True, False)).grad_bias is None
    for wrong, error in (
        ({"output_mask": (1, 1, 1)}, ValueError),
        ({"eps": True}, TypeError),
        ({"device": "local-task"}, ValueError),
    ):
        with pytest.raises(error, match=f"^({next(iter(wrong))}|input): "):
            call(arrays, **wrong)
    recomputed = call((*arrays[:2], None, None, *arrays[4:]), eps=2.0)
    assert not np.array_equal(recomputed.grad_input, whole.grad_input)


def test_a_call_for_another_device_is_refused_before_anything_is_compiled(gpu: Namespace) -> None:
    arrays = on_gpu(gpu, random_arguments(random_generator(), SPEC, (7,)))
    for device in ("local-task", "cuda://1"):
        with (
            counted(loaded.__wrapped__) as entered,
            pytest.raises(ValueError, match=f"^device: expected cuda://0.*got {device}$"),
        ):
            call(arrays, device=device)
        assert not entered


def test_eps_is_no_option_of_a_call_with_statistics(gpu: Namespace) -> None:
    """Else each of its values would be remembered."""
    arrays = on_gpu(gpu, random_arguments(random_generator(), SPEC, (7,)))
    before = len(modules._known)
    for eps in (1e-5, 1e-6, 0.5):
        call(arrays, eps=eps)
    assert len(modules._known) == before + 1


def test_a_module_that_is_let_go_of_is_gone_with_what_was_known(gpu: Namespace) -> None:
    given = random_arguments(random_generator(), SPEC, (7,))
    arrays = on_gpu(gpu, given)
    call(arrays)
    known = len(modules._known)
    assert known
    modules.loaded.cache_clear()
    assert len(modules._known) == 0
    assert_matches_reference(call(arrays), given)
