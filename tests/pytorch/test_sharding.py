"""The rules by which DTensor shards the operators: in one process of a group that there is not.

`scripts/verify_tensor_parallel` runs them in processes that there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import FORMS, Form, gradients_of, random_like, random_tensors
from torch import Tensor

if not torch.distributed.is_available():
    pytest.skip("PyTorch without distributed", allow_module_level=True)
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from iree_lnbwd.torch import rms_norm, sharding
from iree_lnbwd.torch.operator_table import WITH_COPIES, WITH_SUMS, in_order

ALL = {"pytorchs_layer_norm": replace(FORMS["layer_norm"], options={}), **FORMS}
every_form = pytest.mark.parametrize("form", ALL.values(), ids=ALL)
COLUMNS = 24
ROWS = (4, 6)
PARAMETERS = ("weight", "bias")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two processes; this is the first of them, and what the other sends never comes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(tensors: dict[str, Tensor], mesh: DeviceMesh, rows: Placement) -> dict[str, Tensor]:
    """DTensors of local tensors."""
    return {
        name: DTensor.from_local(
            tensor, mesh, [Replicate() if name in PARAMETERS else rows], run_check=False
        )
        for name, tensor in tensors.items()
    }


@every_form
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("frozen", [(), PARAMETERS], ids=["all", "input"])
def test_sharded_rows(
    form: Form, dimension: int, frozen: tuple[str, ...], mesh: DeviceMesh
) -> None:
    """A process computes its rows' results, and its part of the sums; another mask, too."""
    tensors = random_tensors(form, ROWS, (COLUMNS,))
    for name in frozen:
        if name in tensors:
            tensors[name].requires_grad_(False)
    rows = Shard(dimension)
    given = sharded(tensors, mesh, rows)
    outputs, expected = form(given, (COLUMNS,)), form(tensors, (COLUMNS,))
    assert {output.placements for output in outputs} == {(rows,)}
    reached = tuple(map(random_like, expected))
    placed = tuple(DTensor.from_local(g, mesh, [rows], run_check=False) for g in reached)
    asked = {name: given[name] for name, tensor in tensors.items() if tensor.requires_grad}
    found = gradients_of(outputs, asked, placed)
    theirs = gradients_of(expected, tensors, reached)
    for name, gradient in found.items():
        assert gradient.placements == ((Partial(),) if name in PARAMETERS else (rows,)), name
        assert torch.equal(gradient.to_local(), theirs[name]), name
    for output, alone in zip(outputs, expected, strict=True):
        assert torch.equal(output.to_local(), alone)


HEADS_AND_SAMPLES = [
    ((6, 1), Shard(0), Replicate(), Partial()),  # heads: each sample has all
    ((4, 6), Shard(0), Shard(0), Shard(0)),  # a set for each sample
    ((6, 1), Shard(1), Shard(0), Shard(0)),  # heads that are split
]


@pytest.mark.parametrize(("sets", "rows", "placed", "summed"), HEADS_AND_SAMPLES)
@pytest.mark.parametrize("name", ["add_rms_norm_of_sets", "gated_layer_norm_of_sets"])
def test_sharded_sets(
    name: str,
    sets: tuple[int, int],
    rows: Placement,
    placed: Placement,
    summed: Placement,
    mesh: DeviceMesh,
) -> None:
    """The first process computes what it would with its rows and its sets alone."""
    number, rows_per_set = sets
    operator = getattr(torch.ops.iree_lnbwd, name).default
    cells = torch.randn(2, *ROWS, COLUMNS, requires_grad=True)
    parameters = torch.randn(2, number, COLUMNS, requires_grad=True)

    def gradients(function: Any) -> list[Tensor]:
        x, other, weight, bias = map(function, (*cells.unbind(), *parameters.unbind()))
        given = (x, weight, bias, other) if "gated" in name else (x, other, weight, bias)
        options = ((COLUMNS,), 1e-5, 0.0, False, None, rows_per_set)
        output = operator(*given, *options)[0]
        return [output, *torch.autograd.grad(output.square().sum(), [x, other, weight, bias])]

    def shared(tensor: Tensor) -> Tensor:
        placement = rows if tensor.ndim == 3 else placed
        whole = DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)
        return whole.redistribute(mesh, [placement]).requires_grad_()

    def own(tensor: Tensor) -> Tensor:
        return shared(tensor).detach().to_local().requires_grad_()

    found, expected = gradients(shared), gradients(own)
    assert [each.placements for each in found] == [(rows,)] * 3 + [(summed,)] * 2
    for each, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(each.to_local(), alone)


@pytest.mark.parametrize(("sets", "rows"), [((4, 6), 1), ((3, 1), 1), ((5, 2), 0), ((3, 8), 0)])
def test_sets_that_do_not_divide_rows(sets: tuple[int, int], rows: int, mesh: DeviceMesh) -> None:
    """The rows are gathered: those of a process would take others' sets."""
    number, rows_per_set = sets
    x = DTensor.from_local(torch.randn(2, 6, COLUMNS), mesh, [Shard(rows)], run_check=False)
    weight = distribute_tensor(torch.ones(number, COLUMNS), mesh, [Replicate()])
    assert rms_norm(x, COLUMNS, weight, rows_per_set=rows_per_set).placements == (Replicate(),)


@every_form
def test_normalized_dimensions_are_never_sharded(form: Form, mesh: DeviceMesh) -> None:
    half = {n: t.detach() for n, t in random_tensors(form, ROWS, (COLUMNS // 2,)).items()}
    cells = {n: t for n, t in half.items() if n not in PARAMETERS}
    parameters = {n: torch.cat([t, t]) for n, t in half.items() if n in PARAMETERS}
    given = sharded(cells, mesh, Shard(2)) | sharded(parameters, mesh, Replicate())
    for output in form(given, (COLUMNS,)):
        assert output.shape == (*ROWS, COLUMNS)
        assert output.placements != (Shard(2),)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_copy_of_the_gradient_is_where_the_gradient_is(
    placement: Placement, mesh: DeviceMesh
) -> None:
    sharding.register()
    copied = WITH_COPIES["rms_norm_backward"]
    rows = [torch.randn(*ROWS, COLUMNS) for _ in range(2)]
    dy, x = (distribute_tensor(each, mesh, [placement]) for each in rows)
    weight = distribute_tensor(torch.randn(COLUMNS), mesh, [Replicate()])
    tensors = in_order(copied.op, grad_output=dy, input=x, weight=weight)
    options = ([COLUMNS], [True, True, False], 1e-5, 0.0, torch.bfloat16)
    dx, _, _, copy = copied.operator(*tensors, *options)
    assert copy.placements == dx.placements == (placement,)
    assert torch.equal(copy.to_local(), dx.to_local().bfloat16())


def test_a_sum_of_the_gradient_is_partial_where_rows_are_apart(mesh: DeviceMesh) -> None:
    sharding.register()
    summed = WITH_SUMS["rms_norm_backward"]
    rows = [torch.randn(*ROWS, COLUMNS) for _ in range(2)]
    weight = distribute_tensor(torch.randn(COLUMNS), mesh, [Replicate()])
    options = ([COLUMNS], [True, True, False], 1e-5, 0.0, torch.float32)
    for placement in (Shard(0), Replicate()):
        dy, x = (distribute_tensor(each, mesh, [placement]) for each in rows)
        tensors = in_order(summed.op, grad_output=dy, input=x, weight=weight)
        dx, dgamma, _, total = summed.operator(*tensors, *options)
        assert dx.placements == (placement,)
        assert total.placements == dgamma.placements
        assert isinstance(total.placements[0], Partial) == (placement == Shard(0))
        own = dx.to_local().sum((0, 1))  # the other process is not there
        torch.testing.assert_close(total.to_local(), own, rtol=1e-5, atol=1e-5)


def test_a_call_does_not_take_the_placements_of_another(mesh: DeviceMesh) -> None:
    """Without a weight, nothing but the list of dimensions tells these calls apart."""
    x = DTensor.from_local(torch.randn(*ROWS, COLUMNS), mesh, [Shard(1)], run_check=False)
    assert rms_norm(x, COLUMNS).placements == (Shard(1),)
    assert rms_norm(x, (2 * ROWS[1], COLUMNS)).placements != (Shard(1),)
    assert rms_norm(x, COLUMNS).placements == (Shard(1),)


def test_in_inference_mode(mesh: DeviceMesh) -> None:
    x = torch.randn(*ROWS, COLUMNS)
    with torch.inference_mode():
        sharded_x = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        assert torch.equal(rms_norm(sharded_x, COLUMNS).to_local(), rms_norm(x, COLUMNS))
