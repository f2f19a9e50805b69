"""The op on a device: a loaded module, to be called with arrays of any library."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from iree_lnbwd.arguments import (
    ARGUMENTS,
    BoundCall,
    LayerNormGrads,
    Options,
    bind_arrays,
)
from iree_lnbwd.description import OpenedModule
from iree_lnbwd.devices import DeviceUri
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.operands import BACKWARD
from iree_lnbwd.runtime import storage
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.runtime.frameworks.framework import Framework
from iree_lnbwd.runtime.gpu_module import GpuModule, KnownCall
from iree_lnbwd.runtime.iree_module import IreeModule, aligned_empty
from iree_lnbwd.runtime.stream_module import ACCESS_BYTES
from iree_lnbwd.schedules import host_alignment
from iree_lnbwd.spec import GRADIENTS, check_eps, check_output_mask

_KINDS_KEPT = 1024  # kinds of call (shapes and the like) that are not checked again


class LayerNormBackward:
    """A module on a device: call it with the arrays, get the gradients.

    Arrays may be NumPy's, PyTorch's, or any that support DLPack. An array in the device's memory is
    used in place if it is contiguous and its address is a multiple of `alignment`; otherwise a call
    works on a copy. A module on a GPU takes NumPy arrays too, and copies them.

    On a GPU a call with PyTorch's tensors returns when its kernels are in the queue of PyTorch's
    current stream, and can be captured into a graph. With other libraries' arrays, or where
    `iree-lnbwd inspect` says that calls go through IREE's device, it returns when they are done.

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
        self._on_streams = described.launches is not None
        self.alignment = ACCESS_BYTES if self._on_streams else host_alignment(described.schedule)
        self._module = module
        self._options = Options(
            self.spec.normalized_shape, self.spec.output_mask, self.spec.eps or 0.0
        )
        self._results = tuple(filter(self.spec.has, BACKWARD.results))
        self._types = {r.name: DTYPES[r.dtype].numpy for r in self.spec.results}
        self._known: dict[Hashable, KnownCall] = {}
        source = f"{self.spec.name} for {self.target}"
        self._iree = functools.cache(
            functools.partial(IreeModule, device, module, source=source, alignment=self.alignment)
        )
        if self._on_streams:
            self._gpu  # noqa: B018 - a device that cannot run the module is found out now
        else:
            self._iree()

    def __call__(
        self,
        grad_output: Any,
        input: Any,
        mean: Any = None,
        rstd: Any = None,
        weight: Any = None,
        bias: Any = None,
        output_mask: tuple[bool, bool, bool] | None = None,
        *,
        eps: float | None = None,
        out: LayerNormGrads | Sequence[Any] | None = None,
    ) -> LayerNormGrads:
        """Computes the gradients that the module was compiled for.

        The arguments are those of `iree_lnbwd.layer_norm_backward` without ``normalized_shape``.

        Args:
            grad_output: [..., *normalized_shape]
            input: [..., *normalized_shape]
            mean: [...], with or without trailing dimensions of 1; None if it is recomputed.
            rstd: As ``mean``.
            weight: [*normalized_shape]; None if the module has none.
            bias: [*normalized_shape] or None; only its element type matters.
            output_mask: None, or the mask that the module was compiled for.
            eps: None, or the eps that the module was compiled for.
            out: Three arrays to write the gradients to, with None for each gradient that the
                module does not compute. They must be contiguous (on a GPU, aligned as well), and
                share no memory with each other or with an argument that is read. None makes new
                arrays of ``input``'s library.

        Returns:
            The gradients; None for those that the module does not compute. With ``out``, those
                arrays.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected; also if an
                array is on another device.
            DeviceError: The GPU's driver refuses.
        """
        given = (grad_output, input, mean, rstd, weight, bias)
        if output_mask is not None or eps is not None:
            self._check_options(output_mask, eps)
        own = None if out is None else storage.three(out)
        framework = interop.on_gpu("input", input)
        if framework is not None:
            kind = framework.signature(given if own is None else (*given, *own))
            known = self._known.get(kind)
            if known is None:
                views = self._views(framework, given)
                known = self.learn(kind, framework, views, self._bind(views), own)
            return known.run(framework, given, own)
        call = self._bind(self._views(None, given))
        if own is None:
            return interop.from_numpy(self.run(call), like=input)
        arrays = storage.checked(None, own, self.spec, self._shapes(call), str(self.device))
        storage.check_apart(
            [storage.extent(given.name, call.arrays[given.name]) for given in self.spec.inputs],
            [storage.extent(f"out.{r.name}", getattr(arrays, r.name)) for r in self.spec.results],
        )
        self.run(call, arrays)
        return own

    def learn(
        self,
        kind: Hashable,
        framework: Framework,
        views: Mapping[str, Any],
        call: BoundCall,
        out: LayerNormGrads | None = None,
    ) -> KnownCall:
        """The kind of a call on a GPU's arrays; a new kind is remembered.

        Args:
            kind: The framework's signature of the arrays.
            framework: That of the arrays.
            views: The facts known about the arguments, by name.
            call: The call that they were bound to, for this spec.
            out: The caller's storage for the gradients, if any.

        Raises:
            TypeError, ValueError: Naming the array, what came and what was expected.
            DeviceError: The GPU is absent.
        """
        if (known := self._known.get(kind)) is not None:
            return known
        where = call.arrays["input"].device
        if where != str(self.device):
            raise ValueError(f"input: this module is on {self.device}, got an array on {where}")
        if out is not None:
            storage.checked(framework, out, self.spec, self._shapes(call), str(self.device))
        known = self._gpu.known(framework, views, call)
        if len(self._known) >= _KINDS_KEPT:
            self._known.clear()
        self._known[kind] = known
        return known

    def run(self, call: BoundCall, out: LayerNormGrads | None = None) -> LayerNormGrads:
        """Computes a call on NumPy arrays that `arguments.bind` has checked, for this spec."""
        gradients = {
            name: aligned_empty(shape, self._types[name], self.alignment)
            if out is None
            else getattr(out, name)
            for name, shape in self._shapes(call).items()
        }
        if call.rows == 0:
            for gradient in gradients.values():
                gradient.fill(0)  # an empty sum
        else:
            self._iree().run(
                [call.arrays[given.name] for given in self.spec.inputs],
                [gradients[r.name].reshape(r.dims(call.rows)) for r in self.spec.results],
            )
        return LayerNormGrads(*map(gradients.get, GRADIENTS))

    @functools.cached_property
    def _gpu(self) -> GpuModule:
        """The module for arrays that are in the GPU's memory."""
        return GpuModule(self._module, self.device, alignment=self.alignment, iree=self._iree)

    def _check_options(self, output_mask: object, eps: object) -> None:
        """Expects options that are None, or those that the module was compiled for."""
        mask = None if output_mask is None else check_output_mask(output_mask)
        number = None if eps is None else check_eps(eps)
        for name, asked, ours in (
            ("output_mask", mask, self.spec.output_mask),
            ("eps", number, self.spec.eps),
        ):
            if asked is not None and asked != ours:
                raise ValueError(f"{name}: this module was compiled for {ours}, got {asked}")

    def _views(self, framework: Framework | None, given: Sequence[Any]) -> dict[str, Any]:
        return interop.views(framework, dict(zip(ARGUMENTS, given, strict=True)))

    def _bind(self, arrays: Mapping[str, Any]) -> BoundCall:
        """The arguments checked against each other, and against what this module computes."""
        mean = arrays["mean"]
        if (mean is None) != (self.spec.eps is not None):
            raise ValueError(
                "mean: this module "
                + ("takes mean and rstd, got None" if mean is None else "recomputes mean and rstd")
            )
        call = bind_arrays(arrays, self._options)
        self._expect(call)
        return call

    def _shapes(self, call: BoundCall) -> dict[str, tuple[int, ...]]:
        """The shapes of the gradients, as the caller sees them."""
        return {result.name: call.shape_of(result) for result in self._results}

    def _expect(self, call: BoundCall) -> None:
        """Expects a call for this module's spec, except for fields that a module leaves open."""
        if call.spec is None:
            raise ValueError("weight: this module takes a weight, got None")
        spec, theirs = self.spec, call.spec
        if theirs.has_weight != spec.has_weight:
            takes = "takes a weight, got None" if spec.has_weight else "has no weight, got one"
            raise ValueError(f"weight: this module {takes}")
        for name, ours, got in (
            ("input", spec.dtype, theirs.dtype),
            ("grad_output", spec.dy_dtype, theirs.dy_dtype),
            ("weight", spec.gamma_dtype, theirs.gamma_dtype),
            *((("bias", spec.beta_dtype, theirs.beta_dtype),) if call.has_bias else ()),
        ):
            if ours != got:
                raise TypeError(f"{name}: this module was compiled for {ours}, got {got}")
        if spec.rows is not None and spec.rows != call.rows:
            raise ValueError(
                f"input: this module was compiled for {spec.rows} rows, got {call.rows}"
            )
