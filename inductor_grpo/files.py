"""Files of ours beside Inductor's caches."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger("inductor_grpo")


def write(path: Path, text: str) -> None:
    """Written beside its place and moved there: a reader in another process sees all of it or nothing.

    What cannot be written is not: it would only have saved time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        log.debug("nothing could be stored at %s", path, exc_info=True)
