"""Which code measured what is kept on disk: a measurement is valid for the code of the engines that made it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from fedagrac.version import __version__

__all__ = ["code_version"]


@functools.cache
def code_version() -> str:
    """Return the version of the package and a digest of the engines' source files, such as "0.1.0+3f6a0c9be2".

    Without source files on disk (an archive, compiled files alone) the version stands for the code.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:10]}"
