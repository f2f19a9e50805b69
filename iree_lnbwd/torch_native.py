"""Builds ``torch_native.cpp``, the operators of `iree_lnbwd.torch` in C++, and tells it of calls.

It takes a C++ compiler and ninja, once for a version of PyTorch, as ``torch.compile`` takes a C
compiler for the launchers of its kernels. Without them the operators stay in Python: they do the
same, and cost the host more.
"""

from __future__ import annotations

import atexit
import functools
import logging
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from iree_lnbwd import cache
from iree_lnbwd.artifact import digest
from iree_lnbwd.gpu_driver import Graph
from iree_lnbwd.runtime import LayerNormBackward
from iree_lnbwd.spec import GRADIENTS

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O2",)
# The C++ names of a call's pointers, before those of its scratch.
_POINTERS = ("grad_output", "input", "mean", "rstd", "weight", *GRADIENTS)
# The fields of Driver in C++, which is given no more of them than a call takes.
_FUNCTIONS: tuple[str, ...] = ("get", "push", "pop", "launch")
_GRAPH_FUNCTIONS = ("captures", "set", "run")
_KINDS_KEPT = 4096

_log = logging.getLogger(__name__)
_remembered: set[Kind] = set()
_modules: set[LayerNormBackward] = set()  # whose kernels C++ may launch
_graphs: dict[Graph, Graph] = {}  # by the one that `LayerNormBackward` uses for the same kernels
_remembering = threading.Lock()


@functools.cache
def load() -> bool:
    """Loads the C++ operators, which from then on run in place of the Python ones.

    The first time on a machine they are compiled, which takes ten to twenty seconds, is logged and
    is kept in the cache on disk.

    Returns:
        Whether they are there. If not, a warning was logged that says why.
    """
    version = (torch.__version__, str(torch.version.git_version))
    key = "\n".join((_SOURCE.read_text(), *_FLAGS, *version))
    library = cache.directory() / "torch" / digest(key.encode())[:16] / "iree_lnbwd_torch.so"
    try:
        if library.exists():
            torch.ops.load_library(library)
        else:
            _log.warning("compiling %s for PyTorch %s", _SOURCE.name, torch.__version__)
            _build_and_load(library)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        _log.warning("the operators run in Python, for those in C++ cannot be had: %s", error)
        return False
    return True


def _build_and_load(library: Path) -> None:
    from torch.utils import cpp_extension  # takes setuptools, which only this needs

    library.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own: processes that build it at the same time do not meet.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        cpp_extension.load(
            library.stem,
            [str(_SOURCE)],
            extra_cflags=list(_FLAGS),
            build_directory=folder,
            is_python_module=False,
        )
        (Path(folder) / library.name).replace(library)


class Kind(NamedTuple):
    """What calls have in common that launch the same kernels.

    Attributes:
        device: Of all tensors.
        rows: M.
        columns: N.
        grad_output: Its element type.
        input: The same of it.
        weight: None where there is none.
        bias: None where there is none.
        output_mask: As the caller gave it.
    """

    device: torch.device
    rows: int
    columns: int
    grad_output: torch.dtype
    input: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    output_mask: tuple[bool, bool, bool]


def remember(kind: Kind, module: LayerNormBackward) -> None:
    """Has the C++ operators launch a module's kernels by themselves for calls of a kind.

    Args:
        kind: What is known of the calls.
        module: Their module, which is kept. One that IREE's device runs stays with Python.
    """
    with _remembering:
        if kind in _remembered:
            return
        if len(_remembered) >= _KINDS_KEPT:  # another thread may be in such a call: modules stay
            torch.ops.iree_lnbwd.forget()
            _remembered.clear()
        _remembered.add(kind)
        _modules.add(module)
        if (call := module.stream_call(kind.rows)) is None:
            return
        places = {name: place for place, name in enumerate((*_POINTERS, *call.scratch_names))}
        launches: list[int] = []
        for launch, bindings in zip(call.launches, call.bindings, strict=True):
            launches += (launch.function, *launch.workgroups, *launch.threads, launch.shared_bytes)
            launches += (len(bindings), *(places[name] for name in bindings))
            launches += (len(launch.constants), *launch.constants)
        driver, functions = call.driver, _FUNCTIONS
        graph: tuple[int, ...] = ()
        if call.graph is not None:
            functions += _GRAPH_FUNCTIONS
            if call.graph not in _graphs:  # one of our own: the other one is under other locks
                with driver.current():
                    _graphs[call.graph] = Graph(driver, call.launches)
            graph = _graphs[call.graph].handles
        torch.ops.iree_lnbwd.remember(
            *kind,
            driver=[driver.context, *map(driver.entry_point, functions)],
            ones=call.fixed[0] if call.fixed else 0,
            scratch_bytes=call.scratch_bytes,
            scratch=call.scratch,
            launches=launches,
            graph=graph,
        )


@atexit.register
def _forget() -> None:
    """Lets go of the modules; PyTorch calls no operator any more."""
    if _remembered:
        torch.ops.iree_lnbwd.forget()
    _graphs.clear()
    _modules.clear()
