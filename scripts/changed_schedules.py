"""Schedules that are near a backward's chosen one: they fit it, or have some numbers changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass, TwoPass
from iree_lnbwd.schedules.choosing import alternatives
from iree_lnbwd.schedules.finalize import with_finalize
from iree_lnbwd.schedules.rules import alike
from iree_lnbwd.schedules.set_waves import with_all_at_once

Change = Callable[[OnePass, Target, random.Random], OnePass]

_FETCHES = ((0, 0), (1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4))  # steps ahead, slots
_WEIGHTS = ((False, False), (True, False), (True, True))  # staged, widened
_EVEN_PROCESSORS = 128  # which divide the usual numbers of rows
_MOST_CHANGES = 3  # of one schedule
_CHANGED_OF = 6  # so many of the best are changed
_SPILLS = 1.12  # of the registers there are; the estimate may be wrong by so much
_TRIES = 60  # for each schedule that is wanted: most of what is drawn is not legal


def near(
    chosen: OnePass | TwoPass,
    spec: NormSpec,
    target: Target,
    product: Product,
    fitted: int,
    changed: int,
    seed: int,
) -> list[OnePass]:
    """Others that fit, best first, and then some of these, and of the chosen one, changed.

    Args:
        chosen: Without few rows, which no other has.
        spec: A backward.
        target: Where.
        product: The GPU, or one like it.
        fitted: How many of `alternatives`, at most.
        changed: How many more, at most.
        seed: The same arguments give the same schedules.
    """
    known = [chosen] if isinstance(chosen, OnePass) else []
    found = list(known)
    for other in alternatives(spec, target, product):
        if len(found) == len(known) + fitted:
            break
        one = _with_the_rest(replace(other, few_rows=None), spec, target, product)
        if one not in found and one.illegal(spec, target) is None and one.has_room(spec, target):
            found.append(one)
    rng, best, wanted = random.Random(seed), found[:_CHANGED_OF], len(found) + changed
    for _ in range(_TRIES * changed if best else 0):
        if len(found) == wanted:
            break
        one = _changed(rng.choice(best), spec, target, product, rng)
        if one not in found and _is_legal(one, spec, target):
            found.append(one)
    return found[len(known) :]


def _is_legal(one: OnePass, spec: NormSpec, target: Target) -> bool:
    """Whether it can be compiled, and may have registers enough."""
    return (
        one.illegal(spec, target) is None
        and one.has_room(spec, target)
        and one.registers(spec, target) <= _SPILLS * one.registers_available(target)
    )


def _changed(
    one: OnePass, spec: NormSpec, target: Target, product: Product, rng: random.Random
) -> OnePass:
    """The same with one to three numbers changed, and with as many workgroups as run at once."""
    for change in rng.choices(_CHANGES, k=rng.randint(1, _MOST_CHANGES)):
        one = change(one, target, rng)
    most = product.walkers(one.resident, one.cluster)
    if one.posts:
        most = one.resident * product.processors // one.cluster
    elif one.cluster == 1 and rng.random() < 1 / len(_CHANGES):
        most = min(most, one.resident * _EVEN_PROCESSORS)
    one = replace(one, workgroups=alike(most, one.groups * spec.columns, one.vector))
    return _with_the_rest(one, spec, target, product)


def _with_the_rest(one: OnePass, spec: NormSpec, target: Target, product: Product) -> OnePass:
    """With the numbers that follow from the others."""
    return with_finalize(with_all_at_once(one, spec, target, product), spec, target, product)


def _warps(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    more = rng.choice((-3, -2, -1, 1, 2, 3)) if one.subgroup_rows == 1 else 0
    return replace(one, warps=max(1, one.warps + more))


def _groups(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    more = one.subgroup_rows * rng.choice((-2, -1, 1, 2, 4)) if one.cluster == 1 else 0
    return replace(one, groups=max(one.subgroup_rows, one.groups + more))


def _fetch(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    slots = rng.choice((1, 2, 3))
    ahead, slots = (slots, slots) if one.bulk else rng.choice(_FETCHES)
    return replace(one, ahead=ahead, slots=slots, x_later=False)


def _resident(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    return replace(one, resident=rng.choice((1, 2, 3, 4)))


def _rereads(one: OnePass, _: Target, _rng: random.Random) -> OnePass:
    return replace(one, rereads=not one.rereads)


def _weight(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    stages, widens = rng.choice(_WEIGHTS)
    return replace(one, stages_weight=stages, widens_weight=widens)


def _vector(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    return replace(one, vector=rng.choice((2, 4, 8)))


def _bulk(one: OnePass, target: Target, rng: random.Random) -> OnePass:
    if not target.has_bulk_copies or one.posts:
        return one
    slots, rereads = rng.choice((1, 2, 3)), one.rereads or not one.bulk
    bulk = not one.bulk
    return replace(one, bulk=bulk, ahead=slots, slots=slots, x_later=False, rereads=rereads)


def _cluster(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    more = rng.choice((-2, -1, 1, 2, 4)) if one.cluster > 1 else 0
    return replace(one, cluster=max(1, one.cluster + more) if more else one.cluster)


def _subgroup_rows(one: OnePass, _: Target, rng: random.Random) -> OnePass:
    if one.warps > 1 or one.cluster > 1 or one.bulk:
        return one
    rows = rng.choice((1, 2, 4, 8))
    return replace(one, groups=max(1, one.groups // one.subgroup_rows) * rows, subgroup_rows=rows)


_CHANGES: tuple[Change, ...] = (
    *(_warps, _groups, _fetch, _fetch, _resident, _rereads, _weight, _vector),
    *(_bulk, _cluster, _subgroup_rows),
)
