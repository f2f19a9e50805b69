"""The op as a function: compiles on first use, then runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from iree_lnbwd import runtime
from iree_lnbwd.arguments import DEFAULT_EPS, Array, LayerNormGrads, bind
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.runtime import LayerNormBackward
from iree_lnbwd.spec import LayerNormSpec

_LOADED_MODULES = 64


def layer_norm_backward(
    grad_output: Array,
    input: Array,
    normalized_shape: int | Sequence[int],
    mean: Array | None = None,
    rstd: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    *,
    eps: float = DEFAULT_EPS,
    device: str | None = None,
) -> LayerNormGrads:
    """Gradients of layer normalization with respect to its input, weight and bias.

    The arguments are those of ``aten::native_layer_norm_backward``. Element types are f32, f16,
    bf16 (``ml_dtypes.bfloat16``) and f64; f64 does not mix with the others. Sums are in f32 (f64
    for f64). The formula is in ``ir/README.md``.

    The first call for a spec and device compiles it (about a second) and keeps the module in an
    on-disk cache, ``$IREE_LNBWD_CACHE``.

    Args:
        grad_output: [..., *normalized_shape], the gradient that reached the output.
        input: [..., *normalized_shape], any number of rows, zero too.
        normalized_shape: The trailing dimensions that were normalized.
        mean: [...], with or without trailing ones, f32 (f64 for f64 data). Taken as it is. None,
            with ``rstd``, recomputes both from ``input``.
        rstd: As ``mean``: 1 / sqrt(biased variance + eps).
        weight: [*normalized_shape]; None means ones, and no ``grad_weight``.
        bias: [*normalized_shape]; only its element type matters, to ``grad_bias``.
        output_mask: Which of the three gradients to compute.
        eps: Used where the statistics are recomputed; finite.
        device: IREE device URI: "local-task" (the CPU; the default), "cuda", "hip", "cuda://1".

    Returns:
        The gradients, in new arrays; None where not asked for.

    Raises:
        TypeError, ValueError: Before anything is compiled or run, naming the argument, what came
            and what was expected.
        DeviceError: The device is absent or no target fits it.
        CompileError: The compiler is missing or failed.
    """
    uri = DeviceUri.parse(device or DEFAULT_DEVICE)
    call = bind(grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, eps)
    if call.spec is None:
        return LayerNormGrads(None, None, None)
    return loaded(call.spec, uri).run(call)


@functools.lru_cache(maxsize=_LOADED_MODULES)
def loaded(spec: LayerNormSpec, uri: DeviceUri) -> LayerNormBackward:
    """The module for a spec on a device, compiled where it was not yet, loaded once."""
    from iree_lnbwd import cache  # the compiler is not needed to import the package

    vmfb, manifest = cache.build(spec, target_of(uri))
    return runtime.load_built(vmfb, manifest, str(uri))
