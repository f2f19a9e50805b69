"""Replaced norms in what trains, wraps, saves and exports models, before and after replacing."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

pytestmark = pytest.mark.filterwarnings("ignore")  # they warn of their own future
FIRST = pytest.mark.parametrize("first", [True, False], ids=["replaced", "wrapped"])
COLUMNS = 32


class Norm(nn.Module):
    """Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(COLUMNS) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(COLUMNS, COLUMNS), Norm(), nn.LayerNorm(COLUMNS), nn.Linear(COLUMNS, 1)
    )


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    settings = {
        **{"vocab_size": 64, "hidden_size": COLUMNS, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def replaced(module: nn.Module) -> int:
    return sum(isinstance(each, ReplacedNorm) for each in module.modules())


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# --- libraries -----------------------------------------------------------------------------------


@FIRST
def test_peft(first: bool) -> None:
    """LoRA, with norms that are trained beside it; adapters can be merged."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False
    )
    tokens = torch.randint(3, 60, (2, 7))
    outputs = []
    for replaces in (True, False):
        wrapped = llama()
        if replaces and first:
            assert len(replace_norms(wrapped).replaced) == 5
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(wrapped, config)
        if replaces and not first:
            assert len(replace_norms(wrapped).replaced) == 10  # the copies are trained
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        torch.autograd.backward(loss)
        grads = {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}
        merged = wrapped.merge_and_unload()
        outputs.append((loss.detach(), grads, merged(input_ids=tokens).logits.detach()))
        assert (replaced(merged) == 5) == replaces
    close(*outputs)


@FIRST
def test_lightning(first: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model()
            self.losses: list[Tensor] = []
            if first and self.of_ours:
                replace_norms(self.model)

        def configure_model(self) -> None:
            if not first and self.of_ours:
                replace_norms(self)

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.model(batch).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    losses = []
    for of_ours in (True, False):
        Module.of_ours = of_ours
        module = Module()
        torch.manual_seed(1)
        data = torch.utils.data.DataLoader(torch.randn(12, COLUMNS), batch_size=4)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=True,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, data)
        assert replaced(module) == 2 * of_ours
        losses.append(module.losses)
    assert len(losses[0]) == 3
    close(*losses)


@FIRST
def test_trainer_of_transformers(first: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tokens = torch.randint(3, 60, (8, 7), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    losses = []
    for of_ours in (True, False):
        trained = llama()
        if of_ours and first:
            replace_norms(trained)
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(of_ours)), max_steps=3, per_device_train_batch_size=2,
            use_cpu=True, report_to=[], save_steps=3, logging_steps=1, seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=trained, args=options, train_dataset=data)
        if of_ours and not first:
            replace_norms(trainer.model)
        trainer.train()
        assert replaced(trained) == 5 * of_ours
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        again = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / str(of_ours) / "checkpoint-3"
        )
        assert not replaced(again)
        close(again(tokens).logits, trained(tokens).logits)
    assert len(losses[0]) == 3
    close(*(torch.tensor(each) for each in losses))


@FIRST
def test_accelerate(first: bool) -> None:
    """Its wrapper computes under autocast, and widens outputs."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    forget = accelerate.state.AcceleratorState._reset_state  # one for a process, and of one type
    results = []
    for of_ours in (True, False):
        forget(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        trained = model()
        if of_ours and first:
            replace_norms(trained)
        torch.manual_seed(1)
        wrapped, optimizer, data = accelerator.prepare(
            trained,
            torch.optim.SGD(trained.parameters(), lr=0.1),
            torch.utils.data.DataLoader(torch.randn(12, COLUMNS), batch_size=4),
        )
        if of_ours and not first:
            assert len(replace_norms(wrapped).replaced) == 2
        losses = []
        for batch in data:
            loss = wrapped(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert replaced(accelerator.unwrap_model(wrapped)) == 2 * of_ours
        results.append(torch.stack(losses))
    forget(True)
    assert len(results[0]) == 3
    assert (results[0] - results[1]).norm() <= 4 * 2.0**-8 * results[1].norm()


# --- processes -----------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without distributed")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def gradients(module: nn.Module, whole: nn.Module) -> list[Tensor]:
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(module(x).square().mean())
    found = (parameter.grad for parameter in whole.parameters())
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found if g is not None]


@FIRST
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_data_parallel(way: str, first: bool, group: None) -> None:
    own = model()
    ours = copy.deepcopy(own)
    if first:
        replace_norms(ours)
    wrapped: nn.Module = ours
    if way == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(ours)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for layer in (*ours, ours):
            fully_shard(layer, mesh=mesh)
    if not first:
        assert len(replace_norms(wrapped).replaced) == 2
    assert replaced(wrapped) == 2
    found, expected = gradients(wrapped, ours), gradients(own, own)
    assert len(found) == len(expected) == 7
    close(found, expected)


# --- copies and exports --------------------------------------------------------------------------


@FIRST
def test_saved_and_loaded(first: bool) -> None:
    """A whole model, and its state, into another that is replaced or not."""
    own = model()
    if first:
        replace_norms(own)
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert replaced(loaded) == replaced(own) == 2 * first
    other = model()
    if not first:
        replace_norms(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(loaded.state_dict())
    x = torch.randn(3, COLUMNS)
    close(loaded(x), own(x))
    close(other(x), own(x))
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    close(other(x), own(x))


LOADS = """
import sys, torch
model, x, expected = torch.load(sys.argv[1], weights_only=False)
from iree_lnbwd.torch.replacement.classes import ReplacedNorm
assert all(isinstance(norm, ReplacedNorm) for norm in model), model
torch.testing.assert_close(model(x), expected)
model(x).sum().backward()
"""


@pytest.mark.drawn
def test_saved_for_another_process(tmp_path: Path) -> None:
    """Which has replaced nothing, and has not imported this package."""
    norms = nn.Sequential(nn.LayerNorm(COLUMNS), nn.RMSNorm(COLUMNS, eps=1e-6))
    replace_norms(norms)
    x = torch.randn(3, COLUMNS)
    torch.save((norms, x, norms(x).detach()), tmp_path / "norms.pt")
    command = [sys.executable, "-c", LOADS, str(tmp_path / "norms.pt")]
    subprocess.run(command, check=True, timeout=300)


def test_copies_and_undoing() -> None:
    """What is done to one model is not done to its copies."""
    own = model()
    report = replace_norms(own)
    copied, pickled = copy.deepcopy(own), pickle.loads(pickle.dumps(own))
    report.undo()
    assert (replaced(own), replaced(copied), replaced(pickled)) == (0, 2, 2)
    x = torch.randn(3, COLUMNS)
    for each in (copied, pickled):
        close(gradients(each, each), gradients(own, own))
        close(each(x), own(x))
        own.zero_grad()


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copied_before_replacing(clone: Callable[[nn.Module], nn.Module]) -> None:
    """Each is replaced for itself, and trains as the other."""
    own = model()
    copied = clone(own)
    assert len(replace_norms(copied).replaced) == 2
    assert replaced(own) == 0
    expected = gradients(own, own)
    close(gradients(copied, copied), expected)
    assert len(replace_norms(own).replaced) == 2
    own.zero_grad()
    close(gradients(own, own), expected)


def test_replaced_in_a_compiled_model() -> None:
    """By what `torch.compile` returned, before and after its first call."""
    x = torch.randn(3, COLUMNS)
    for calls_first in (False, True):
        own = model()
        expected = own(x)
        compiled = torch.compile(own, backend="aot_eager")
        if calls_first:
            compiled(x)
        assert len(replace_norms(compiled).replaced) == replaced(own) == 2
        with torch.profiler.profile() as profiled:
            close(compiled(x), expected)
        assert any(event.name.startswith("iree_lnbwd::") for event in profiled.events())
        torch._dynamo.reset()


def test_exported_before_replacing() -> None:
    """The program stays what it was, and the model is compiled anew."""
    own = model()
    x = torch.randn(3, COLUMNS)
    expected = own(x)
    exported = torch.export.export(own, (x,))
    replace_norms(own)
    assert not any("iree_lnbwd" in str(node.target) for node in exported.graph.nodes)
    close(exported.module()(x), expected)
    close(torch.compile(own, backend="aot_eager")(x), expected)
    torch._dynamo.reset()


def test_exported_and_compiled() -> None:
    own = model()
    ours = copy.deepcopy(own)
    compiled_before = torch.compile(ours, backend="aot_eager")
    x = torch.randn(3, COLUMNS)
    close(compiled_before(x), own(x))
    replace_norms(ours)
    close(compiled_before(x), own(x))
    exported = torch.export.export(ours, (x,))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert any(target.startswith("iree_lnbwd.rms_norm") for target in targets)
    close(exported.module()(x), own(x))
    torch._dynamo.reset()
