"""The README as an index of packages shows it, where links into the repository lead nowhere.

``IREE_LNBWD_URL`` is the repository's address, such as ``https://github.com/NAME/iree-lnbwd``. With
it, links and images are absolute, at the tag of the version, and the metadata has the project's
addresses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<path>(?!https?:|#)[^)]+)\)")


class Metadata(MetadataHookInterface):
    """What of the metadata is not the same everywhere."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called whenever metadata are made."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        if url := os.environ.get("IREE_LNBWD_URL", "").rstrip("/"):
            named = re.search(
                r'__version__ = "(.*)"', (root / "iree_lnbwd" / "version.py").read_text()
            )
            assert named is not None
            tag = f"v{named[1]}"

            def absolute(link: re.Match[str]) -> str:
                kind = "raw" if link["image"] else "blob"
                return f"{link['image']}{link['text']}({url}/{kind}/{tag}/{link['path']})"

            text = _LINK.sub(absolute, text)
            metadata["urls"] = {
                "Repository": url,
                "Documentation": f"{url}/blob/{tag}/docs/index.md",
                "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
