"""How a spec is computed on a target: the form of the IR, and its numbers.

A schedule is a value of its own. It is either legal or illegal for a spec and a target, and an
illegal one is not compiled. `choose` takes the schedule that was measured to be the fastest on a
product (``data``) or on one like it (`Product.schedules_from`), or one that follows from rules.
"""

from iree_lnbwd.schedules.choosing import choose, choose_statistics
from iree_lnbwd.schedules.elements import vector_of
from iree_lnbwd.schedules.few_rows import FewRows
from iree_lnbwd.schedules.finalize import with_finalize
from iree_lnbwd.schedules.forward import Forward
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.row_blocks import RowBlocks
from iree_lnbwd.schedules.schedule import (
    Form,
    Schedule,
    check_numbers,
    forms,
    host_alignment,
    most_few_rows,
    paths,
    schedule_from_dict,
    schedule_to_dict,
)
from iree_lnbwd.schedules.two_pass import TwoPass
from iree_lnbwd.schedules.whole_tensors import WholeTensors

__all__ = [
    "FewRows",
    "Form",
    "Forward",
    "OnePass",
    "RowBlocks",
    "Schedule",
    "TwoPass",
    "WholeTensors",
    "check_numbers",
    "choose",
    "choose_statistics",
    "forms",
    "host_alignment",
    "most_few_rows",
    "paths",
    "schedule_from_dict",
    "schedule_to_dict",
    "vector_of",
    "with_finalize",
]
