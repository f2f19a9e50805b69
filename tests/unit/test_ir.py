"""From a file of ir/ to a module's text: the rules that ir/README.md lists, one by one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from iree.compiler.tools import compile_file, compile_str

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.compiling import compiler, ir
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.schedules import Forward, OnePass, Schedule, WholeTensors
from iree_lnbwd.vmfb import raw_interface

FOLDER = Path(compiler.__file__).parents[2] / "ir"
CPU = find_target("generic")
SM_90 = find_target("sm_90")

SPECS = (
    NormSpec((4096,), "bf16"),
    NormSpec((769,), "f32"),
    NormSpec((2, 3), "f64"),
    NormSpec((1,), "f16", weight_dtype="f32", grad_output_dtype="bf16", bias_dtype="bf16"),
    NormSpec((8,), rows=3),
    NormSpec((8,), rows=1),
    NormSpec((8,), has_weight=False),
    NormSpec((8,), eps=1e-5),
    NormSpec((8,), "bf16", eps=0.0, has_weight=False, output_mask=(True, False, False)),
)


def specialized(spec: NormSpec) -> str:
    """The algorithm as it stands."""
    return compiler.source_text(spec, CPU, schedule=WholeTensors())


def entry_of(text: str) -> str:
    """The appended public function."""
    return text[text.index("util.func public @layer_norm_backward(") :]


@pytest.mark.drawn
@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.mlir")), ids=lambda path: path.name)
def test_files_parse_as_they_stand(path: Path) -> None:
    parsed = compile_file(str(path), extra_args=["--compile-to=input"])
    assert b"func.func" in parsed or b"util.func" in parsed


@pytest.mark.parametrize(
    "source", [f"{SPECS[0].op}.mlir", *ir.oracle(replace(SPECS[0], weight_sets=True))]
)
def test_files_have_no_public_function_of_their_own(source: str) -> None:
    assert "func.func @" not in compiler.read_ir(source)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("how", [None, WholeTensors()], ids=["chosen", "whole tensors"])
def test_specialized_text_parses(spec: NormSpec, how: WholeTensors | None) -> None:
    text = compiler.source_text(spec, CPU, schedule=how)
    parsed = compile_str(text, extra_args=[*compiler.flags(CPU), "--compile-to=input"])
    assert b"@layer_norm_backward(" in parsed


def test_aliases_are_the_specs() -> None:
    spec = NormSpec((3, 8), "f32", grad_output_dtype="f16", weight_dtype="bf16", rows=5)
    lines = specialized(spec).splitlines()
    for alias in (
        "!dy = f16",
        "!x = f32",
        "!gamma = bf16",
        "!beta = bf16",
        "!acc = f32",
        "!dy_mn = tensor<5x24x!dy>",
        "!x_mn = tensor<5x24x!x>",
        "!acc_m = tensor<5x!acc>",
        "!gamma_n = tensor<24x!gamma>",
    ):
        assert alias in lines


@pytest.mark.parametrize("columns", [1, 3, 769, 65536, 10**9])
def test_one_over_n_and_eps_are_exact(columns: int) -> None:
    text = specialized(NormSpec((columns,), "f64", eps=1.1e-5))
    inverse, eps = (
        re.search(rf"^#{name} = (\S+) : !acc$", text, re.M) for name in ("inv_n", "eps")
    )
    assert inverse is not None
    assert float(inverse[1]) == 1.0 / columns
    assert eps is not None
    assert float(eps[1]) == 1.1e-5


def functions(text: str) -> dict[str, str]:
    """The first of each name that a text's kernels have of their own."""
    found = re.findall(r"^ *func\.func private @(\w+)\((?:.|\n)*?\n    }\n", text, re.M)
    return {
        name: text[text.index(f"func private @{name}(") :].split("\n    }")[0] for name in found
    }


@pytest.mark.parametrize(
    ("columns", "dtype", "widened"),
    [
        (1024, "bf16", "vector.interleave"),
        (3, "bf16", "arith.extf"),
        (1024, "f16", "arith.extf"),
        (1024, "f32", "return %value"),
    ],
)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_each_type_is_widened_in_its_way(
    columns: int, dtype: str, widened: str, target: str
) -> None:
    text = compiler.source_text(NormSpec((columns,), dtype), find_target(target))
    ours = functions(text)
    for name in ("widen_of_dy", "widen_of_x", "widen_of_gamma"):
        assert widened in ours[name]
    rounded = "return %value" if dtype == "f32" else "llvm.fptrunc"
    assert rounded in ours["round_of_x"]


def test_each_function_is_judged_by_its_own_types() -> None:
    spec = NormSpec((1024,), "f32", grad_output_dtype="bf16", weight_dtype="f16")
    ours = functions(compiler.source_text(spec, find_target("sm_90")))
    assert "vector.interleave" in ours["widen_of_dy"]
    assert "return %value" in ours["widen_of_x"]
    assert "arith.extf" in ours["widen_of_gamma"]


@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm"])
@pytest.mark.parametrize(
    ("target", "dtype", "whole"),
    [
        ("sm_90", "f32", False),
        ("sm_100", "f32", True),
        ("sm_103", "bf16", True),
        ("sm_120", "f32", False),
        ("gfx942", "f32", False),
        ("sm_100", "f64", False),
    ],
)
def test_multiply_adds_stay_whole_for_pairs(op: str, target: str, dtype: str, whole: bool) -> None:
    spec = NormSpec((1024,), dtype, op=op, eps=None if op.endswith("backward") else 1e-5)
    text = compiler.source_text(spec, find_target(target))
    assert ("llvm.intr.fma" in text, "math.fma" in text) == (whole, not whole)


def test_a_cpu_rounds_by_itself() -> None:
    """LLVM would make a call of what a module does not have."""
    text = compiler.source_text(NormSpec((1024,), "bf16"), CPU)
    assert "fptrunc" not in text
    assert "arith.truncf" in functions(text)["round_of_x"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.mlir")), ids=lambda path: path.name)
def test_formulas_stand_in_one_place(path: Path) -> None:
    """Kernels widen, round, and compute xhat and dx by what they declare of ir/math/."""
    text = path.read_text()
    if "hal.executable.source" in text:
        for op in ("arith.extf", "arith.truncf", "llvm.fptrunc", "vector.interleave"):
            assert op not in text


def test_everything_else_is_the_files() -> None:
    """A spec of any number of rows changes nothing below the aliases."""
    marker = "// End of what is replaced.\n"
    spec = NormSpec((4096,), "bf16")
    below = compiler.read_ir(f"{spec.op}.mlir").split(marker)[1].strip("\n")
    left_out = r"(?: *// without (?:sets|copies|totals))+$|^ *// with (?:sets|copies|totals): .*\n"
    below = re.sub(left_out, "", below, flags=re.MULTILINE)
    aliases, body = below.split("\n\n", 1)
    text = specialized(spec)
    before, after = text.split(f"module @{raw_interface.symbol(spec, CPU)} {{\n")
    assert before.endswith(f"\n{aliases}\n\n")
    assert after.startswith(f"\n{body}\n")


def test_fixed_rows_need_no_dimension() -> None:
    assert "tensor.empty(%rows)" in specialized(NormSpec((8,)))
    assert "tensor.empty(%rows)" not in specialized(NormSpec((8,), rows=3))
    assert "?" not in "".join(re.findall(r"tensor<[^>]*>", specialized(NormSpec((8,), rows=3))))


@pytest.mark.parametrize(
    ("spec", "parameters", "returned"),
    [
        (
            NormSpec((8,)),
            "in_dy in_x in_mean in_rstd in_gamma out_dx out_dgamma out_dbeta",
            "%dx_view, %dgamma_view, %dbeta_view",
        ),
        (
            NormSpec((8,), has_weight=False),
            "in_dy in_x in_mean in_rstd out_dx out_dbeta",
            "%dx_view, %dbeta_view",
        ),
        (
            NormSpec((8,), eps=1e-5),
            "in_dy in_x in_gamma out_dx out_dgamma out_dbeta",
            "%dx_view, %dgamma_view, %dbeta_view",
        ),
        (
            NormSpec((8,), output_mask=(False, True, False)),
            "in_dy in_x in_mean in_rstd in_gamma out_dgamma",
            "%dgamma_view",
        ),
        (
            NormSpec((8,), output_mask=(False, False, True), eps=0.0, has_weight=False),
            "in_dy in_x out_dbeta",
            "%dbeta_view",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, NormSpec) else "",
)
def test_entry_takes_and_returns_what_the_spec_has(
    spec: NormSpec, parameters: str, returned: str
) -> None:
    entry = entry_of(specialized(spec))
    signature, _, body = entry.partition("attributes")
    assert re.findall(r"^    %(\w+): !", signature, re.M) == parameters.split()
    assert f"  util.return {returned} : " in body


def test_results_go_to_the_callers_storage_in_order() -> None:
    entry = entry_of(specialized(NormSpec((8,), output_mask=(True, False, True))))
    some = entry.partition("^some:")[2]
    assert re.findall(r"hal\.tensor\.alias %(\w+) : .* to %(\w+) ", some) == [
        ("dx", "out_dx"),
        ("dbeta", "out_dbeta"),
    ]


def test_statistics_are_called_where_they_are_recomputed() -> None:
    assert "call @statistics" in entry_of(specialized(NormSpec((8,), eps=0.0)))
    assert "call @statistics" not in entry_of(specialized(NormSpec((8,))))


def test_without_a_weight_gamma_is_one() -> None:
    one = "%gamma = arith.constant dense<1.0> : !gamma_n"
    assert one in entry_of(specialized(NormSpec((8,), has_weight=False)))
    assert one not in entry_of(specialized(NormSpec((8,))))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_module_carries_its_spec_and_target(spec: NormSpec) -> None:
    entry = entry_of(specialized(spec))
    carried = re.search(r'iree_lnbwd\.spec = ("(?:[^"\\]|\\.)*")', entry)
    assert carried is not None
    assert NormSpec.from_dict(json.loads(json.loads(carried[1]))) == spec
    assert 'iree_lnbwd.target = "generic"' in entry


FORWARD = NormSpec((1024,), "bf16", op="layer_norm", eps=1e-5)


def parts_of(spec: NormSpec, how: Schedule, target: Target = SM_90) -> set[str]:
    """The parts that a module takes, by their names below ``ir/parts/``."""
    names = ir.sources(spec, target, how)
    return {name[len("parts/") : -len(".mlir")] for name in names if name.startswith("parts/")}


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (OnePass(132, 1, 8, 4), "fetch/registers"),
        (OnePass(132, 1, 8, 4, ahead=1), "fetch/registers_ahead"),
        (OnePass(132, 1, 8, 4, rereads=True), "fetch/twice"),
        (OnePass(132, 1, 8, 4, ahead=2, slots=3), "fetch/async"),
        (OnePass(132, 1, 8, 4, ahead=2, slots=2, bulk=True), "fetch/bulk"),
        (OnePass(132, 1, 8, 4), "places/known"),
        (OnePass(132, 1, 8, 4, ahead=2, slots=3), "rows/whole"),
        (OnePass(132, 1, 8, 8, ahead=2, slots=3), "rows/shifted"),
        (OnePass(132, 1, 8, 4, ahead=2, slots=3), "begin/in_two"),
        (OnePass(132, 1, 8, 8, ahead=2, slots=3), "begin/at_once"),
        (OnePass(132, 1, 8, 4, ahead=2, slots=2, bulk=True), "begin/at_once"),
        (OnePass(132, 1, 8, 4), "weight/held"),
        (OnePass(132, 1, 8, 4, rereads=True), "weight/twice"),
        (OnePass(132, 1, 8, 4, ahead=2, slots=3, stages_weight=True), "weight/copied"),
        (OnePass(132, 1, 8, 4, ahead=1, stages_weight=True, widens_weight=True), "weight/widened"),
        (OnePass(8, 1, 1, 4, ahead=2, slots=3), "sums/subgroup"),
        (OnePass(8, 1, 4, 4, ahead=2, slots=3), "sums/workgroup"),
        (OnePass(8, 1, 4, 4, ahead=2, slots=3, cluster=2), "sums/cluster"),
        (OnePass(8, 1, 1, 4, ahead=2, slots=3, cluster=2), "sums/cluster"),
        (OnePass(132, 1, 8, 4), "partial_rows/one_group"),
        (OnePass(132, 2, 8, 4), "partial_rows/groups"),
        (Forward(1, 128, 4, 2, in_registers=True), "forward/sums/workgroup"),
        (Forward(4, 32, 4, 8, in_registers=True), "forward/sums/subgroup"),
        (Forward(1, 128, 4, 2, in_registers=True, cluster=2), "forward/sums/cluster"),
        (Forward(1, 128, 4, 2, in_registers=True), "forward/chunks/whole"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schedules_numbers_choose_between_parts(how: Schedule, part: str) -> None:
    """One of several files has the functions, and the text of the others is not there."""
    spec = FORWARD if isinstance(how, Forward) else NormSpec((1004,), "bf16")
    parts = parts_of(spec, how)
    assert part in parts
    folder = part.rpartition("/")[0]
    assert [other for other in parts if other.rpartition("/")[0] == folder] == [part]
    own = set(re.findall(r"@(\w+)\(%", compiler.read_ir(f"parts/{part}.mlir")))
    assert own & set(functions(compiler.source_text(spec, SM_90, schedule=how)))


def test_amd_gpus_hide_places_of_rows_that_are_loaded_twice() -> None:
    spec, twice = NormSpec((1004,), "bf16"), OnePass(104, 1, 2, 4, rereads=True)
    gpu = find_target("gfx942")
    assert "places/hidden" in parts_of(spec, twice, gpu)
    assert '"=v,0"' in compiler.source_text(spec, gpu, schedule=twice)
    for how, target in ((twice, SM_90), (replace(twice, rereads=False), gpu)):
        assert "places/known" in parts_of(spec, how, target)


def test_rows_that_begin_anywhere_choose_a_forwards_part() -> None:
    how = Forward(1, 128, 8, 2, in_registers=True)
    for columns, part in ((1024, "whole"), (1025, "shifted"), (1028, "shifted")):
        parts = parts_of(replace(FORWARD, normalized_shape=(columns,)), how)
        assert {name for name in parts if "chunks/" in name} == {f"forward/chunks/{part}"}


@pytest.mark.parametrize(
    ("spec", "bias", "inverse"),
    [
        (NormSpec((4096,), "bf16"), "none", "divided"),
        (NormSpec((4096,), "bf16", from_output=True), "staged", "staged"),
        (NormSpec((4096,), "bf16", from_output=True, has_bias=False), "none", "staged"),
        (NormSpec((4096,), "bf16", from_output=True, has_weight=False), "staged", "divided"),
    ],
    ids=["from the input", "from the output", "without a bias", "without a weight"],
)
def test_what_a_backward_from_the_output_keeps(spec: NormSpec, bias: str, inverse: str) -> None:
    parts = parts_of(spec, OnePass(132, 1, 8, 4))
    assert {f"bias/{bias}", f"inverse/{inverse}"} <= parts


def test_whole_tensors_and_cpus_have_no_parts() -> None:
    spec = NormSpec((1004,), "bf16")
    assert not parts_of(spec, WholeTensors())
    assert not parts_of(spec, schedules.choose(spec, CPU), CPU)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.mlir")), ids=lambda path: path.name)
def test_no_file_is_long_and_no_function_has_many_parameters(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 700
    for name, parameters in re.findall(r"func\.func private @(\w+)\((%[^)]*)\)", text):
        assert parameters.count(": ") <= 12, name


def test_unknown_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.mlir: not in .* and not in"):
        compiler.read_ir("nothing.mlir")


@pytest.mark.parametrize(
    ("columns", "how", "copies"),
    [
        (4096, OnePass(132, 1, 8, 4, ahead=2, slots=3), "dy x"),
        (4096, OnePass(132, 1, 8, 2, ahead=2, slots=3), ""),
        (4100, OnePass(132, 1, 8, 4, ahead=2, slots=3), ""),
        (65536, OnePass(15, 1, 16, 4, ahead=1, slots=2, rereads=True, cluster=8), ""),
    ],
    ids=["whole sectors", "8 bytes", "within a sector", "a cluster"],
)
def test_which_copies_pass_the_l1_cache(columns: int, how: OnePass, copies: str) -> None:
    """Those of 16 bytes, of rows that begin with a sector and have one workgroup."""
    text = compiler.source_text(NormSpec((columns,), "f32"), find_target("sm_90"), schedule=how)
    copy = r'"nvgpu\.device_async_copy"\(%(dy|x)_rows[^<]*<\{(bypassL1)?'
    found = {name for name, passes in re.findall(copy, text) if passes}
    assert found == set(copies.split())
