"""The pass, on and off; inductor itself is not imported before somebody compiles with it."""

from __future__ import annotations

import logging
from typing import NamedTuple

from iree_lnbwd import notices
from iree_lnbwd.errors import one_line
from iree_lnbwd.torch.inductor.arrivals import when_imported
from iree_lnbwd.torch.inductor.state import STATE, Folded

_COMPILER = "torch._inductor.compile_fx"  # imported before a first graph is compiled

_log = logging.getLogger("iree_lnbwd.torch")


class InductorStatus(NamedTuple):
    """What becomes of norms in inductor's graphs.

    Attributes:
        why_not: Why graphs do not go through our pass; None if they do.
        others: The names of the passes that run before it, or in its place.
        folded: What it did in this process, to graphs that were in no cache.
    """

    why_not: str | None
    others: tuple[str, ...]
    folded: Folded

    def __str__(self) -> str:
        """A line."""
        others = ", ".join(self.others)
        if self.why_not is not None:
            return self.why_not + (f": {others}" if others else "")
        did = ", ".join(f"{count} {what}" for what, count in self.folded._asdict().items())
        return f"the pass of iree-lnbwd is in place{others and f', after {others}'}; folded {did}"


def use_inductor_pass(on: bool = True) -> None:
    """Lets our pass change inductor's graphs, or not; it does from the start.

    Under ``torch.compile`` with inductor, the pass has inductor compute the forwards of our norms,
    fused with what is around them, but for rows of 16384 columns and more. It moves the addition of
    a skip connection's gradient, a cast of the gradient that arrives, and the sum over rows that is
    the gradient of a bias before the norm, into our backwards. The backwards of PyTorch's own norms
    are treated alike under `enable`.

    Rows that were cast to f32 are read as they were before, and scales of a norm's output become
    weights of its backward. Where IREE's compiler is not installed, backwards that there is no
    module for are inductor's, which is logged once.

    It is inductor's ``post_grad_custom_post_pass``, and ``joint_custom_pre_pass`` for these two,
    after the passes that are there already. If another takes its place later, `status` says so, and
    `enable`, `replace_norms` and new modules put it back, after that one. Compiled graphs stay as
    they are.

    Args:
        on: Whether it may.

    Raises:
        TypeError: Naming the argument.
    """
    if not isinstance(on, bool):
        raise TypeError(f"on: expected True or False, got {type(on).__name__}")
    STATE.is_on = on
    place()


def place() -> None:
    """Puts the pass into inductor's configuration, once inductor is imported."""
    when_imported(_COMPILER, _arrive)


def observe() -> None:
    """Notes in a traced call of ours if the pass would not see it."""
    if STATE.has_arrived and STATE.is_on:
        from iree_lnbwd.torch.inductor import placing

        placing.observe()


def status() -> InductorStatus:
    """Whether graphs that this thread compiles go through the pass, and what it did."""
    folded = STATE.folded()
    if not STATE.is_on:
        return InductorStatus("the pass of iree-lnbwd is switched off", (), folded)
    if not STATE.has_arrived:
        return InductorStatus("not in use yet", (), folded)
    from iree_lnbwd.torch.inductor import placing

    others = placing.others()
    if not placing.is_placed():
        return InductorStatus("other passes are in the place of iree-lnbwd's", others, folded)
    if STATE.displaced_by is not None:
        said = "other passes were in the place of iree-lnbwd's in a compilation"
        return InductorStatus(said, STATE.displaced_by, folded)
    return InductorStatus(None, others, folded)


def _arrive() -> None:
    try:
        from iree_lnbwd.torch.inductor import placing

        placing.place()
    except Exception as error:  # a PyTorch that changed: compiling goes on as without the pass
        notices.log(_log, "inductor's graphs stay as they are: %s", one_line(error))
    else:
        STATE.has_arrived = True
