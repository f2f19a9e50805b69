"""Models whose graphs are changed as inductor changes them, and then run without a C++ compiler."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func as boxed
from torch.fx import Graph, GraphModule


def compiled(
    model: Callable[..., Tensor], dynamic: bool | None = None
) -> tuple[Callable[..., Any], list[Graph]]:
    """The model, its graph changed as inductor changes it, and run as it is; and its graphs."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")  # its import warns
    found: list[Graph] = []

    def changed(module: GraphModule, inputs: Any, **options: Any) -> Any:
        compile_fx.view_to_reshape(module)
        mode = compile_fx.detect_fake_mode(inputs)
        with compile_fx.V.set_fake_mode(mode):
            compile_fx.fake_tensor_prop(module, inputs)
            compile_fx._recursive_post_grad_passes(module, options.get("is_inference", False))
        module.graph.eliminate_dead_code()
        module.recompile()
        found.append(module.graph)
        return boxed(module)

    backend = functools.partial(compile_fx.compile_fx, inner_compile=changed)
    return torch.compile(model, backend=backend, dynamic=dynamic), found
