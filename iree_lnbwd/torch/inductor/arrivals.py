"""Acts once a module has been imported, by whomever."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_importing = threading.local()


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Calls a function at once if a module is there, and else after it was imported.

    Args:
        name: Of the module.
        act: The function; it must not raise. Waiting twice for the same is as good as once.
    """
    waiting = _Waiting(name, act)
    if waiting in sys.meta_path:
        return
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
    else:
        sys.meta_path.insert(0, waiting)


class _Waiting(MetaPathFinder):
    """Finds the module as the other finders do, and adds a call after its import."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Waiting) and (self._name, self._act) == (other._name, other._act)

    def __hash__(self) -> int:
        return hash((self._name, self._act))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of the module alone."""
        if fullname != self._name or getattr(_importing, "name", None) == fullname:
            return None
        _importing.name = fullname  # the other finders are asked now
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            _importing.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec

    def _then(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


class _Loader(Loader):
    """A module's loader, and a call after it."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # what reads sources asks it
        self._loader.exec_module(module)
        self._then()
