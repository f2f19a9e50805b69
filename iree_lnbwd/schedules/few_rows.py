"""The schedule of few rows: its numbers, and when they are legal."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.errors import counted
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import MORE_GRAD_OUTPUTS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import most_elements
from iree_lnbwd.schedules.ir_types import chunk_types, gates, kernel, private, shared
from iree_lnbwd.schedules.rules import first_broken, out_of_bounds, terms_rule

# Banks of shared memory, of 4 bytes each: NVIDIA's (CUDA C++ Programming Guide, "Shared Memory"),
# and those of AMD's LDS (CDNA3 and RDNA3 ISA guides).
_BANKS = 32


@dataclass(frozen=True)
class FewRows:
    """One kernel without partial rows, for calls of few rows (``ir/few_rows.mlir``).

    Workgroups for tiles of columns run beside a workgroup for each row.

    Attributes:
        rows: The most rows that it is launched for.
        warps: Subgroups in a workgroup.
        tile: Columns that a workgroup sums over all rows.
        tile_vector: Neighbouring columns of a tile that a thread handles together.
    """

    rows: int
    warps: int
    tile: int
    tile_vector: int

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        return (
            "one kernel: x and dy are read for dx, and again for the columns; a workgroup of "
            f"{counted(self.warps, 'subgroup')} for each row and one for each "
            f"{counted(self.tile, 'column')}"
        )

    def threads(self, target: Target) -> int:
        """Of a workgroup."""
        return self.warps * target.subgroup_size

    def chunks(self, spec: NormSpec, target: Target, vector: int) -> int:
        """How many vectors of a row each thread has."""
        return -(-spec.columns // (vector * self.threads(target)))

    def tiles(self, spec: NormSpec) -> int:
        """Tiles of a row, each a workgroup's; none if no column sum is asked for."""
        return -(-spec.columns // self.tile) if spec.sums_columns else 0

    def slices(self, target: Target) -> int:
        """Slices of the rows; the threads of a tile sum them side by side."""
        return self.threads(target) * self.tile_vector // self.tile

    def parts(self, target: Target) -> int:
        """Threads that share each of a tile's sums over the slices."""
        return self.threads(target) // (2 * self.tile)

    def padded_tile(self, target: Target) -> int:
        """Elements from one slice to the next in shared memory; then parts use different banks."""
        return self.tile + _BANKS // self.parts(target)

    def shared_bytes(self, spec: NormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup, of either kind."""
        acc = DTYPES[spec.acc_dtype].numpy.itemsize
        sums = 2 * self.slices(target) * self.padded_tile(target)
        return (sums + 2 * self.warps) * acc

    def aliases(self, spec: NormSpec, target: Target, vector: int) -> dict[str, str]:
        """What it is in the text of a module.

        Args:
            spec: What is computed.
            target: Where.
            vector: Neighbouring elements of a row that a thread handles together.
        """
        slices = self.slices(target)
        chunks = self.chunks(spec, target, vector)
        return {
            "#few_vector": f"{vector} : index",
            **{f"!few_{alias[1:]}": shape for alias, shape in chunk_types(spec, vector).items()},
            "#few_threads": f"{self.threads(target)} : index",
            "#few_chunks": f"{chunks} : index",
            "#tiles": f"{self.tiles(spec)} : index",
            "#tile": f"{self.tile} : index",
            "#tile_vector": f"{self.tile_vector} : index",
            "#tile_slices": f"{slices} : index",
            "#few_rows_kernel": kernel(self.threads(target), target),
            "!few_exchange": shared(f"{self.warps}x2x!acc"),
            "!few_warp_sums": f"vector<{self.warps}x2x!acc>",
            "!tile_sums": shared(f"2x{slices}x{self.padded_tile(target)}x!acc"),
            "!few_dy": private(f"{chunks}x!few_dy_chunk"),
            "!few_more_dy": private(f"{len(MORE_GRAD_OUTPUTS)}x{chunks}x!few_dy_chunk"),
            "!few_x": private(f"{chunks}x!few_x_chunk"),
            "!few_gamma": private(f"{chunks}x!few_gamma_chunk"),
            "!few_beta": private(f"{chunks}x!few_beta_chunk"),
            "!few_residual": private(f"{chunks}x!few_residual_chunk"),
            **{
                alias: shape
                for _ in gates(spec)
                for alias, shape in (
                    ("!few_z", private(f"{chunks}x!few_z_chunk")),
                    ("!z_cells", f"vector<{self.tile_vector}x!z>"),
                )
            },
            "!few_held": private(f"{chunks}x!few_chunk"),
            "!dy_cells": f"vector<{self.tile_vector}x!dy>",
            "!dy_sum_cells": f"vector<{self.tile_vector}x!dy_sum>",
            "!x_cells": f"vector<{self.tile_vector}x!x>",
            "!gamma_cells": f"vector<{self.tile_vector}x!gamma>",
            "!beta_cells": f"vector<{self.tile_vector}x!beta>",
            "!cells": f"vector<{self.tile_vector}x!acc>",
        }

    def illegal(self, spec: NormSpec, target: Target, vector: int) -> str | None:
        """Why it cannot be compiled; None where it can.

        Args:
            spec: What is computed.
            target: Where.
            vector: Neighbouring elements of a row that a thread handles together.
        """
        if why := out_of_bounds(self):
            return why
        threads = self.threads(target)
        powers = (self.warps, self.tile, self.tile_vector)
        rules = (
            (spec.grad_input_sum_dtype is not None, "dx is summed over rows: no workgroup has all"),
            (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
            (self.warps > target.subgroup_size, "more subgroups than lanes"),
            (any(n & (n - 1) for n in powers), "warps, tile and tile_vector are powers of 2"),
            (vector % self.tile_vector != 0, f"{self.tile_vector} columns do not divide {vector}"),
            (self.tile < self.tile_vector, f"{self.tile_vector} columns of a tile of {self.tile}"),
            (
                not 4 * self.tile <= threads <= 2 * self.tile * target.subgroup_size,
                f"{threads} threads for {2 * self.tile} sums",
            ),
            (
                self.chunks(spec, target, vector) * vector > most_elements(spec),
                f"more than {most_elements(spec)} elements of a row to a thread",
            ),
        )
        if (why := first_broken(rules)) is not None:
            return why
        shared = self.shared_bytes(spec, target)
        if shared > target.shared_bytes:
            return f"{shared} bytes of shared memory, at most {target.shared_bytes}"
        return first_broken([terms_rule(-(-self.rows // self.slices(target)))])
