"""A norm on a device: a loaded module, to be called with arrays of any library."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from iree_lnbwd import notices
from iree_lnbwd.errors import DeviceError, counted
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops import layouts
from iree_lnbwd.ops.arguments import (
    Array,
    BoundCall,
    GpuArray,
    Options,
    Results,
    bind_arrays,
    densely,
    results_of,
    results_type,
    variant_of,
)
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import GATE, GRAD_RESIDUAL, OPS, RESIDUAL, Access, Element, Kind, names
from iree_lnbwd.ops.sets import Sets, check_rows_per_set
from iree_lnbwd.ops.spec import TensorType, check_number, check_output_mask
from iree_lnbwd.ops.strides import Strides
from iree_lnbwd.runtime import storage
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.runtime.frameworks.framework import Framework
from iree_lnbwd.runtime.gpu_module import GpuModule, KnownCall
from iree_lnbwd.runtime.host_library import UnservedError
from iree_lnbwd.runtime.host_module import HostModule, HostSequence, address_of
from iree_lnbwd.runtime.iree_module import IreeModule, aligned_empty
from iree_lnbwd.runtime.stream_module import LaunchSequence
from iree_lnbwd.schedules import host_alignment
from iree_lnbwd.vmfb.description import OpenedModule
from iree_lnbwd.vmfb.raw_interface import storage_name, values_of

_log = logging.getLogger(__name__)
_MOST_SMALL = 1 << 17  # elements: more are worth waking threads
_KINDS_KEPT = 1024  # kinds of call (shapes and the like) that are not checked again


class Norm:
    """A module on a device: call it with the arrays, get the results.

    The class of an op, such as `LayerNormBackward`, has the arguments of its call.

    Arrays may be NumPy's, PyTorch's, or any that support DLPack. An array in the device's memory is
    used in place if it is contiguous and its address is a multiple of ``alignment``; otherwise a
    call works on a copy. A module whose spec has ``strided_rows`` uses arrays in place whose rows
    have two strides, too. A module on a GPU takes NumPy arrays too, and copies them.

    On a GPU a call with PyTorch's tensors returns when its kernels are in the queue of PyTorch's
    current stream, and can be captured into a graph. The code of such a call stays loaded until the
    process ends, so that the graph may outlive this object. With other libraries' arrays, or where
    ``iree-lnbwd inspect`` says that calls go through IREE's device, it returns when they are done.

    Any number of threads may call.

    Attributes:
        spec: What it computes.
        target: Name of the target that it was compiled for.
        device: Where it runs.
        alignment: Bytes; the address of a GPU's array must be a multiple of them.
    """

    def __init__(self, module: OpenedModule, device: DeviceUri) -> None:
        """Use `load`, which checks its arguments."""
        described = module.description
        self.spec = described.spec
        self.target = described.target.name
        self.device = device
        self._on_streams = described.launches is not None and device.backend != "cpu"
        self.alignment = (
            layouts.ACCESS_BYTES if self._on_streams else host_alignment(described.schedule)
        )
        self._module = module
        family = self.spec.family
        self._arguments = names(family.arguments)
        storage_names = (storage_name(name) for name in results_type(family)._fields)
        self._with_storage = (*self._arguments, *storage_names)
        self._data = family.data.name
        self._place_of_data = self._arguments.index(self._data)
        self._residual = (GRAD_RESIDUAL if family.is_backward else RESIDUAL).name
        self._options = Options(
            family,
            self.spec.normalized_shape,
            self.spec.output_mask,
            self.spec.weight_offset,
            self.spec.eps or 0.0,
            self.spec.output_dtype,
            grad_input_copy_dtype=self.spec.grad_input_copy_dtype,
            grad_input_sum_dtype=self.spec.grad_input_sum_dtype,
        )
        self._results = tuple(filter(self.spec.has, family.results))
        self._read = names(self.spec.inputs)
        self._types = {r.name: DTYPES[r.dtype].numpy for r in self.spec.results}
        self._known: dict[Hashable, KnownCall] = {}
        name = f"{self.spec.name} for {self.target}"
        self._iree = functools.cache(
            functools.partial(IreeModule, device, module, source=name, alignment=self.alignment)
        )
        if self._on_streams:
            self._gpu  # noqa: B018 - a device that cannot run the module is found out now
        else:
            self._iree()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Computes the op from its arguments; its class says which."""
        raise NotImplementedError

    def _given(self, **given: Any) -> tuple[Any, ...]:
        """The arguments in the order of the op's table, from all that callers may give, by name.

        Raises:
            TypeError, ValueError: The module takes input where output is given, or the reverse, or
                it has no gate where one is given.
        """
        has, got = self.spec.gate is not None, given.get(GATE.name) is not None
        if has != got:
            said = "takes a gate, got None" if has else "has no gate, got one"
            raise ValueError(f"{GATE.name}: this module {said}")
        op = variant_of(OPS[self.spec.op], given, self.spec.gate_first)
        if op.from_output != self.spec.from_output:
            raise ValueError(f"{op.data.name}: this module takes {self._data} in its place")
        return tuple(given.get(name) for name in self._arguments)

    def _call(
        self,
        given: Sequence[Any],
        output_mask: object = None,
        eps: object = None,
        out: object = None,
        rows_per_set: object = 1,
    ) -> Results:
        """Computes a call.

        Args:
            given: The arrays, in the order of the op's table.
            output_mask: None, or the mask that the module was compiled for.
            eps: None, or the eps that the module was compiled for.
            out: An array for each result that the module computes, and None for the others. They
                must be contiguous, or of dense rows with two strides (on a GPU, aligned as well),
                and share no memory with each other or with an argument that is read. Where the
                module's spec has no ``strided_rows``, such rows are computed elsewhere first. None
                makes new arrays of ``input``'s library.
            rows_per_set: Neighbouring rows that take one set of a weight's.

        Returns:
            The results; None for those that the module does not compute. With ``out``, those
                arrays.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected; also if an
                array is on another device.
            DeviceError: The GPU's driver refuses.
        """
        if output_mask is not None or eps is not None:
            self._check_options(output_mask, eps)
        if (run := check_rows_per_set(rows_per_set)) != 1 and not self.spec.weight_sets:
            raise ValueError(
                f"rows_per_set: expected 1, because this module's weight has no sets, got {run}"
            )
        own = None if out is None else storage.named(out, self.spec.family)
        data = given[self._place_of_data]
        framework = interop.on_gpu(self._data, data)
        if framework is not None:
            kind = (
                framework.signature(self._arguments, given)
                if own is None
                else framework.signature(self._with_storage, (*given, *own))
            )
            kind = (kind, run)
            known = self._known.get(kind)
            if known is None:
                views = self._views(framework, given)
                known = self._learnt(kind, framework, views, self._bind(views, run), own)
            return known.run(framework, given, own)
        unplaced = self._bind(self._views(None, given), run)
        if own is None:
            return interop.from_numpy(self.run(self._placed(unplaced)[0]), like=data)
        arrays = storage.checked(None, own, self.spec, self._shapes(unplaced), str(self.device))
        call, moved = self._placed(unplaced, arrays)
        storage.check_apart(
            [storage.extent(name, unplaced.arrays[name]) for name in self._read],
            [
                storage.extent(storage_name(r.name), getattr(arrays, r.name))
                for r in self.spec.results
            ],
        )
        new = {name: np.empty_like(getattr(arrays, name), order="C") for name in moved}
        self.run(call, arrays._replace(**new))
        for name, array in new.items():
            np.copyto(getattr(arrays, name), array)
        return own

    def _placed(
        self, call: BoundCall, out: Results | None = None
    ) -> tuple[BoundCall, Sequence[str]]:
        """A call with its arrays as this module takes them.

        Args:
            call: As `bind_arrays` has it.
            out: The caller's storage, if any.

        Returns:
            Also the results whose storage this module cannot write to.
        """
        named = {} if out is None else {r.name: getattr(out, r.name) for r in self._results}
        strided = [name for name, array in named.items() if not layouts.is_dense(array)]
        if self.spec.strided_rows:
            cells = {r.name: named[r.name] for r in self._results if r.kind is Kind.CELLS and named}
            if (strides := layouts.strides_of(call, cells)) is not None:
                return layouts.placed(call, strides), ()
            call = layouts.placed(call)
        else:
            call = densely(call)
        return call, strided

    def _learnt(
        self,
        kind: Hashable,
        framework: Framework,
        views: Mapping[str, Any],
        unplaced: BoundCall,
        out: Results | None,
    ) -> KnownCall:
        """As `learn`, of arrays as they were given, and of the caller's storage, if any."""
        self._expect_here(unplaced)
        if out is None:
            return self.learn(kind, framework, views, self._placed(unplaced)[0])
        arrays = storage.checked(
            framework, out, self.spec, self._shapes(unplaced), str(self.device)
        )
        call, moved = self._placed(unplaced, arrays)
        there = {r.name: getattr(arrays, r.name) for r in self.spec.results}
        return self.learn(kind, framework, views, call, there, moved)

    def _expect_here(self, call: BoundCall) -> None:
        """Expects a call of arrays on this module's GPU."""
        where = call.arrays[self._data].device
        if where != str(self.device):
            raise ValueError(
                f"{self._data}: this module is on {self.device}, got an array on {where}"
            )

    def learn(
        self,
        kind: Hashable,
        framework: Framework,
        views: Mapping[str, Any],
        call: BoundCall,
        out: Mapping[str, GpuArray] | None = None,
        moved: Collection[str] = (),
    ) -> KnownCall:
        """The kind of a call on a GPU's arrays; a new kind is remembered.

        Args:
            kind: The framework's signature of the arrays, and ``rows_per_set``.
            framework: That of the arrays.
            views: The facts known about the arguments, by name.
            call: The call that they were bound to, for this spec.
            out: Those about the caller's storage, if any, by the results' names.
            moved: The results that are computed elsewhere first.

        Raises:
            TypeError, ValueError: Naming the array, what came and what was expected.
            DeviceError: The GPU is absent.
        """
        if (known := self._known.get(kind)) is not None:
            return known
        self._expect_here(call)
        known = self._gpu.known(framework, views, call, out, moved)
        if len(self._known) >= _KINDS_KEPT:
            self._known.clear()
        self._known[kind] = known
        return known

    def launches(self, rows: int, sets: Sets | None = None) -> LaunchSequence:
        """The launches of a call with M >= 1 rows, for callers who put them on a stream themselves.

        Args:
            rows: M.
            sets: Those of the weight, where it has some.

        Raises:
            DeviceError: The module's device has no streams, or IREE has to run this module.
        """
        sequence = self._gpu.sequence(rows, sets) if self._on_streams else None
        if sequence is None:
            raise DeviceError(f"device: {self.spec.name} has no launches on {self.device}")
        return sequence

    def on_host(
        self, rows: int, sets: Sets | None = None, strides: Strides | None = None
    ) -> HostSequence | None:
        """The launches of a call with M >= 1 rows, for callers who have threads of the CPU for it.

        Args:
            rows: M.
            sets: Those of the weight, where it has some.
            strides: Those of the rows, where the spec has some.

        Returns:
            None where IREE has to run this module; a CPU's module that could be run so is logged.
        """
        return None if self._host is None else self._host.sequence(rows, sets, strides)

    def run(self, call: BoundCall, out: Results | None = None) -> Results:
        """Computes a call on NumPy arrays that ``arguments.bind`` has checked, for this spec."""
        if self.spec.strided_rows and call.strides is None and call.rows:
            call = layouts.placed(call)
        results = {
            name: aligned_empty(shape, self._types[name], self.alignment)
            if out is None
            else getattr(out, name)
            for name, shape in self._shapes(call).items()
        }
        if (rows := call.rows) == 0:
            for result in results.values():
                result.fill(0)  # an empty sum
        else:
            self.fill(
                [call.arrays[name] for name in self._read],
                [self._filled(results[r.name], r, call) for r in self.spec.results],
                call.sets,
                call.strides,
                rows,
            )
        return results_of(self.spec.family, results)

    def fill(
        self,
        inputs: Sequence[Array],
        results: Sequence[Array],
        sets: Sets | None = None,
        strides: Strides | None = None,
        rows: int | None = None,
    ) -> None:
        """Computes into NumPy arrays; nothing is checked.

        Small calls on the CPU run on the calling thread: IREE would take longer to begin one.

        Args:
            inputs: Those of the spec in order, of M >= 1 rows: [M, N], [M] or [N].
            results: As ``inputs``, for the results; they share no memory with other arrays.
            sets: Those of the weight, where it has some: then [G, N] are in place of [N].
            strides: Those of the rows, where the spec has some: then memory is in place of [M, N].
            rows: M; None takes it from the first of the inputs, which has M rows of every op.
        """
        if rows is None:
            rows = len(inputs[0])
        small = rows * self.spec.columns <= _MOST_SMALL
        if small and (host := self._host) is not None:
            arrays = (*inputs, *results)
            if all((flags := array.flags).c_contiguous and flags.aligned for array in arrays):
                host.sequence(rows, sets, strides).run([*map(address_of, arrays)])
                return
        numbers = values_of(self.spec, rows, sets, strides)
        self._iree().run(inputs, results, numbers, has_gaps=self.spec.strided_rows)

    def _filled(self, array: Array, result: TensorType, call: BoundCall) -> Array:
        """A result's memory, as modules take it."""
        dims = result.dims(call.rows, call.sets, call.strides)
        return layouts.memory(array, *dims) if result.is_strided else array.reshape(dims)

    @functools.cached_property
    def _gpu(self) -> GpuModule:
        """The module for arrays that are in the GPU's memory."""
        return GpuModule(self._module, self.device, alignment=self.alignment, iree=self._iree)

    @functools.cached_property
    def _host(self) -> HostModule | None:
        """The module's kernels in this process, if it is for the CPU and states its launches."""
        launches = self._module.description.launches
        if self.device.backend != "cpu" or launches is None:
            return None
        self._iree()  # which refuses what is not for this CPU, before the code is loaded here
        try:
            return HostModule(self.spec, launches, self._module.vmfb)
        except UnservedError as error:
            notices.log(_log, "%s runs on IREE's threads: %s", self.spec.name, error)
            return None

    def _check_options(self, output_mask: object, eps: object) -> None:
        """Expects options that are None, or those that the module was compiled for."""
        spec = self.spec
        mask = (
            None
            if output_mask is None
            else check_output_mask(output_mask, spec.family, has_bias=bool(spec.has_bias))
        )
        number = None if eps is None else check_number(eps)
        for name, asked, ours in (
            ("output_mask", mask, spec.output_mask),
            ("eps", number, spec.eps),
        ):
            if asked is not None and asked != ours:
                raise ValueError(f"{name}: this module was compiled for {ours}, got {asked}")

    def _views(self, framework: Framework | None, given: Sequence[Any]) -> dict[str, Any]:
        return interop.views(framework, dict(zip(self._arguments, given, strict=True)))

    def _bind(self, arrays: Mapping[str, Any], rows_per_set: int) -> BoundCall:
        """The arguments checked against each other, and against what this module computes."""
        read = [s.name for s in self.spec.family.statistics if s.access is Access.READ]
        if read and (arrays[read[0]] is None) != (self.spec.eps is not None):
            said = " and ".join(read)
            raise ValueError(
                f"{read[0]}: this module "
                + (f"takes {said}, got None" if self.spec.eps is None else f"recomputes {said}")
            )
        options = self._options
        if self.spec.weight_sets:
            options = options._replace(rows_per_set=rows_per_set)
        call = bind_arrays(arrays, options)
        self._expect(call)
        return call

    def _shapes(self, call: BoundCall) -> dict[str, tuple[int, ...]]:
        """The shapes of the results, as the caller sees them."""
        return {result.name: call.shape_of(result) for result in self._results}

    def _expect(self, call: BoundCall) -> None:
        """Expects a call for this module's spec, except for fields that a module leaves open."""
        if call.spec is None:  # the gradients that it computes are of what is not there
            missing = "bias" if self.spec.has_bias and not call.has_bias else "weight"
            raise ValueError(f"{missing}: this module takes a {missing}, got None")
        spec, theirs = self.spec, call.spec
        for name, has, got in (
            ("weight", spec.has_weight, theirs.has_weight),
            ("bias", spec.has_bias, theirs.has_bias or (call.has_bias and spec.family.takes_bias)),
            (self._residual, spec.residual_dtype is not None, theirs.residual_dtype is not None),
        ):
            if has != got:
                takes = f"takes a {name}, got None" if has else f"has no {name}, got one"
                raise ValueError(f"{name}: this module {takes}")
        if spec.weight_sets and not theirs.weight_sets:
            dims = ", ".join(map(str, spec.normalized_shape))
            raise ValueError(
                f"weight: this module takes sets, (G, {dims}), got {spec.normalized_shape}"
            )
        for name, ours, got in (
            (self._data, spec.dtype, theirs.dtype),
            ("grad_output", spec.dy_dtype, theirs.dy_dtype),
            ("weight", spec.gamma_dtype, theirs.gamma_dtype),
            *((("bias", spec.beta_dtype, theirs.beta_dtype),) if call.has_bias else ()),
            (
                self._residual,
                spec.element_type(Element.RESIDUAL),
                theirs.element_type(Element.RESIDUAL),
            ),
            (GATE.name, spec.element_type(Element.GATE), theirs.element_type(Element.GATE)),
        ):
            if ours != got:
                raise TypeError(f"{name}: this module was compiled for {ours}, got {got}")
        if spec.grad_outputs != theirs.grad_outputs:
            expected = counted(spec.grad_outputs, "gradient")
            raise ValueError(
                f"grad_output: this module takes {expected} of the output, got "
                f"{theirs.grad_outputs}"
            )
        if spec.rows is not None and spec.rows != call.rows:
            raise ValueError(
                f"{self._data}: this module was compiled for {counted(spec.rows, 'row')}, got "
                f"{call.rows}"
            )
