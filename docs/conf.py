"""Settings of the documentation site, which `make docs` builds."""

import shutil
from pathlib import Path

HERE = Path(__file__).parent
GALLERY = HERE / "gallery"

# Sphinx reads pages below docs/ only; the notebooks stay where their tests run them.
GALLERY.mkdir(exist_ok=True)
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    shutil.copy(notebook, GALLERY)

project = "specmodel"
extensions = ["myst_nb"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
