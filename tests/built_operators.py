"""Builds the C++ operators in a process of its own, in an empty cache, as a first use does."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

# Builds them by four threads, without standard streams, where everybody can write; then keeps what
# was built where only we can. Says what came of it and how often they were built.
BUILD = """
import json, os, sys, threading, warnings
os.umask(0)
from pathlib import Path
try:
    from iree_lnbwd.torch import native

    folder, build, built, came = Path(os.environ["IREE_LNBWD_CACHE"]), None, [], []

    def once():
        if not built:
            built.append(build())
        builds.append(1)
        return built[0]

    builds, build, native._build_and_load = [], native._build_and_load, once
    for mode in (0o777, 0o700):
        folder.chmod(mode)
        native.load.cache_clear()
        native._loaded.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            threads = [
                threading.Thread(target=lambda: came.append(native.load())) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        said = [str(w.message) for w in caught if w.category is RuntimeWarning]
        came += [len(builds), sorted(set(said)), sum(p.is_file() for p in folder.rglob("*"))]
except BaseException as error:
    came = repr(error)
Path(sys.argv[1]).write_text(json.dumps(came))
"""


def build(folder: Path) -> Path:
    """The cache that holds them, below a folder. What came of a build before is checked again."""
    cache, came = folder / "cache", folder / "came"
    if not came.exists():
        cache.mkdir(parents=True)
        shell = 'exec "$@" <&- >&- 2>&-'
        words = ["/bin/sh", "-c", shell, "sh", sys.executable, "-c", BUILD, str(came)]
        environment = {**os.environ, "IREE_LNBWD_CACHE": str(cache)}
        assert subprocess.run(words, env=environment, check=False).returncode == 0
    refused, kept = [True] * 4, [True] * 4
    said = (
        f"compiled operators not cached: {cache}: others can write to it, its mode is 0777 "
        f"(chmod go-w {cache}); IREE_LNBWD_CACHE can name a folder of your own"
    )
    assert json.loads(came.read_text()) == [*refused, 1, [said], 0, *kept, 2, [], 2]
    assert not any(path.stat().st_mode & 0o022 for path in cache.rglob("*"))
    made = [path for path in cache.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    return cache
