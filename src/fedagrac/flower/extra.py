"""The optional extra: Flower is imported where it is used, and its absence is said in one sentence."""

from __future__ import annotations

import importlib.util

from fedagrac.errors import FedagracError

__all__ = ["MissingExtraError", "require_flower"]


class MissingExtraError(FedagracError, ImportError):
    """Flower is not installed."""


def require_flower() -> None:
    """Raise an error that says what to install, unless Flower is."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtraError("this needs Flower, which is not installed: pip install 'fedagrac[flower]'")
