"""The command line of scripts that check norms in several processes, which they start themselves.

    scripts/verify_... run [--device=cuda] [--processes=2]
    scripts/verify_... modules --target=sm_90 FOLDER

The backend is gloo on the CPU and NCCL on GPUs, one for each process. For a machine without IREE's
compiler, `modules` compiles ahead what a run needs; `$IREE_LNBWD_CACHE` names the folder there.
Without a C++ compiler, what is to run under `enable` is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.stores import shipping
from iree_lnbwd.torch import native

Check = Callable[[torch.device, int], bool]  # of a device and a seed: whether all is right
Work = Callable[[], object]


def main(description: str | None, processes: Sequence[int], check: Check, alone: Work) -> int:
    """Parses the command line and does what it says.

    Args:
        description: Of the script.
        processes: How many there may be; the first is the default.
        check: Run in each of the processes.
        alone: Calls on the CPU, in this process, the modules that a run calls.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="start the processes, and check in each")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--processes", type=int, choices=processes, default=processes[0])
    run.add_argument("--seed", type=int, default=0)
    modules = commands.add_parser("modules", help="compile what a run needs")
    modules.add_argument("--target", default="host", help="the GPU's or CPU's to compile for")
    modules.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "modules":
        alone()
        return _compile(options.target, options.folder)
    if "WORLD_SIZE" not in os.environ:
        native.load()  # what has to be compiled, is compiled here for all processes
        if options.device == "cpu":
            alone()
        _start(options.processes)
    _leave(_run(check, options.device, options.seed))


def can_enable() -> bool:
    """Whether `enable` has its kernels; it is told if not."""
    if native.load():
        return True
    say("no C++ compiler: enable() is left out")
    return False


def say(line: str) -> None:
    """Prints a line in one piece, among those of other processes."""
    who = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    sys.stdout.write(f"{who}{line}\n")
    sys.stdout.flush()


def _start(processes: int) -> None:
    """Replaces this process by a launcher, whose processes come to `main` again."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes do not wait for each other's
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def _run(check: Check, device_type: str, seed: int) -> int:
    """One of the processes."""
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_right = check(device, seed)
    dist.destroy_process_group()
    return 0 if is_right else 1


def _leave(status: int) -> NoReturn:
    """Ends a process of a group.

    Gloo's threads still release tensors while Python ends. Then they abort the process: 2 of 12
    groups with PyTorch 2.13 and norms of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _compile(target_name: str, folder: Path) -> int:
    """What this process has called, for another target."""
    target = find_target(target_name)
    specs = dict.fromkeys(spec for spec, _ in modules.in_use())
    for number, spec in enumerate(specs, start=1):
        made = shipping.compile(spec, target.name, folder)
        print(f"{number}/{len(specs)} {made.path.name}", flush=True)
    return 0
