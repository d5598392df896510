"""Settings of the documentation site, which ``python docs/build.py`` builds."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

sys.path.insert(0, str(Path(__file__).parent))
from _reference import exists, resolve

import regard

project, author = "regard", "The regard contributors"
copyright = f"{author}, Apache-2.0"
version = release = regard.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_design",
    "sphinx_copybutton",
]
root_doc = "index"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_static", "_scripts", "**/.ipynb_checkpoints"]
nitpicky = True
# Types of other libraries; without a network their own sites cannot be asked for links.
nitpick_ignore_regex = [(r"py:.*", r"(torch|numpy|np|scipy|sklearn|pandas|transformers|anywidget|matplotlib)\..*")]

# Inventories of other projects are read where the builder has a network and asks for it: Read the Docs, the workflow.
if os.environ.get("REGARD_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "sklearn": ("https://scikit-learn.org/stable", None),
    }

# Markdown
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebook holds its outputs; a test runs its code

# Docstrings
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Appearance: everything is served from the site itself.
html_theme = "furo"
html_title = f"regard {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"}), ("playground.js", {"defer": "defer"})]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
mathjax_path = "mathjax.js"
mathjax3_config = {"loader": {"load": []}, "options": {"enableMenu": False}}
pygments_style, pygments_dark_style = "default", "github-dark"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]


def _qualified(app: Any, doctree: nodes.document) -> None:  # noqa: ARG001
    """Qualify names of ours in full, so that none is taken for another of the same last part."""
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refdomain") == "py":
            node.attributes.pop("refspecific", None)  # with it, Sphinx takes any entry of the same last part
            target, module = node["reftarget"], node.get("py:module")
            within = node.get("py:class") if node["reftype"] in ("meth", "attr") else None
            node["reftarget"] = resolve(target, module, within) or target.lstrip(".")


def _link(app: Any, env: Any, node: nodes.Element, contnode: nodes.Node) -> nodes.Node | None:  # noqa: ARG001
    """Show as text: a type in a signature that has no entry, and a private name that a docstring explains."""
    if node.get("refdomain") != "py":
        return None
    if not isinstance(contnode, nodes.literal):
        return contnode
    described = str(node.source or "").partition("docstring of ")[2]
    described = described or ".".join(node.get(part) or "" for part in ("py:module", "py:class"))
    return contnode if exists(node["reftarget"], described) else None


def _outside_code(line: str) -> str:
    """Show single backticks as code, and bars and stars of formulas as they are."""
    parts = re.split(r"(``.*?``|:[\w:]+:`[^`]*`)", line)
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"`([^`<>]+)`(?![`_])", r"``\1``", parts[place])
        within = re.split(r"(``.*?``)", parts[place])
        within[::2] = [each.replace("|", "\\|") for each in within[::2]]
        parts[place] = "".join(within)
    return "".join(parts)


def _plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Prepare the text of a docstring; examples stay."""
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[place] = _outside_code(line)


def _skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:  # noqa: ARG001
    """Leave out what other libraries put into a class of ours."""
    module = getattr(obj, "__module__", None) or ""
    return True if module.startswith("sklearn") else None


def setup(app: Any) -> dict[str, Any]:
    """Add what resolves names."""
    app.connect("doctree-read", _qualified)
    app.connect("autodoc-skip-member", _skip)
    app.connect("missing-reference", _link)
    app.connect("autodoc-process-docstring", _plain, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
