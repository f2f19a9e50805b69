"""`replace_norms`: a model's norms, computed by this package."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch
from torch import nn

from iree_lnbwd.errors import shown
from iree_lnbwd.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.spec import check_eps
from iree_lnbwd.torch.inductor import switch
from iree_lnbwd.torch.modules import NORMS, check_model
from iree_lnbwd.torch.replacement import classes, probe
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.report import Entry, Report
from iree_lnbwd.torch.replacement.watched import NotPlainError

_WITHOUT_KERNEL = (
    *(nn.GroupNorm, nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm),
    *(nn.LocalResponseNorm, nn.CrossMapLRN2d),
)
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def replace_norms(model: nn.Module, *, also: Collection[type[nn.Module]] = ()) -> Report:
    """Makes the norms of a model compute by this package, in place.

    These are the modules of ``torch.nn.LayerNorm`` and ``torch.nn.RMSNorm``, and of subclasses that
    have their forward. Modules of other classes are tried if ``also`` names their class: each kind
    is run on samples, forward and backward, and is replaced only if it computes a plain norm.
    ``iree_lnbwd.torch.replacement.probe`` says how far its output may be from that. Among them are
    the norms of Llama, Qwen, Mistral, Gemma, T5 and OLMo in transformers, and those of timm:
    ``also=[torch.nn.Module]`` tries all modules.

    A module stays the same object, with the same parameters, hooks, mode and keys in
    ``state_dict``; it may be shared, parametrized, sharded by FSDP2 (before or after), or on the
    meta device. Its class becomes a subclass of its own, so that ``repr(model)`` shows what was
    replaced. Call this before functions that capture modules' methods, and before FSDP1 or ZeRO-3
    take parameters apart. Parameters, eps and dimensions are read at each call; if another
    attribute that a tried module's forward reads changes, the module is what it was before.

    Layer norms have PyTorch's forward, and this package's backward. Of RMS norms, both directions
    are this package's, and are rounded once, after the weight. The element type of the output is
    what it was, under autocast too, and so is its order in memory. What this package's functions do
    not take, and what there is neither a module nor a compiler for, the own forward computes.

    Args:
        model: Its modules are changed.
        also: Further classes, with their subclasses.

    Returns:
        What was replaced, and what was not and why; it prints as a table, and can be undone.

    Raises:
        TypeError: Naming the argument.
    """
    check_model(model)
    switch.place()
    tried = _checked(also)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    found: dict[_Kind, list[probe.Outcome]] = {}
    entries, replaced = [], []
    for module, its_names in names.items():
        outcome = _form_or_reason(module, tried, found)
        if isinstance(outcome, str) and not _is_of_interest(module, tried):
            continue
        norm, reason = (str(outcome), None) if isinstance(outcome, Form) else (None, outcome)
        entries.append(Entry(tuple(its_names), type(module).__name__, norm, reason))
        if isinstance(outcome, Form):
            classes.replace(module, outcome)
            replaced.append(weakref.ref(module))
    return Report(tuple(entries), tuple(replaced))


def _checked(also: object) -> tuple[type[nn.Module], ...]:
    given = tuple(also) if isinstance(also, Collection) and not isinstance(also, str) else (also,)
    for one in given:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"also: expected classes of modules, got {shown(one)}")
    return given


def _is_of_interest(module: nn.Module, tried: tuple[type[nn.Module], ...]) -> bool:
    """Whether the report says why a module was not replaced: a user would take it for a norm."""
    named = tuple(cls for cls in tried if cls is not nn.Module)
    is_one = isinstance(module, (nn.LayerNorm, nn.RMSNorm, *named))
    is_leaf = not any(True for _ in module.children())
    return is_one or (is_leaf and "norm" in classes.own_class(module).__name__.lower())


# Of a class, and of the shapes of its modules' parameters.
_Kind = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...] | None], ...]]


def _without_kernel(module: nn.Module, own: type[nn.Module]) -> str | None:
    """Why there is no kernel for a norm of PyTorch's; None if there is, or if it is another's."""
    if any(own.forward is theirs.forward for theirs in _WITHOUT_KERNEL):
        return f"there is no kernel for {own.__name__}"
    if own.forward is nn.RMSNorm.forward and module.eps is not None:
        is_wide = module.weight is not None and module.weight.dtype == torch.float64
        try:
            check_eps(module.eps, "f64" if is_wide else "f32")
        except (TypeError, ValueError) as error:
            return str(error)
    return None


def _form_or_reason(
    module: nn.Module, tried: tuple[type[nn.Module], ...], found: dict[_Kind, list[probe.Outcome]]
) -> Form | str:
    """A module's form, or why it is not replaced."""
    if isinstance(module, (*NORMS, classes.ReplacedNorm)):
        return "it is one of iree-lnbwd already"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript compiled it"
    if classes.sets_its_forward(module):
        return "its forward is set on the module itself"
    own = classes.own_class(module)
    if (why := _without_kernel(module, own)) is not None:
        return why
    if own.forward is nn.LayerNorm.forward:
        dims = module.normalized_shape
        return Form(LAYER_NORM, dims, None, "eps", "weight", "bias", shape_name="normalized_shape")
    if own.forward is nn.RMSNorm.forward:
        dims = module.normalized_shape
        return Form(
            RMS_NORM, dims, None, "eps", "weight", argument="x", shape_name="normalized_shape"
        )
    if not issubclass(own, tried):
        return "its class has its own forward; name it in `also` to have it tried"
    try:
        shapes = probe.check(module)
    except NotPlainError as error:
        return str(error)
    outcomes = found.setdefault((own, tuple(shapes.items())), [])
    outcome = next((each for each in outcomes if each.holds_of(module)), None)
    if outcome is None:
        outcome = probe.find(module, shapes)
        outcomes.append(outcome)
    return outcome.form or outcome.reason or ""
