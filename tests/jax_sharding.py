"""Rows sharded over four devices of the CPU, by modules: run in a process that has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from iree_lnbwd import NormSpec
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import custom_call
from iree_lnbwd.jax import native as jax_native

COLUMNS = 16
_LAUNCHED = custom_call.launched
launched: list[tuple[str, tuple[int, ...]]] = []  # the ops, and the shapes on each device


def launch(spec: NormSpec, rows_per_set: int | None, *arrays: jax.Array) -> Any:
    """As `custom_call.launched`."""
    launched.append((spec.op, arrays[0].shape))
    return _LAUNCHED(spec, rows_per_set, *arrays)


def loss(x: Any, weight: Any, bias: Any) -> Any:
    out, total = lnbwd.add_layer_norm(x, 2 * x, COLUMNS, weight, bias)
    return (out**3 + total).sum()


def assert_close(found: Any, expected: Any) -> None:
    for mine, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def main() -> None:
    assert len(jax.devices()) == 4
    x = jax.random.normal(jax.random.key(0), (4, 6, COLUMNS))
    weight, bias = jax.random.normal(jax.random.key(1), (2, COLUMNS))
    step = jax.value_and_grad(loss, (0, 1, 2))
    platforms, jax_native.platforms = jax_native.platforms, lambda spec, rows: ()
    expected = jax.device_get(jax.jit(step)(x, weight, bias))  # XLA's

    custom_call.launched, jax_native.platforms = launch, platforms
    jax.clear_caches()
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
        under_jit(mesh, step, (x, weight, bias), expected)
        for sets, rows, on_device in ((4, 6, (2, 3)), (5, 1, (4, 6))):
            of_sets(mesh, sets, rows, (*on_device, COLUMNS))
    for check in (True, False):
        under_shard_map(mesh, (x, weight, bias), expected, check=check)
    with jax.set_mesh(jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))):  # one row
        found = jax.jit(lnbwd.layer_norm, static_argnums=1)(x[0, 0], COLUMNS)
        assert_close(found, lnbwd.layer_norm(np.asarray(x[0, :1]), COLUMNS)[0])
    under_pmap((x, weight, bias), expected)


def under_jit(mesh: Any, step: Callable[..., Any], given: Any, expected: Any) -> None:
    x, weight, bias = given
    with jax.set_mesh(mesh):
        for rows in (("a", "b"), (("a", "b"), None)):
            launched.clear()
            sharding = NamedSharding(mesh, PartitionSpec(*rows, None))
            arrays = (jax.device_put(x, sharding), weight, bias)
            compiled = jax.jit(step).lower(*arrays).compile()
            assert_close(compiled(*arrays), expected)
            shape = sharding.shard_shape(x.shape)
            ops = {op for op, on_device in launched if on_device == shape}
            assert ops == {"layer_norm", "layer_norm_backward"}
            assert "all-gather" not in compiled.as_text()
        # normalized dimensions are brought together
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "b"))
        assert_close(jax.jit(step)(jax.device_put(x, sharding), weight, bias), expected)


def of_sets(mesh: Any, sets: int, rows_per_set: int, on_device: tuple[int, ...]) -> None:
    """Sets of samples stay with their rows; rows of others are brought together."""
    given = [jax.random.normal(jax.random.key(n), (4, 6, COLUMNS)) for n in range(2)]
    given += [jax.random.normal(jax.random.key(2), (sets, COLUMNS))]

    def of(x: Any, gate: Any, weight: Any) -> Any:
        options = {"rows_per_set": rows_per_set, "gate": gate}
        return (lnbwd.rms_norm(x, COLUMNS, weight, **options) ** 3).sum()

    step = jax.value_and_grad(of, (0, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_native, "platforms", lambda *_: ())
        expected = jax.device_get(jax.jit(step)(*given))
    jax.clear_caches()
    launched.clear()
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("a", "b"))
        arrays = [*(jax.device_put(each, rows) for each in given[:2]), given[2]]
        assert_close(jax.jit(step)(*arrays), expected)
    assert {op for op, shape in launched if shape == on_device} == {"rms_norm", "rms_norm_backward"}


def under_shard_map(mesh: Any, given: Any, expected: Any, *, check: bool) -> None:
    rows, everywhere = PartitionSpec("a", "b", None), PartitionSpec(None)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(rows, everywhere, everywhere),
        out_specs=(PartitionSpec(), (rows, everywhere, everywhere)),
        check_vma=check,
    )
    def step(x: Any, weight: Any, bias: Any) -> Any:
        def total(*given: Any) -> Any:
            return jax.lax.psum(loss(*given), ("a", "b")) if check else loss(*given)

        value, gradients = jax.value_and_grad(total, (0, 1, 2))(x, weight, bias)
        if check:  # JAX adds up the gradients of what is the same everywhere
            return value, gradients
        dx, *others = gradients
        return jax.lax.psum(value, ("a", "b")), (dx, *jax.lax.psum(others, ("a", "b")))

    launched.clear()
    jax.clear_caches()  # of the same shapes in another mesh
    with jax.set_mesh(mesh):
        x = jax.device_put(given[0], NamedSharding(mesh, rows))
        assert_close(jax.jit(step)(x, *given[1:]), expected)
    assert launched
    assert {shape for _, shape in launched} == {(2, 3, COLUMNS)}


def under_pmap(given: Any, expected: Any) -> None:
    x, weight, bias = given

    def step(x: Any, weight: Any, bias: Any) -> Any:
        value, (dx, *others) = jax.value_and_grad(loss, (0, 1, 2))(x, weight, bias)
        value, others = jax.lax.psum((value, others), "i")
        return value, (dx, *others)

    mapped = jax.pmap(step, "i", in_axes=(0, None, None), out_axes=(None, (0, None, None)))
    assert_close(mapped(x, weight, bias), expected)


if __name__ == "__main__":
    main()
