"""The lanes engine: runs many clients as one batch of local steps."""

from fedagrac.engines.lanes.engine import LanesEngine

__all__ = ["LanesEngine"]
