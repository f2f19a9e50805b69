"""`replace_norms`: a model's norms, computed by this package."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils import parametrize

from iree_lnbwd.errors import shown
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.ops.spec import check_eps
from iree_lnbwd.torch import supported
from iree_lnbwd.torch.functions import check_output_dtype
from iree_lnbwd.torch.inductor import switch
from iree_lnbwd.torch.modules import NORMS, check_model
from iree_lnbwd.torch.replacement import classes, probe
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.modulated import ReplacedWrapper
from iree_lnbwd.torch.replacement.report import Entry, Report
from iree_lnbwd.torch.replacement.watched import NotPlainError
from iree_lnbwd.torch.replacement.wrappers import modulation_of

# Of PyTorch's own, and by their names of others'.
_WITHOUT_KERNEL = (
    *(nn.GroupNorm, nn.modules.batchnorm._NormBase),
    *(nn.LocalResponseNorm, nn.CrossMapLRN2d),
)
_NAMED_WITHOUT_KERNEL = re.compile(
    r"(group|batch|instance|response|spectral|weight)_?norm|grn$|evonorm", re.IGNORECASE
)
_CALLED_NORMS = re.compile(r"norm(?!\w*(mlp|head|block|layer|embed))\w{0,8}$|grn$", re.IGNORECASE)
_KNOWN = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_NOT_NORMS = (nn.Identity, nn.modules.dropout._DropoutNd)


def replace_norms(
    model: nn.Module,
    *,
    only: Collection[type[nn.Module]] = (nn.Module,),
    dtypes: Collection[torch.dtype] | None = None,
    output_dtype: torch.dtype | str | None = None,
) -> Report:
    """Makes the norms of a model compute by this package, in place.

    A module is a norm by what it computes. Those of ``torch.nn.LayerNorm`` and
    ``torch.nn.RMSNorm``, and of subclasses that have their forward, are known. Each kind of other
    modules is run on samples, forward and backward, once it was seen on tensors without memory that
    this changes nothing, draws no random numbers and asks no other process. It is replaced only if
    it computes a layer norm, an RMS norm or an L2 norm. ``iree_lnbwd.torch.replacement.probe`` says
    how far its output may be from that.

    A module stays the same object, with the same parameters, hooks, mode and keys in
    ``state_dict``; it may be shared, parametrized, sharded by FSDP2 (before or after), or on the
    meta device. Its class becomes a subclass of its own, so that ``repr(model)`` shows what was
    replaced. Call this before functions that capture modules' methods, and before FSDP1 or ZeRO-3
    take parameters apart. Parameters, eps and dimensions are read at each call; if another
    attribute that a tried module's forward reads changes, the module is what it was before.

    A module that multiplies what such a norm in it returns by a factor for each sample, and adds a
    shift, does so by one kernel: AdaLN of diffusion transformers. It runs its own forward, and the
    norm's output is computed where it is used: see ``iree_lnbwd.torch.replacement.modulated``.

    Layer norms have PyTorch's forward, and this package's backward. Of RMS norms, both directions
    are this package's, and are rounded once, after the weight. The element type of the output is
    what it was, under autocast too, and so is its order in memory. What this package's functions do
    not take, what a kind was not found to be a norm for, and what there is neither a module nor a
    compiler for, the own forward computes.

    Args:
        model: Its modules are changed.
        only: Modules of these classes and of their subclasses. Others stay what they are.
        dtypes: The element types that the model will use, of f32, f16, bf16 and f64. None means
            those of its parameters, and autocast's if that is on. Modules have to be norms for
            these. For others they are the norms or what they were, each as it was found to be.
        output_dtype: Of the outputs of what is replaced, as `layer_norm` takes it: bf16 for norms
            of a stream in f32 whose readers are in bf16, or "autocast". None means what it was.

    Returns:
        What was replaced, and what was not and why; it prints as a table, and can be undone.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_model(model)
    check_output_dtype(output_dtype)
    asked = _checked_classes(only)
    used = _used(model) if dtypes is None else _checked_types(dtypes)
    of_weights = {inner for module in model.modules()
                  if isinstance(module, parametrize.ParametrizationList)
                  for inner in module.modules()}  # fmt: skip
    switch.place()
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module not in of_weights:  # such a module's input is a parameter
            names.setdefault(module, []).append(name)
    found: dict[_Kind, list[probe.Outcome]] = {}
    entries: dict[nn.Module, Entry] = {}
    forms: dict[nn.Module, Form] = {}
    for module, its_names in names.items():
        own = classes.own_class(module)
        outcome = _outcome(module, own, asked, used, found)
        if outcome.form is None and not _is_of_interest(module, its_names, asked):
            continue
        form = None if outcome.form is None else replace(outcome.form, output_dtype=output_dtype)
        norm, reason = (None, outcome.reason) if form is None else (str(form), None)
        by_enable = outcome.calls_pytorchs
        entries[module] = Entry(tuple(its_names), type(module).__name__, norm, reason, by_enable)
        if form is not None:
            classes.replace(module, form)
            forms[module] = form
    for module, its_names in names.items():
        if module in forms or not any(child in forms for child in module.children()):
            continue
        own = classes.own_class(module)
        if _is_pytorchs(own) or _why_not(module, own, asked) is not None:
            continue
        if (modulation := modulation_of(module, forms)) is not None:
            entries[module] = Entry(
                tuple(its_names), type(module).__name__, str(modulation), None, is_wrapper=True
            )
            classes.replace(module, modulation, ReplacedWrapper)
    listed = [module for module in names if module in entries]
    return Report(
        tuple(entries[module] for module in listed),
        tuple(weakref.ref(module) for module in listed if entries[module].norm is not None),
    )


def _checked_classes(only: object) -> tuple[type[nn.Module], ...]:
    given = tuple(only) if isinstance(only, Collection) and not isinstance(only, str) else (only,)
    for one in given:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"only: expected classes of modules, got {shown(one)}")
    return given


def _checked_types(dtypes: object) -> frozenset[torch.dtype]:
    is_many = isinstance(dtypes, Collection) and not isinstance(dtypes, str)
    given = tuple(dtypes) if is_many else (dtypes,)  # type: ignore[arg-type]
    for one in given:
        if not isinstance(one, torch.dtype):
            raise TypeError(f"dtypes: expected types of torch, got {shown(one)}")
        if one not in supported.DTYPES:
            expected = ", ".join(map(str, supported.DTYPES))
            raise ValueError(f"dtypes: expected some of {expected}, got {one}")
    return frozenset(given)


def _used(model: nn.Module) -> frozenset[torch.dtype]:
    """The element types that a model uses, as it is now."""
    of_parameters = {p.dtype for p in model.parameters()}
    of_autocast = {
        torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }
    return frozenset((of_parameters | of_autocast) & {*supported.DTYPES})


def _is_of_interest(
    module: nn.Module, names: Collection[str], asked: tuple[type[nn.Module], ...]
) -> bool:
    """Whether the report says why a module was not replaced: a user would take it for a norm."""
    own = classes.own_class(module)
    if issubclass(own, _NOT_NORMS):
        return False
    named = tuple(cls for cls in asked if cls is not nn.Module)
    if issubclass(own, (nn.LayerNorm, nn.RMSNorm, *named)) or _CALLED_NORMS.search(own.__name__):
        return True
    is_leaf = not any(True for _ in module.children())
    called = any("norm" in name.rpartition(".")[2].lower() for name in names)
    return called and is_leaf and not _is_pytorchs(own)


def _is_pytorchs(own: type[nn.Module]) -> bool:
    """Whether a class has a forward of ``torch.nn``."""
    forward = inspect.getattr_static(own, "forward", None)
    return (getattr(forward, "__module__", None) or "").startswith(("torch.nn.", "torch.ao."))


# Of a class, and of the shapes of its modules' parameters.
_Kind = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...] | None], ...]]


def _outcome(
    module: nn.Module,
    own: type[nn.Module],
    asked: tuple[type[nn.Module], ...],
    dtypes: frozenset[torch.dtype],
    found: dict[_Kind, list[probe.Outcome]],
) -> probe.Outcome:
    """A module's form, or why it is not replaced."""
    if isinstance(module, torch.jit.ScriptModule):
        return probe.Outcome(None, "TorchScript compiled it", {})
    is_known = own.forward in _KNOWN
    if (why := _why_not(module, own, asked)) is not None:
        return probe.Outcome(None, why, {}, is_known)
    if is_known:
        dims, is_layer_norm = module.normalized_shape, own.forward is nn.LayerNorm.forward
        form = Form(
            LAYER_NORM if is_layer_norm else RMS_NORM, dims, None, "eps", "weight",
            "bias" if is_layer_norm else None, argument="input" if is_layer_norm else "x",
            shape_name="normalized_shape",
        )  # fmt: skip
        return probe.Outcome(form, None, {}, True)
    try:
        shapes = probe.check(module)
    except NotPlainError as error:
        return probe.Outcome(None, _plainly(own, str(error)), {})
    outcomes = found.setdefault((own, tuple(shapes.items())), [])
    outcome = next((each for each in outcomes if each.holds_of(module)), None)
    if outcome is None:
        outcome = probe.find(module, shapes, dtypes)
        if outcome.reason is not None:
            outcome = outcome._replace(reason=_plainly(own, outcome.reason))
        outcomes.append(outcome)
    return outcome


def _why_not(
    module: nn.Module, own: type[nn.Module], asked: tuple[type[nn.Module], ...]
) -> str | None:
    """Why a module is not even tried; None if it is, or is known."""
    if isinstance(module, (*NORMS, classes.ReplacedNorm)):
        return "it is one of iree-lnbwd already"
    if classes.sets_its_forward(module):
        return "its forward is set on the module itself"
    if issubclass(own, _WITHOUT_KERNEL):
        return f"{own.__name__}: no kernel"
    if not issubclass(own, asked):
        return "its class is not in `only`"
    if own.forward is nn.RMSNorm.forward and module.eps is not None:
        is_wide = module.weight is not None and module.weight.dtype == torch.float64
        try:
            check_eps(module.eps, "f64" if is_wide else "f32")
        except (TypeError, ValueError) as error:
            return str(error)
    return "it is no norm" if _is_pytorchs(own) and own.forward not in _KNOWN else None


def _plainly(own: type[nn.Module], reason: str) -> str:
    """Of a class whose name says what it is, why that was not found to be one of our norms."""
    return f"{own.__name__}: no kernel" if _NAMED_WITHOUT_KERNEL.search(own.__name__) else reason
