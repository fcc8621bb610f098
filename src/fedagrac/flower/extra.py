"""The optional extra: Flower is imported where it is used, and its absence is said in one sentence."""

from __future__ import annotations

from fedagrac.errors import FedagracError

__all__ = ["MissingExtraError", "require_flower"]


class MissingExtraError(FedagracError, ImportError):
    """Flower is not installed."""


def require_flower() -> None:
    """Raise an error that says what to install, unless Flower is."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        said = "this needs Flower, which is not installed: pip install 'fedagrac[flower]'"
        raise MissingExtraError(said) from error
