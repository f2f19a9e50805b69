"""Where a schedule comes from, in words."""

from __future__ import annotations

from itertools import chain

from iree_lnbwd.hardware.products import lenders, standing_for
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.choosing import choose, completed, measured, nearby, spilling
from iree_lnbwd.schedules.measured_files import fastest
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.schedule import Schedule


def source_of(schedule: Schedule, spec: NormSpec, target: Target) -> str:
    """What says that a schedule is to be taken: a measurement, rules, or somebody who gave it."""
    if schedule != choose(spec, target):
        return "given"
    if isinstance(schedule, OnePass):
        product = standing_for(target.name)
        lending = [one.name for one in lenders(product) if fastest(one.name)]
        for one in measured(spec, target, product):
            if completed(one, spec, target, product) == schedule:
                if one in fastest(product.name).values():
                    return f"measured on {product.name}"
                return f"taken over from what was measured on {' or '.join(lending)}"
        near = nearby(spec, target, product)
        if spec.grad_outputs > 1:
            near = chain(near, spilling(spec, target, product))
        for one in near:
            if completed(one, spec, target, product) == schedule:
                return f"fitted from a width measured on {' or '.join(lending)}"
    return "rules"
