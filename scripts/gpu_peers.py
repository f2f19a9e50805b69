"""Other libraries' norms on an NVIDIA GPU, by name, for `scripts/benchmark`.

Each peer gets the tensors that ours gets, but where it takes weights of f32 alone, and computes the
same results. A peer that has no such norm, or cannot be imported, is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch
from gpu_formulas import formula
from gpu_members import EPS, Buffers, Member, dy_of
from torch import Tensor

from iree_lnbwd.benchmark.gpu_times import Contender
from iree_lnbwd.ops.operands import Gate

Call = Callable[[Buffers], object]
Peer = Callable[[Member, Sequence[Buffers]], Call | None]  # None if it has no such norm


def contenders(
    names: Sequence[str], member: Member, sets: Sequence[Buffers]
) -> dict[str, Contender]:
    """The peers that have such a norm, by name; those that fail are told."""
    found: dict[str, Contender] = {}
    for name in names:
        if not member.is_plain and name not in _OF_ANY_MEMBER:
            continue
        try:
            call = PEERS[name](member, sets)
            if call is None:
                continue
            call(sets[0])
            torch.cuda.synchronize()
        except Exception as error:  # tools that are not ours may raise anything
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        found[name] = _on_sets(call, sets)
    return found


def _on_sets(call: Call, sets: Sequence[Buffers]) -> Contender:
    return lambda i: call(sets[i % len(sets)])


def _eager(member: Member, sets: Sequence[Buffers]) -> Call | None:
    """ATen's kernels, and additions of their own for a residual and for several gradients."""
    aten = torch.ops.aten
    shape = [sets[0].x.shape[-1]]

    def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> object:
        return aten.native_layer_norm(x, shape, gamma, beta, EPS)

    def rms_norm(x: Tensor, gamma: Tensor) -> object:
        return aten._fused_rms_norm(x, shape, gamma, EPS)

    def layer_norm_backward(s: Buffers) -> tuple[Tensor, ...]:
        mean, rstd = s.mean[..., None], s.rstd[..., None]
        mask = [True] * 3
        grads: tuple[Tensor, ...] = aten.native_layer_norm_backward(
            dy_of(s), s.x, shape, mean, rstd, s.gamma, s.beta, mask
        )
        return grads

    def rms_norm_backward(s: Buffers) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = aten._fused_rms_norm_backward(
            dy_of(s), s.x, shape, s.rstd[..., None], s.gamma, [True] * 2
        )
        return grads

    def forward(s: Buffers) -> object:
        x = s.x + s.residual if member.has_residual else s.x
        return x, layer_norm(x, s.gamma, s.beta) if member.centres else rms_norm(x, s.gamma)

    def backward(s: Buffers) -> object:
        dx, *others = layer_norm_backward(s) if member.centres else rms_norm_backward(s)
        return dx + s.residual if member.has_residual else dx, others

    if member.from_output:
        return None
    if not member.has_one_weight_alone:
        return formula(member, len(sets[0].x))
    return backward if member.is_backward else forward


def _compiled(member: Member, sets: Sequence[Buffers]) -> Call | None:
    eager = _eager(member, sets)
    if eager is None:
        return None
    torch._dynamo.reset()
    compiled: Call = torch.compile(eager, dynamic=False)
    return compiled


def _liger(member: Member, sets: Sequence[Buffers]) -> Call | None:
    from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm

    mode, offset = "llama", 0.0
    first = sets[0]
    if member.from_output or (member.centres and member.has_residual):
        return None
    if member.centres and member.is_backward:
        return lambda s: layer_norm.layer_norm_backward(s.dy, s.x, s.gamma, s.beta, s.mean, s.rstd)
    if member.centres:
        return lambda s: layer_norm.layer_norm_forward(s.x, s.gamma, s.beta, EPS)
    if member.has_residual:

        def added(s: Buffers) -> tuple[object, ...]:
            made: tuple[object, ...] = fused_add_rms_norm.fused_add_rms_norm_forward(
                s.x, s.residual, s.gamma, EPS, offset, mode
            )
            return made

        if not member.is_backward:
            return added
        *_, block, warps, stages, casting = added(first)
        return lambda s: fused_add_rms_norm.fused_add_rms_norm_backward(
            s.dy, s.residual, s.x, s.gamma, s.rstd, offset, casting, block, warps, stages, False
        )
    if not member.is_backward:
        return lambda s: rms_norm.rms_norm_forward(s.x, s.gamma, EPS, offset, mode, None)
    made = rms_norm.rms_norm_forward(first.x, first.gamma, EPS, offset, mode, None)
    _, _, _, block, warps, casting = made
    return lambda s: rms_norm.rms_norm_backward(
        s.dy, s.x, s.gamma, s.rstd, offset, casting, block, warps, False, None
    )


def _liger_cutedsl(member: Member, _sets: Sequence[Buffers]) -> Call | None:
    """Its kernels in CuTe, which it takes for some widths on some GPUs; here in each cell."""
    if member.from_output or (member.centres and member.has_residual):
        return None
    folder = "liger_kernel.ops.backends._cutedsl"
    norm = importlib.import_module(f"{folder}.{'layer_norm' if member.centres else 'rms_norm'}")
    added = importlib.import_module(f"{folder}.fused_add_rms_norm")
    offset, llama = 0.0, 0

    def layer_norm_backward(s: Buffers) -> object:
        dx, *others = norm._layer_norm_cutedsl_backward(s.dy, s.x, s.gamma, s.beta, s.mean, s.rstd)
        return dx, [one.to(s.gamma.dtype) for one in others]

    def rms_norm_backward(s: Buffers) -> object:
        ds = s.residual if member.has_residual else None
        dx, dw = norm._rms_norm_cutedsl_backward(s.dy, s.x, s.gamma, s.rstd, False, llama, ds=ds)
        return dx, dw.to(s.gamma.dtype)

    if member.is_backward:
        return layer_norm_backward if member.centres else rms_norm_backward
    if member.centres:
        return lambda s: norm._layer_norm_cutedsl_forward(s.x, s.gamma, s.beta, EPS)
    if member.has_residual:
        return lambda s: added._fused_add_rms_norm_cutedsl_forward(
            s.x, s.residual, s.gamma, EPS, offset, llama
        )
    return lambda s: norm._rms_norm_cutedsl_forward(s.x, s.gamma, EPS, offset, llama)


def _flash_attn(member: Member, _sets: Sequence[Buffers]) -> Call | None:
    from flash_attn.ops.triton import layer_norm

    if member.from_output:
        return None
    is_rms = not member.centres

    def forward(s: Buffers) -> object:
        return layer_norm._layer_norm_fwd(
            s.x,
            s.gamma,
            None if is_rms else s.beta,
            EPS,
            residual=s.residual if member.has_residual else None,
            is_rms_norm=is_rms,
        )

    def backward(s: Buffers) -> object:
        return layer_norm._layer_norm_bwd(
            s.dy,
            s.x,
            s.gamma,
            None if is_rms else s.beta,
            EPS,
            None if is_rms else s.mean,
            s.rstd,
            dresidual=s.residual if member.has_residual else None,
            has_residual=member.has_residual,
            is_rms_norm=is_rms,
            x_dtype=s.x.dtype,
        )

    return backward if member.is_backward else forward


def _cudnn(member: Member, sets: Sequence[Buffers]) -> Call | None:
    """Its layer norm takes weights of f32."""
    for module in ("layernorm", "rmsnorm"):  # they register the operators
        importlib.import_module(f"cudnn.ops.norm.{module}")
    if member.has_residual or member.from_output or not (member.is_plain or member.tokens):
        return None
    if member.tokens:
        return _cudnn_modulated(member, sets)
    ops = torch.ops.cudnn
    wide = {id(s): (_4d(s.gamma.float()[None]), _4d(s.beta.float()[None])) for s in sets}

    def call(s: Buffers) -> object:
        x, rstd = _4d(s.x), _4d(s.rstd[:, None])
        if member.centres:
            gamma, beta = wide[id(s)]
            if member.is_backward:
                return ops.layernorm_bwd(_4d(s.dy), x, gamma, _4d(s.mean[:, None]), rstd)
            return ops.layernorm(x, gamma, beta, EPS)
        gamma = _4d(s.gamma[None])
        if member.is_backward:
            return ops.rmsnorm_bwd(_4d(s.dy), x, gamma, rstd)
        return ops.rmsnorm(x, gamma, EPS)

    return call


def _4d(tensor: Tensor) -> Tensor:
    return tensor[:, :, None, None]


def _cudnn_modulated(member: Member, sets: Sequence[Buffers]) -> Call:
    """Its adaptive layer norm, a graph, which takes scales and shifts of f32, without an offset."""
    cudnn = importlib.import_module("cudnn")
    wide = cudnn.data_type.FLOAT
    narrow = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    graph = cudnn.pygraph(
        io_data_type=narrow.get(sets[0].x.dtype, wide),
        intermediate_data_type=wide,
        compute_data_type=wide,
    )

    def samples(tensor: Tensor) -> Tensor:  # [B, S, N]
        return tensor.view(-1, member.tokens or 1, tensor.shape[-1])

    def inputs_of(s: Buffers) -> dict[str, Tensor]:
        given = {"input": samples(s.x), "scale": factors[id(s)][0]}
        if not member.is_backward:
            return given | {"bias": factors[id(s)][1]}
        mean, rstd = samples(s.mean[:, None]), samples(s.rstd[:, None])
        return given | {"grad": samples(s.dy), "mean": mean, "inv_variance": rstd}

    factors = {
        id(s): (s.gamma.float()[:, None] + member.weight_offset, s.beta.float()[:, None])
        for s in sets
    }
    first = sets[0]
    inputs = {name: graph.tensor_like(tensor) for name, tensor in inputs_of(first).items()}
    fixed = {}
    if member.is_backward:
        outputs = graph.adalayernorm_backward(**inputs)
        like = [samples(first.x), *factors[id(first)]]
    else:
        epsilon = graph.tensor(
            dim=[1, 1, 1], stride=[1, 1, 1], data_type=wide, is_pass_by_value=True
        )
        fixed[epsilon] = torch.full((1, 1, 1), EPS)
        phase = cudnn.norm_forward_phase.TRAINING
        outputs = graph.adalayernorm(norm_forward_phase=phase, epsilon=epsilon, **inputs)
        like = [samples(first.x), *[samples(first.mean[:, None])] * 2]
    outputs[0].set_output(True)
    for output in outputs[1:]:
        output.set_output(True).set_data_type(wide)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")

    def call(s: Buffers) -> object:
        results = [torch.empty_like(tensor) for tensor in like]
        given = {inputs[name]: tensor for name, tensor in inputs_of(s).items()}
        graph.execute({**given, **fixed, **dict(zip(outputs, results, strict=True))}, workspace)
        return results

    return call


def _quack(member: Member, sets: Sequence[Buffers]) -> Call | None:
    """Its layer norm's forward takes weights of f32."""
    rmsnorm = importlib.import_module("quack.rmsnorm")  # the package has a function of that name

    if member.from_output or (member.centres and member.has_residual):
        return None
    if member.heads:
        return _quack_heads(member, rmsnorm)
    if not member.is_plain:
        return None
    wide = {id(s): (s.gamma.float(), s.beta.float()) for s in sets}
    if member.centres and member.is_backward:
        return lambda s: rmsnorm.layernorm_bwd(s.x, s.gamma, s.dy, s.rstd, s.mean)
    if member.centres:
        return lambda s: rmsnorm.layernorm_fwd(
            s.x, *wide[id(s)], eps=EPS, return_rstd=True, return_mean=True
        )
    if member.is_backward:
        return lambda s: rmsnorm.rmsnorm_bwd(
            s.x, s.gamma, s.dy, s.rstd, dresidual_out=s.residual if member.has_residual else None
        )
    return lambda s: rmsnorm.rmsnorm_fwd(
        s.x,
        s.gamma,
        residual=s.residual if member.has_residual else None,
        eps=EPS,
        store_rstd=True,
    )


def _quack_heads(member: Member, rmsnorm: ModuleType) -> Call:
    def heads(tensor: Tensor) -> Tensor:
        return tensor.view(-1, member.heads or 1, *tensor.shape[1:])

    if member.is_backward:
        return lambda s: rmsnorm.rmsnorm_bwd(heads(s.x), s.gamma, heads(s.dy), heads(s.rstd))
    return lambda s: rmsnorm.rmsnorm_fwd(heads(s.x), s.gamma, eps=EPS, store_rstd=True)


def _fla(member: Member, _sets: Sequence[Buffers]) -> Call | None:
    """Gates alone: after the norm by one module of it, before the norm by another."""
    from fla.modules.norm import fused_norm_gate, layernorm_gated

    if member.gate is None:
        return None
    is_rms = not member.centres

    def after(s: Buffers) -> object:
        beta = None if is_rms else s.beta
        return fused_norm_gate.layer_norm_gated_fwd(
            s.x, s.z, s.gamma, beta, "swish", EPS, is_rms_norm=is_rms
        )

    def after_backward(s: Buffers) -> object:
        beta, mean = (None, None) if is_rms else (s.beta, s.mean)
        return fused_norm_gate.layer_norm_gated_bwd(
            *(s.dy, s.x, s.z, s.gamma, beta, "swish", EPS, mean, s.rstd), is_rms_norm=is_rms
        )

    def before(s: Buffers) -> object:
        beta = None if is_rms else s.beta
        return layernorm_gated.layer_norm_fwd(
            s.x, s.gamma, beta, EPS, s.z, norm_before_gate=False, is_rms_norm=is_rms
        )

    def before_backward(s: Buffers) -> object:
        beta, mean = (None, None) if is_rms else (s.beta, s.mean)
        return layernorm_gated.layer_norm_bwd(
            *(s.dy, s.x, s.gamma, beta, EPS, mean, s.rstd, s.z),
            norm_before_gate=False,
            is_rms_norm=is_rms,
        )

    if member.gate is Gate.AFTER:
        return after_backward if member.is_backward else after
    return before_backward if member.is_backward else before


PEERS: Mapping[str, Peer] = {
    "eager": _eager,
    "compile": _compiled,
    "liger": _liger,
    "liger-cutedsl": _liger_cutedsl,
    "flash-attn": _flash_attn,
    "cudnn": _cudnn,
    "quack": _quack,
    "fla": _fla,
}
# The others have no such operands.
_OF_ANY_MEMBER = ("eager", "compile", "cudnn", "quack", "fla")
PACKAGES = {  # the version of each goes to the CSV
    "torch": "torch",
    "triton": "triton",
    "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn",
    "cudnn_frontend": "nvidia-cudnn-frontend",
    "quack_kernels": "quack-kernels",
    "fla_core": "fla-core",
    "cutlass": "nvidia-cutlass-dsl",
}
