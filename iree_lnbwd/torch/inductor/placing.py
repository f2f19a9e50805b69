"""Where the passes stand: in inductor's configuration, after the passes that are there."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph

from iree_lnbwd.torch.inductor import (
    backwards,
    forwards,
    modulations,
    pytorchs,
    served,
    widened,
)
from iree_lnbwd.torch.inductor.state import STATE, Folded
from iree_lnbwd.version import __version__

_Pass = Callable[[Graph], None]


class _OurPass(CustomGraphPass):
    """A pass of ours. There is one of each in a process, which copies and pickles as itself."""

    def __init__(self, name: str, change: Callable[[Graph], Folded]) -> None:
        self._name, self._change = name, change

    def __call__(self, graph: Graph) -> None:
        """Changes what surrounds norms of ours; any other graph stays as it is."""
        if STATE.is_on and any(found := self._change(graph)):
            stable_topological_sort(graph)
            STATE.add(found)

    def uuid(self) -> Hashable:
        """The package, the passes as they are written, what stays whole, and modules there."""
        changes = (_digest(), pytorchs.kept(), served.there()) if STATE.is_on else ()
        return ("iree_lnbwd", __version__, *changes)

    def __reduce__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        """Without an address: inductor hashes its configuration as text."""
        return f"{__name__}.{self._name}"


def _step(graph: Graph) -> Folded:
    """Norms of rows that were widened, and norms whose output is scaled, of a whole step.

    That is before inductor decides what a backward keeps: now it can keep rows as they were.
    """
    apart = forwards.lower_widened(graph, select_decomp_table)
    narrow = backwards.lower_widened(graph, select_decomp_table)
    scales = modulations.fold(graph)
    return Folded(forwards=apart, casts=widened.fold(graph), backwards=narrow, scales=scales)


def _all(graph: Graph) -> Folded:
    """All norms, of a forward or a backward."""
    apart, summed = forwards.lower(graph, select_decomp_table)
    narrow = backwards.lower(graph, select_decomp_table)
    added, cast, sums = backwards.fold(graph)
    return Folded(apart, summed + added, cast, narrow, sums=sums)


JOINT_PASS, PASS = _OurPass("JOINT_PASS", _step), _OurPass("PASS", _all)
_PLACES = MappingProxyType(
    {"joint_custom_pre_pass": JOINT_PASS, "post_grad_custom_post_pass": PASS}
)


class _Chain(CustomGraphPass):
    """Passes in turn, for a PyTorch that takes only one."""

    def __init__(self, *passes: _Pass) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        """All of them."""
        for each in self.passes:
            each(graph)

    def uuid(self) -> Hashable | None:
        """Of all; None if one of them has none, which keeps graphs out of the caches."""
        uuids = tuple(
            each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes
        )
        return None if None in uuids else uuids


def place() -> None:
    """Puts the passes into the configuration, after what is there.

    They become the defaults, because other threads see no more than those: inductor compiles
    backwards in autograd's.
    """
    _keep_pytorchs()
    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    for name, ours in _PLACES.items():
        config._config[name].default = ours
        passes = _passes(name)
        if ours in passes:
            continue
        one: Any = ours
        if passes:
            one = (*passes, ours) if takes_several else _Chain(*passes, ours)
        setattr(config, name, one)


@functools.cache
def _keep_pytorchs() -> None:
    pytorchs.keep(lambda: STATE.is_on and is_placed())


def is_placed() -> bool:
    """Whether graphs that are compiled now go through the passes."""
    return all(ours in _passes(name) for name, ours in _PLACES.items())


def observe() -> None:
    """Notes if graphs that are compiled now do not go through the passes."""
    if not is_placed():
        STATE.displaced_by = others()


def others() -> tuple[str, ...]:
    """The names of the other passes there."""
    return tuple(
        getattr(each, "__qualname__", type(each).__qualname__)
        for name, ours in _PLACES.items()
        for each in _passes(name)
        if each is not ours
    )


def _passes(name: str) -> tuple[_Pass, ...]:
    found = getattr(config, name)
    if isinstance(found, _Chain):
        return found.passes
    if isinstance(found, list | tuple):
        return tuple(found)
    return () if found is None else (found,)


@functools.cache
def _digest() -> str:
    """Of this folder's text: a graph in a cache was made by it."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
