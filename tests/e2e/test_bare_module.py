"""A .vmfb without this package: by IREE's runtime and tools alone, as docs/raw_module.md has it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np
import pytest
from support import built, random_generator

from iree_lnbwd import NormSpec, cli, runtime
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.emulator import VmError
from iree_lnbwd.emulator.hal import Span, View
from iree_lnbwd.emulator.module import Module
from iree_lnbwd.hardware.targets import find_target, targets
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.ops.spec import MOST_ROWS
from iree_lnbwd.stores import shipping
from iree_lnbwd.verification import matrix
from iree_lnbwd.vmfb.description import describe
from iree_lnbwd.vmfb.raw_interface import storage_name, symbol

N = 4
BACKWARD = NormSpec((N,), residual_dtype="f32")
SPECS = {
    "layer_norm_backward": BACKWARD,
    "rms_norm_backward": NormSpec((N,), "f64", op="rms_norm_backward", eps=1e-5),
    "layer_norm": NormSpec((N,), "bf16", op="layer_norm", eps=1e-5),
    "rms_norm": NormSpec((N,), op="rms_norm", eps=1e-5, residual_dtype="bf16"),
    "layer_norm_backward, from the output": NormSpec((N,), "f16", from_output=True),
}
GENERIC = find_target("generic")
DOCS = Path(__file__).parents[2] / "docs" / "raw_module.md"


def bare(vmfb: bytes) -> Any:
    """A module as IREE's runtime has it, with its functions."""
    config = rt.Config("local-sync")
    module = rt.VmModule.copy_buffer(config.vm_instance, vmfb)
    return rt.load_vm_module(module, config)


def arrays(spec: NormSpec, rows: int, fill: float = 1.0) -> dict[str, Any]:
    """An array for each argument, by the name that messages have for it."""
    named = {given.name: given for given in spec.inputs}
    named |= {storage_name(result.name): result for result in spec.results}
    return {
        name: np.full(type_.dims(rows), fill, DTYPES[type_.dtype].numpy)
        for name, type_ in named.items()
    }


def emulated(spec: NormSpec, vmfb: bytes, rows: int, wrong: str = "") -> list[np.ndarray[Any, Any]]:
    """The results of a call on an emulated GPU, with a row more for one argument."""
    module = Module(vmfb, describe(vmfb, source="it").target.backend)
    views = {}
    for name, array in arrays(spec, rows).items():
        shape = (array.shape[0] + 1, *array.shape[1:]) if name == wrong else array.shape
        views[name] = (
            module.input(name, np.ones(shape, array.dtype))
            if name in {given.name for given in spec.inputs}
            else module.output(name, shape, array.dtype)
        )
    module.call(spec.op, *views.values())
    return [
        module.read(views[storage_name(result.name)], DTYPES[result.dtype].numpy)
        for result in spec.results
    ]


@pytest.mark.drawn
@pytest.mark.parametrize("name", SPECS)
def test_an_argument_that_does_not_fit_is_named(name: str) -> None:
    spec = SPECS[name]
    call = getattr(bare(built(spec, GENERIC)[0]), spec.op)
    good = arrays(spec, 3)
    call(*good.values())
    for wrong, array in good.items():
        # What says how many rows there are is never the one that is wrong about them.
        other_rows = np.ones((2, *array.shape[1:]), array.dtype)
        for bad, words in (
            (other_rows, "shape dimension 0 mismatch; expected [34] but have 2"),
            (np.ones((*array.shape[:-1], 5), array.dtype), r"shape dimension \d mismatch"),
            (array[None], "shape rank mismatch"),
            (array.ravel()[0].reshape(()), "shape rank mismatch"),
            (array.astype(np.int32), "element type mismatch"),
        ):
            named = wrong
            if bad is other_rows and wrong == spec.family.data.name:
                named = next(o for o, a in good.items() if o != wrong and a.shape[0] == 3)
                words = "shape dimension 0 mismatch; expected 2 but have 3"
            with pytest.raises(ValueError, match=rf"INVALID_ARGUMENT; {named} {words}"):
                call(*(good | {wrong: bad}).values())


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_an_argument_that_does_not_fit_is_named_on_a_gpu(target: str) -> None:
    vmfb, _ = built(BACKWARD, find_target(target))
    emulated(BACKWARD, vmfb, 3)
    for name in arrays(BACKWARD, 3):
        named = "grad_output" if name == "input" else name  # the input says how many rows there are
        with pytest.raises(VmError, match=rf"^{named}: expected shape"):
            emulated(BACKWARD, vmfb, 3, wrong=name)


def test_more_rows_than_kernels_can_count() -> None:
    vmfb, _ = built(BACKWARD, find_target("sm_90"))
    module = Module(vmfb, "cuda")
    views = []
    for argument in BACKWARD.arguments:
        small = module.input(argument.name, np.ones(1, DTYPES[argument.dtype].numpy))
        shape = argument.dims(MOST_ROWS + 1)
        views.append(View(Span(small.span.buffer, 0, 4), small.element_type, shape))
    with pytest.raises(VmError, match=f"input: expected at most {MOST_ROWS} rows"):
        module.call(BACKWARD.op, *views)


@pytest.mark.drawn
@pytest.mark.parametrize("name", SPECS)
def test_without_rows_sums_are_zeros(name: str) -> None:
    spec = SPECS[name]
    call = getattr(bare(built(spec, GENERIC)[0]), spec.op)
    views = call(*arrays(spec, 0, fill=7.0).values())
    for result, view in zip(spec.results, views, strict=True):
        assert tuple(view.shape) == result.dims(0), result.name
        assert not view.to_host().any(), result.name


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_without_rows_sums_are_zeros_on_a_gpu(target: str) -> None:
    vmfb, _ = built(BACKWARD, find_target(target))
    for result, array in zip(BACKWARD.results, emulated(BACKWARD, vmfb, 0), strict=True):
        assert array.shape == result.dims(0)
        assert not array.any()


def test_names_tell_modules_apart_and_are_symbols() -> None:
    names = [symbol(spec, target) for spec in matrix.specs() for target in targets()]
    offset = [NormSpec((N,), weight_offset=w) for w in (1e16, 1e-16, 1.0, -1.0)]
    names += [symbol(spec, GENERIC) for spec in offset]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]\w*", name) for name in names)


def test_modules_share_a_context() -> None:
    config = rt.Config("local-sync")
    context = rt.SystemContext(config=config)
    for spec in SPECS.values():
        module = rt.VmModule.copy_buffer(config.vm_instance, built(spec, GENERIC)[0])
        assert module.name == symbol(spec, GENERIC)
        context.add_vm_module(module)
    for spec in SPECS.values():
        call = context.modules[symbol(spec, GENERIC)][spec.op]
        assert len(call(*arrays(spec, 2).values())) == len(spec.results)


def test_a_module_without_a_name_still_runs() -> None:
    """Those that were compiled before modules had names are all called ``module``."""
    text = compiler.source_text(BACKWARD, GENERIC)
    beginning = f"\nmodule @{symbol(BACKWARD, GENERIC)} {{\n"
    assert text.count(beginning) == 1
    text = text.replace(beginning, "").rstrip().removesuffix("}")
    vmfb = iree_compile.run(text, "none", compiler.flags(GENERIC), "it")
    assert describe(vmfb, source="it").name == "module"
    call = matrix.random_call(BACKWARD, 5, random_generator())
    results = [
        runtime.load_built(module).run(call) for module in (vmfb, built(BACKWARD, GENERIC)[0])
    ]
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_cpu_that_lacks_a_feature_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By IREE itself, when it loads the module; the names of features are those of its runtime."""
    monkeypatch.setattr(compiler, "cpu_features", lambda: ("avx512-of-the-future",))
    vmfb, _ = compiler.build(BACKWARD, find_target("host"))
    said = "device: expected a CPU with avx512-of-the-future, got one without"
    with pytest.raises(RuntimeError, match=f"FAILED_PRECONDITION; {said}"):
        bare(vmfb)
    path = tmp_path / "module.vmfb"
    path.write_bytes(vmfb)
    run = run_module(f"--module={path}", "--device=local-task", f"--function={BACKWARD.op}")
    assert run.returncode != 0
    assert said in run.stderr


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).parent / "iree-run-module"
    return subprocess.run([tool, *words], capture_output=True, text=True, check=False)


def words_of(capsys: pytest.CaptureFixture[str], path: Path) -> list[str]:
    """The command that ``inspect`` shows for a module, without the tool's name."""
    assert cli.main(["inspect", str(path)]) == 0
    (line,) = re.findall(r"^bare +iree-run-module (.*)$", capsys.readouterr().out, re.MULTILINE)
    return [str(word) for word in line.split()]


def test_the_command_that_inspect_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = shipping.compile(NormSpec((N,)), "generic", tmp_path)
    words = words_of(capsys, made.path)
    run = run_module(*words)
    assert run.returncode == 0, run.stderr
    values = [
        np.array(re.findall(r"[-\d.e]+", row), float) for row in re.findall(r"f32=(.*)", run.stdout)
    ]
    # dy, x, rstd and gamma are 1, and mean is 0: so h and xhat are 1, and dx is 1 - 1 - 1 * 1.
    for got, expected in zip(values, (-np.ones(2 * N), np.full(N, 2), np.full(N, 2)), strict=True):
        np.testing.assert_array_equal(got, expected)

    # The same, on tensors of one's own.
    rng = random_generator()
    x, dy = rng.standard_normal((2, 2, N), dtype=np.float32)
    mean, rstd = x.mean(1), (1 / np.sqrt(x.var(1) + 1e-5)).astype(np.float32)
    gamma = rng.standard_normal(N, dtype=np.float32)
    given = (dy, x, mean, rstd, gamma)
    for place, array in enumerate(given):
        array.tofile(tmp_path / f"{place}.bin")
        words[3 + place] = words[3 + place].rpartition("=")[0] + f"=@{tmp_path}/{place}.bin"
    outputs = [tmp_path / f"result{place}.bin" for place in range(3)]
    run = run_module(*words, *(f"--output=@{path}" for path in outputs))
    assert run.returncode == 0, run.stderr
    grad_input, *sums = (np.fromfile(path, np.float32) for path in outputs)
    check(given, [grad_input.reshape(2, N), *sums])

    # An argument that does not fit.
    words[3 + 2] = "--input=3xf32"
    run = run_module(*words)
    assert run.returncode != 0
    assert "INVALID_ARGUMENT; mean shape dimension 0 mismatch; expected 2 but have 3" in run.stderr


def check(given: Sequence[Any], got: Sequence[Any]) -> None:
    """Against the gradients by their formulas, in f64."""
    dy, x, mean, rstd, gamma = (array.astype(np.float64) for array in given)
    xhat = (x - mean[:, None]) * rstd[:, None]
    h = dy * gamma
    row_h, row_hx = (sums.mean(1, keepdims=True) for sums in (h, h * xhat))
    expected = rstd[:, None] * (h - row_h - xhat * row_hx), (dy * xhat).sum(0), dy.sum(0)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# Nothing of ours can be imported.
_ALONE = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "iree_lnbwd" or name.startswith("iree.compiler"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
"""
_KEEP = """
np.savez("results.npz", dy, x, mean, rstd, gamma, grad_input, grad_weight, grad_bias)
assert "iree_lnbwd" not in sys.modules
"""


def test_iree_and_numpy_alone(tmp_path: Path) -> None:
    """The example of the page, where nothing of this package is to be had."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    shipping.compile(NormSpec((N,)), "generic", tmp_path / "dist")
    command = [sys.executable, "-c", _ALONE + code + _KEEP]
    subprocess.run(command, cwd=tmp_path, check=True)
    with np.load(tmp_path / "results.npz") as results:
        values = [results[name] for name in results.files]
    check(values[:5], values[5:])


def test_the_page_shows_what_inspect_and_the_tool_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = shipping.compile(NormSpec((N,)), "generic", Path("dist"))
    words = words_of(capsys, made.path)
    (console,) = re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert console.count(" ".join(["iree-run-module", *words])) == 2
    assert console.endswith(run_module(*words).stdout)


def test_the_page_lists_the_arguments_of_every_op() -> None:
    """In one order for every form of an op, and none that no form has."""
    page = DOCS.read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for op, results in itertools.product(OPS.values(), (False, True)):
        listed = re.findall(r"`(\w+)`", rows[op.name].split(" | ")[results])
        more: list[dict[str, Any]] = [{}, {"gate": "after"}, {"gate": "before"}]
        beside = ("grad_input_copy_dtype", "grad_input_sum_dtype")
        more += [{field: "bf16"} for field in beside] * op.is_backward
        found = set()
        for fields in more:
            eps = None if op.is_backward else 1e-5
            form = NormSpec((N,), "f32", op=op.name, eps=eps, **fields).family
            names = [one.name for one in (form.results if results else form.inputs)]
            assert [name for name in listed if name in names] == names
            found |= set(names)
        assert set(listed) == found
