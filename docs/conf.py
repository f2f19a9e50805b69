"""How Sphinx builds the manual, from the repository's Markdown and the docstrings of the package.

    sphinx-build -W --keep-going -c docs . build/manual

With ``-W`` a dead link, a name that cannot be resolved, or a public name that the reference lacks
ends the build with an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

# The manual is that of the checkout in which it stands, whichever is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import iree_lnbwd
from iree_lnbwd import cli

os.environ["COLUMNS"] = "96"  # of what commands say of themselves

project = "iree-lnbwd"
version = release = iree_lnbwd.__version__
copyright = "the authors of iree-lnbwd; licensed under Apache-2.0"

# The pages link to each other, and to files of the repository, by paths that also work where the
# repository is read. So its root is the root of the sources.
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "docs/**.md",
    "ir/README.md",
    "iree_lnbwd/emulator/**README.md",
    "scripts/results/*.md",
]
exclude_patterns = [".*", "build", "dist", "tests"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True
# Types in signatures need no page: they are other packages', or come out of public functions.
nitpick_ignore_regex = [("py:class", r"Tuned|(\w+\.)+\w+")]
default_role = "py:obj"
myst_heading_anchors = 3
autodoc_typehints_format = "short"
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"
html_theme = "furo"
html_title = f"iree-lnbwd {release}"
html_static_path = ["static"]
html_css_files = ["manual.css"]

# Each has a page of the reference, and what it needs. Where that is not installed, Sphinx stands in
# for it: signatures and docstrings are as they are in the code.
PUBLIC: dict[str, tuple[str, ...]] = {
    "iree_lnbwd": (),
    "iree_lnbwd.reference": (),
    "iree_lnbwd.graph": (),
    "iree_lnbwd.emulator": (),
    "iree_lnbwd.torch": ("torch",),
    "iree_lnbwd.jax": ("jax", "jaxlib"),
}
autodoc_mock_imports = [
    name for needed in PUBLIC.values() for name in needed if importlib.util.find_spec(name) is None
]

_log = logging.getLogger(__name__)
_SHAPE = re.compile(r"(?<!`)\[[^\[\]`]*\*\w[^\[\]`]*\]")  # [..., *normalized_shape]


class CommandHelp(Directive):
    """What a command says of itself: ``command-help:: compile``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The text of ``--help``, as it is."""
        words = [] if self.arguments[0] == "iree-lnbwd" else self.arguments
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if cli.main([*words, "--help"]) != 0:
                raise self.error(f"expected a command, got {self.arguments[0]}")
        text = said.getvalue()
        return [nodes.literal_block(text, text, language="text")]


def show_shapes_as_code(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """In docstrings, shapes stand plain; their stars would begin an emphasis."""
    lines[:] = [_SHAPE.sub(r"``\g<0>``", line) for line in lines]


def skip_fields(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Fields of named tuples are listed once, with what the class says of them."""
    is_field = (inspect.getdoc(obj) or "").startswith("Alias for field number")
    return True if is_field else None


def expect_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of each public name that the reference lacks, or that has no docstring."""
    listed = set(env.domains.python_domain.objects)
    for module in PUBLIC:
        with mock(autodoc_mock_imports):
            home = importlib.import_module(module)
        for name in home.__all__:
            value = getattr(home, name)
            explains = callable(value) or inspect.ismodule(value)
            if f"{module}.{name}" not in listed:
                _log.warning("%s.%s is public, and the reference lacks it", module, name)
            elif explains and not vars(value).get("__doc__", value.__doc__):
                _log.warning("%s.%s is public, and has no docstring", module, name)


def begin_at_the_index(app: Sphinx, error: Exception | None) -> None:
    """The manual's folder opens at its first page."""
    if error is None and app.builder.format == "html":
        place = f"{root_doc}.html"
        head = f'<title>{project}</title><meta http-equiv="refresh" content="0; url={place}">'
        text = f'<!DOCTYPE html>{head}<a href="{place}">The manual</a>\n'
        (app.outdir / "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Registers what is above."""
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", show_shapes_as_code, priority=400)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("env-check-consistency", expect_public_names)
    app.connect("build-finished", begin_at_the_index)
