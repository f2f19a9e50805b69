"""The loads and stores by name."""

from __future__ import annotations

from collections.abc import Mapping

from iree_lnbwd.emulator.amdgcn.accesses.buffers import buffer_load, buffer_store
from iree_lnbwd.emulator.amdgcn.accesses.global_memory import global_load, global_store, scalar_load
from iree_lnbwd.emulator.amdgcn.accesses.items import LOADS, STORES, Decoder, Item
from iree_lnbwd.emulator.amdgcn.accesses.lds import (
    by_address,
    by_pattern,
    exchange,
    lds_load,
    lds_store,
)
from iree_lnbwd.emulator.amdgcn.accesses.scratch import scratch_load, scratch_store


def _table() -> dict[str, Decoder]:
    table: dict[str, Decoder] = {}
    for name, item in LOADS.items():
        table[f"global_load_{name}"] = global_load(item)
        table[f"buffer_load_{name}"] = buffer_load(item)
        table[f"scratch_load_{name}"] = scratch_load(item)
    for name, item in STORES.items():
        table[f"global_store_{name}"] = global_store(item)
        table[f"buffer_store_{name}"] = buffer_store(item)
        table[f"scratch_store_{name}"] = scratch_store(item)
    # gfx9's names, and those since gfx11.
    narrow = [f"{kind}{end}" for kind in ("u8", "i8", "u16") for end in ("", "_d16", "_d16_hi")]
    for name in ("b32", "b64", "b96", "b128", "i16", *narrow):
        for verb in ("read", "load"):
            table[f"ds_{verb}_{name}"] = lds_load(LOADS[name])
    for name in ("b8", "b16", "b8_d16_hi", "b16_d16_hi", "b32", "b64", "b96", "b128"):
        for verb in ("write", "store"):
            table[f"ds_{verb}_{name}"] = lds_store(STORES[name])
    for bits in (32, 64):
        item, size = Item(bits // 8), bits // 8
        for far, stride in (("", size), ("st64", 64 * size)):
            since_gfx11 = "_stride64" if far else ""
            load, store = lds_load(item, 2, stride), lds_store(item, 2, stride)
            table[f"ds_read2{far}_b{bits}"] = load
            table[f"ds_load_2addr{since_gfx11}_b{bits}"] = load
            table[f"ds_write2{far}_b{bits}"] = store
            table[f"ds_store_2addr{since_gfx11}_b{bits}"] = store
    for words in (1, 2, 3, 4, 8, 16):
        table[f"s_load_dword{f'x{words}' if words > 1 else ''}"] = scalar_load(Item(4 * words))
        table[f"s_load_b{32 * words}"] = scalar_load(Item(4 * words))
    for name in ("u8", "i8", "u16", "i16"):
        table[f"s_load_{name}"] = scalar_load(LOADS[name])
    table["ds_bpermute_b32"] = exchange(by_address)
    table["ds_swizzle_b32"] = exchange(by_pattern)
    return table


ACCESSES: Mapping[str, Decoder] = _table()
