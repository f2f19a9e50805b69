"""`scripts/steps`: tiny models on the CPU; its classes of kernels; its tables and plots."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from support import built

pytest.importorskip("torch", reason="PyTorch is not installed")
from script_support import SCRIPTS, run

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.vmfb import inspection

sys.path.insert(0, str(SCRIPTS))
from kernel_classes import class_of, is_ours

STEPS = SCRIPTS / "steps"
TINY = ("--device=cpu", "--size=tiny", "--contenders=eager,replaced")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_cublas", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>", "matmul"),
        ("triton_tem_fused_addmm_gelu_3", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "attention"),
        ("triton_tem_fused_flex_attention_backward_2", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16>", "other"),
        ("triton_poi_fused_add_clone__scaled_dot_product_flash_attention_4", "other"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1", "norm"),
        ("triton_per_fused_add_native_layer_norm_native_layer_norm_backward_9", "norm"),
        ("triton_poi_fused_mm_gelu_7", "other"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<...>", "norm"),
        ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norm"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<...>>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<...>>", "other"),
        ("Memset (Device)", "other"),
        ("rows", "norm"),
    ],
)
def test_a_kernel_belongs_to_a_class(kernel: str, name: str) -> None:
    assert class_of(kernel) == name
    assert is_ours(kernel) == (kernel == "rows")


@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm"])
def test_all_kernels_of_our_modules_are_ours(op: str) -> None:
    target = find_target("sm_90")
    spec = NormSpec((1024,), "bf16", op=op, eps=None if op.endswith("backward") else 1e-6)
    found = [kernel.name for kernel in inspection.kernels(built(spec, target)[0], target)]
    assert len(found) > 1
    assert all(map(is_ours, found))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def need(*libraries: str) -> None:
    for library in libraries:
        pytest.importorskip(library, reason=f"{library} is not installed")


def test_steps_of_a_model(tmp_path: Path) -> None:
    need("transformers")
    path = tmp_path / "out.csv"
    words = ("--models=qwen3", "--precisions=bf16", "--rounds=1", f"--csv={path}")
    said = run(STEPS, "run", *TINY, *words)
    with path.open() as file:
        assert "tiny size\n# scripts/steps run --device=cpu " in file.read()
    rows = rows_of(path)
    assert [row["contender"] for row in rows] == ["eager", "replaced"]
    for row in rows:
        assert (row["model"], row["precision"], row["mode"]) == ("qwen3", "bf16", "")
        assert 0 < float(row["least_ms"]) <= float(row["step_ms"])
        assert row["host_ms"] == row["other_ms"] == row["kernels"] == row["peak_mib"] == ""
        assert f"qwen3 bf16 {row['contender']} " in said
    assert float(rows[0]["loss"]) == pytest.approx(float(rows[1]["loss"]), rel=2**-8)


def test_gradients_of_a_model_are_as_close_to_f64(tmp_path: Path) -> None:
    need("transformers")
    path = tmp_path / "out.csv"
    words = ("--models=gpt2", "--precisions=f32", f"--csv={path}")
    run(STEPS, "check", *TINY, *words)
    eager, replaced = rows_of(path)
    for part in ("all", "norms"):
        assert 0 < float(eager[part]) < 1e-6
        assert 0 < float(replaced[part]) < 2 * float(eager[part])
    assert replaced["all"] != eager["all"]


def test_losses_of_a_model(tmp_path: Path) -> None:
    need("timm")
    path, image = tmp_path / "out.csv", tmp_path / "out.png"
    words = ("--models=vit", "--precisions=autocast", "--steps=40", f"--csv={path}")
    run(STEPS, "losses", *TINY, *words)
    rows = rows_of(path)
    assert [int(row["step"]) for row in rows] == [*range(1, 41)] * 2
    eager, replaced = (
        [float(row["loss"]) for row in rows if row["contender"] == name]
        for name in ("eager", "replaced")
    )
    assert eager[0] == pytest.approx(replaced[0], rel=2**-8)
    for losses in (eager, replaced):
        assert sum(losses[-4:]) < sum(losses[:4]) - 0.4
    need("matplotlib")
    run(STEPS, "plot", f"--csv={path}", f"--plot={image}")
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.drawn
def test_a_contender_that_fails_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("raise ImportError('no timm')\n")
    path = tmp_path / "out.csv"
    words = ("--models=vit", "--precisions=bf16", "--contenders=eager", f"--csv={path}")
    said = run(STEPS, "run", *TINY, *words, status=1, PYTHONPATH=tmp_path)
    assert "vit bf16 eager is left out: ImportError: no timm\n" in said
    assert rows_of(path) == []


def test_a_contender_that_is_late_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    words = ("--models=vit,bert", "--precisions=bf16", "--seconds=0", f"--csv={path}")
    said = run(STEPS, "run", *TINY, *words, status=1)
    for model in ("vit", "bert"):
        for contender in ("eager", "replaced"):
            assert f"{model} bf16 {contender} is left out: out of time\n" in said
    assert rows_of(path) == []


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "--contenders=eager,Liger",
            "expected names of eager, enable, replaced, compiled, compiled+enable, "
            "compiled+replaced, apart by commas, got 'Liger'\n",
        ),
        ("--rounds=0", "expected a number from 1 on, got '0'\n"),
        ("--device=toaster", "expected cpu, or cuda where there is one, got 'toaster'\n"),
    ],
)
def test_a_wrong_option_is_refused(word: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    heard = run(STEPS, "run", "--device=cpu", f"--csv={path}", word, status=2)
    assert heard.endswith(f"argument {word.partition('=')[0]}: {said}")
    assert not path.exists()


MEASURED = """\
# a GPU; torch 2; full size
# scripts/steps run
model,precision,contender,mode,step_ms,least_ms,host_ms,matmul_ms,attention_ms,norm_ms,\
optimizer_ms,other_ms,kernels,ours,peak_mib,loss
llama,bf16,eager,,57.6,57,20,30,2,10,0,15.125,900,0,20480,9.1
llama,bf16,replaced,,46.6,46,15,30,2,4,0,9.6,600,33,18432,9.1
gpt2,autocast,eager,,50,49,12,16,3,10,1,20.7,800,0,8000,9
"""


def test_tables_and_plot_of_steps(tmp_path: Path) -> None:
    path, image = tmp_path / "out.csv", tmp_path / "out.png"
    path.write_text(MEASURED)
    said = run(STEPS, "table", f"--csv={path}")
    assert said == (
        "a GPU; torch 2; full size\n"
        "- Llama: 8 layers of 2048, grouped queries, 4 x 2048 tokens\n"
        "- GPT-2: 12 layers of 1024, 8 x 1024 tokens\n"
        "\n| step, ms | eager | replaced |\n|---|---|---|\n"
        "| Llama bf16 | 57.60 | **46.60** |\n| GPT-2 autocast | **50.00** |  |\n"
        "\n| rest, ms | eager | replaced |\n|---|---|---|\n"
        "| Llama bf16 | 25.12 | **13.60** |\n| GPT-2 autocast | **30.70** |  |\n"
        "\n| host, ms | eager | replaced |\n|---|---|---|\n"
        "| Llama bf16 | 20.00 | **15.00** |\n| GPT-2 autocast | **12.00** |  |\n"
        "\n| peak, MiB | eager | replaced |\n|---|---|---|\n"
        "| Llama bf16 | 20480 | **18432** |\n| GPT-2 autocast | **8000** |  |\n"
    )
    need("matplotlib")
    run(STEPS, "plot", f"--csv={path}", f"--plot={image}")
    assert image.read_bytes().startswith(b"\x89PNG")
