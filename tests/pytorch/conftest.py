"""PyTorch's own deprecations, and the devices that these tests run on."""

from __future__ import annotations

import pytest

# Raised inside PyTorch by imports of its own (2.13: inductor, export).
_DEPRECATIONS = (
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:`isinstance\\(treespec:FutureWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "pytorch":
            for deprecation in _DEPRECATIONS:
                item.add_marker(pytest.mark.filterwarnings(deprecation))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A device of PyTorch's."""
    return str(request.param)
