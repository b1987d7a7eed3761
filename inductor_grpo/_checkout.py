"""Finds ``inductor_grpo.patterns`` and ``inductor_grpo.tools`` in a checkout, where they lie beside this folder.

The parent folder must not be added to the package's ``__path__``: it holds the package itself, and whoever walks the
package (torch's logging does) would never come to an end.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

FOLDER = os.path.dirname(os.path.abspath(__file__))
BESIDE = {f"inductor_grpo.{name}": os.path.join(os.path.dirname(FOLDER), name) for name in ("patterns", "tools")}


class Finder:
    """A meta path finder for those two packages."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of one of the two; None for every other module."""
        folder = BESIDE.get(fullname)
        if folder is None or not os.path.isdir(folder):
            return None
        return importlib.util.spec_from_file_location(
            fullname, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def install() -> None:
    """Does nothing for an installed package, which has both inside of it."""
    if not os.path.isdir(os.path.join(FOLDER, "patterns")):
        sys.meta_path.insert(0, Finder)  # before the finder of another checkout that is installed for editing
