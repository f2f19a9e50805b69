"""Where the pass stands: in inductor's configuration, after the passes that are there."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph

from iree_lnbwd.torch.inductor import backwards, forwards, pytorchs
from iree_lnbwd.torch.inductor.state import STATE, Folded
from iree_lnbwd.version import __version__

_NAME = "post_grad_custom_post_pass"
_Pass = Callable[[Graph], None]


class NormPass(CustomGraphPass):
    """Our pass. There is one in a process, which copies and pickles as itself."""

    def __call__(self, graph: Graph) -> None:
        """Changes what surrounds norms of ours; any other graph stays as it is."""
        if not STATE.is_on:
            return
        apart, summed = forwards.lower(graph, select_decomp_table)
        narrow = backwards.lower(graph, select_decomp_table)
        added, cast = backwards.fold(graph)
        found = Folded(apart, summed + added, cast, narrow)
        if any(found):
            stable_topological_sort(graph)
            STATE.add(found)

    def uuid(self) -> Hashable:
        """The package, the pass as it is written, and what of PyTorch's stays whole."""
        changes = (_digest(), pytorchs.kept()) if STATE.is_on else ()
        return ("iree_lnbwd", __version__, *changes)

    def __reduce__(self) -> str:
        return "PASS"

    def __repr__(self) -> str:
        """Without an address: inductor hashes its configuration as text."""
        return "iree_lnbwd.torch.inductor.placing.PASS"


PASS = NormPass()


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
    """Puts the pass into the configuration, after what is there.

    It becomes the default, because other threads see no more than that: inductor compiles
    backwards in autograd's.
    """
    _keep_pytorchs()
    config._config[_NAME].default = PASS
    passes = _passes()
    if PASS in passes:
        return
    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    one: Any = PASS
    if passes:
        one = (*passes, PASS) if takes_several else _Chain(*passes, PASS)
    setattr(config, _NAME, one)


@functools.cache
def _keep_pytorchs() -> None:
    pytorchs.keep(lambda: STATE.is_on and is_placed())


def is_placed() -> bool:
    """Whether graphs that are compiled now go through the pass."""
    return PASS in _passes()


def observe() -> None:
    """Notes if graphs that are compiled now do not go through the pass."""
    if not is_placed():
        STATE.displaced_by = others()


def others() -> tuple[str, ...]:
    """The names of the other passes there."""
    return tuple(
        getattr(each, "__qualname__", type(each).__qualname__)
        for each in _passes()
        if each is not PASS
    )


def _passes() -> tuple[_Pass, ...]:
    found = getattr(config, _NAME)
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
