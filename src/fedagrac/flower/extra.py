"""The optional extra `flower`. Flower is imported only where it is used."""

from __future__ import annotations

from fedagrac.errors import FedagracError

__all__ = ["MissingExtraError", "require_flower"]


class MissingExtraError(FedagracError, ImportError):
    """Flower is not installed."""


def require_flower() -> None:
    """Raise an error that says what to install if Flower is missing."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        message = "this needs Flower, which is not installed: pip install 'fedagrac[flower]'"
        raise MissingExtraError(message) from error
