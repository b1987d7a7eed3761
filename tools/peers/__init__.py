"""Functions that other packages publish, unmodified, behind a head and through the backend.

``python -m inductor_grpo.tools.peers make DIR`` makes an environment with the packages in it, ``... run DIR`` runs
every case there and prints a table, ``... here`` runs those cases whose package is installed beside this one.
"""

from __future__ import annotations
