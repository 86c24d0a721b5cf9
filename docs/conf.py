"""The site: `sphinx-build -W docs docs/_build` builds it, and any warning ends the build.

The reference of Python names, commands, options and errors is written from the code at each
build. The extensions in docs/extensions say how.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "src"), str(DOCS / "extensions")]

import lockstep  # noqa: E402 # from this checkout

project = "Lockstep"
author = "The Lockstep authors"
copyright = "the Lockstep authors, Apache License 2.0"
version = release = lockstep.__version__
html_title = "Lockstep"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "python_reference",
    "command_reference",
    "repository_files",
    "catalogs",
    "contents",
    "course",
]
source_suffix = {".md": "markdown", ".markdown": "markdown", ".rst": "restructuredtext"}
exclude_patterns = [
    "_build",
    "extensions",
    "static",
    "explore",
    "course/exercises",
    "course/solutions",
    "**/.pytest_cache",
]
myst_heading_anchors = 4  # the anchors that GitHub gives
smartquotes = False  # --run stays --run
default_role = "py:obj"  # `name` in a docstring: code, and a link where it is a public name

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
