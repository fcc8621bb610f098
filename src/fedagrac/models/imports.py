"""Models of the user's own by import path, "module:factory", and which of them a file may name.

Importing a module runs it, and its factory is called with the arguments that stand beside its name: `os:system`
with `command = "..."` runs a command. An experiment file may come from anywhere, so it may name only what lies
beside it or in the current folder, unless the user says that it is trusted. That is decided by the name and by
which files exist; nothing is imported before.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedagrac.errors import InputError

__all__ = ["Imports"]


@dataclass(frozen=True)
class Imports:
    """Which import paths are followed.

    Attributes:
        beside: the folder of the experiment file; local files are looked for there, then in the current folder.
        trusted: follow any path, to installed modules and those of the standard library too.

    Examples:
        >>> Imports(trusted=True).build("torch.nn:Linear", {"in_features": 2, "out_features": 3})
        Linear(in_features=2, out_features=3, bias=True)
    """

    beside: Path | None = None
    trusted: bool = False

    def check(self, path: str) -> None:
        """Refuse a path that is none, or that may not be followed."""
        self._folder(path)

    def build(self, path: str, sizes: Mapping[str, Any]) -> nn.Module:
        """Import the module, call its factory with the sizes, and return what it made."""
        factory = self._factory(path)
        try:
            model = factory(**sizes)
        except TypeError as error:
            accepted = f"a factory that takes {', '.join(sizes) or 'nothing'} ({error})"
            raise InputError("name", path, accepted) from error
        except Exception as error:  # whatever the user's code raises
            raise InputError("name", path, f"a factory that works ({type(error).__name__}: {error})") from error
        if not isinstance(model, nn.Module):
            raise InputError("name", path, f"a factory of torch.nn.Module; it returned {type(model).__name__}")
        return model

    def _folder(self, path: str) -> Path | None:
        """Return the folder that holds the module as a file; None where it is to be imported by its name."""
        module, _, factory = path.partition(":")
        parts = module.split(".")
        if not all(part.isidentifier() for part in (*parts, factory)):
            raise InputError("name", path, 'module:factory, such as "my_models:net"')
        if self.trusted:
            return None
        for folder in self._folders():
            stem = os.path.join(folder, *parts)
            if os.path.isfile(f"{stem}.py") or os.path.isfile(os.path.join(stem, "__init__.py")):
                return folder
        raise InputError(
            "name",
            path,
            f"a file {'/'.join(parts)}.py beside the experiment file or in the current folder; a module from "
            "elsewhere needs `trusted`, because importing it runs its code: read the experiment file first",
        )

    def _folders(self) -> list[Path]:
        return [*([] if self.beside is None else [self.beside.absolute()]), Path.cwd()]

    def _factory(self, path: str) -> Any:
        folder = self._folder(path)
        module_name, _, factory_name = path.partition(":")
        prefix = "" if folder is None else f"{_package_of(folder)}."
        try:
            with _searched(self._folders() if folder is None else [folder]):
                importlib.invalidate_caches()
                module = importlib.import_module(prefix + module_name)
            factory = getattr(module, factory_name)
        except Exception as error:  # a module may raise anything while it is imported
            accepted = f"module:factory that can be imported ({type(error).__name__}: {error})"
            raise InputError("name", path, accepted) from error
        # a local file that does `from os import system` lends no file that name
        if folder is not None and not str(getattr(factory, "__module__", "")).startswith(prefix):
            accepted = f"a function or class that {module_name} itself defines (or `trusted`)"
            raise InputError("name", path, accepted)
        return factory


def _package_of(folder: Path) -> str:
    """Return the name of a package that is this folder: what is imported from it lies there and nowhere else."""
    name = f"fedagrac_local_{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    if name not in sys.modules:
        package = types.ModuleType(name, f"The files of {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


@contextlib.contextmanager
def _searched(folders: list[Path]) -> Iterator[None]:
    """Let modules inside import their neighbours, as a script does."""
    added = [str(folder) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
