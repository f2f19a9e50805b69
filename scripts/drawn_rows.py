"""Numbers of rows, of samples and of heads, drawn at random: of `scripts/benchmark`."""

from __future__ import annotations

import random
from dataclasses import replace

from gpu_members import Member

# Elements of a tensor, as powers of 2: of 64 x 1024 x 1152, and of 32 x 4096 x 3072, or about that.
_LOW, _HIGH = 26.0, 28.6
_TOKENS = 64  # whose multiples a sample may have
_FEWEST_TOKENS, _MOST_TOKENS = 256, 4096
_HEADS = 4, 64


def drawn(member: Member, columns: int, seed: int) -> tuple[Member, int]:
    """The norm with samples or heads that were drawn, and M; the same for the same arguments.

    Its name ends in the rows of a sample, or in the number of heads.
    """
    rng = random.Random(f"{seed} {member.name} {columns}")
    rows = round(2 ** rng.uniform(_LOW, _HIGH) / columns)
    if member.tokens:
        tokens = _TOKENS * rng.randint(_FEWEST_TOKENS // _TOKENS, _MOST_TOKENS // _TOKENS)
        member = replace(member, name=f"{member.name}_{tokens}", tokens=tokens)
    elif member.heads:
        heads = rng.randint(*_HEADS)
        member = replace(member, name=f"{member.name}_{heads}", heads=heads)
    return member, member.whole_rows(rows)
