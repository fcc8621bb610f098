"""The import paths of models; `fedagrac.imports` follows them."""

from fedagrac.imports import Imports

__all__ = ["Imports"]
