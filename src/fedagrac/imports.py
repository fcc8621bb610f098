"""The user's own models, data and algorithms by import path, "module:factory", and which paths may be followed.

Importing a module runs its code, and the factory is called with arguments from the same file: `os:system` with
`command = "..."` would run a command. An experiment file may come from anywhere. Unless the user trusts it, it may
therefore name only modules beside it or in the current folder. The description of an experiment in a folder of
results may name none. The decision depends on the name and on which files exist; nothing is imported before.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from fedagrac.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Imports", "is_import_path", "last_name"]


def is_import_path(name: object) -> bool:
    """Return whether a name is meant as an import path.

    Examples:
        >>> is_import_path("my_data:load"), is_import_path("digits")
        (True, False)
    """
    return isinstance(name, str) and ":" in name


def last_name(name: str) -> str:
    """Return a short name for tables and folders: the part of an import path after its module, or the name itself.

    Examples:
        >>> last_name("my_algorithms.fast:Mine"), last_name("fedavg")
        ('Mine', 'fedavg')
    """
    return name.rpartition(":")[2] or name


@dataclass(frozen=True)
class Imports:
    """Decides which import paths may be followed, and follows them.

    Attributes:
        beside: the folder of the experiment file; it is searched for modules before the current folder.
        trusted: whether any path may be followed, also to installed modules and the standard library.
        local: whether paths to local files may be followed without trust. False for a folder of results, which
            nobody reads before use.

    Examples:
        >>> Imports(trusted=True).build("torch.nn:Linear", {"in_features": 2, "out_features": 3})
        Linear(in_features=2, out_features=3, bias=True)
        >>> Imports(trusted=True).build("fractions:Fraction", {"numerator": 3}, int)
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: name = 'fractions:Fraction': expected a factory of int; it returned Fraction
    """

    beside: Path | None = None
    trusted: bool = False
    local: bool = True

    def check(self, path: str) -> None:
        """Refuse a path that is malformed or may not be followed."""
        self._folder(path)

    @overload
    def build(self, path: str, arguments: Mapping[str, Any]) -> nn.Module: ...

    @overload
    def build(
        self, path: str, arguments: Mapping[str, Any], kind: type[Any], offered: Mapping[str, Any] | None = None
    ) -> Any: ...

    def build(
        self,
        path: str,
        arguments: Mapping[str, Any],
        kind: type[Any] | None = None,
        offered: Mapping[str, Any] | None = None,
    ) -> Any:
        """Import the module, call its factory, and return what it made.

        Args:
            path: module:factory. The factory is a function or a class.
            arguments: the arguments of the factory.
            kind: what the factory must return; None for a torch.nn.Module.
            offered: further arguments, each of which is passed only if the factory has a parameter of that name.
        """
        factory = self._factory(path)
        parameters = _parameters(factory)
        given = {name: value for name, value in (offered or {}).items() if name in parameters}
        given |= arguments
        _check_arguments(path, factory, given)
        try:
            made = factory(**given)
        except InputError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise InputError("name", path, f"a factory that works ({type(error).__name__}: {error})") from error
        if kind is None:
            from torch import nn

            kind = nn.Module
        if not isinstance(made, kind):
            returned = f"a factory of {kind.__name__}; it returned {type(made).__name__}"
            raise InputError("name", path, returned)
        return made

    def named(self, path: str) -> Any:
        """Import the module, and return the function or class that the path names.

        Examples:
            >>> Imports(trusted=True).named("math:floor")(2.5)
            2
        """
        return self._factory(path)

    def parameters(self, path: str) -> dict[str, Any]:
        """Import the module, and return the parameters of its factory with their defaults; None without one.

        Examples:
            >>> Imports(trusted=True).parameters("statistics:quantiles")
            {'data': None, 'n': 4, 'method': 'exclusive'}
        """
        return {
            name: None if parameter.default is parameter.empty else parameter.default
            for name, parameter in _parameters(self._factory(path)).items()
        }

    def _folder(self, path: str) -> Path | None:
        """Return the folder with the module's file; None if the module is imported by its name."""
        module, _, factory = path.partition(":")
        parts = module.split(".")
        if not all(part.isidentifier() for part in (*parts, factory)):
            raise InputError("name", path, 'module:factory, such as "my_models:net"')
        if self.trusted:
            return None
        if not self.local:
            raise InputError(
                "name",
                path,
                "the experiment file again, beside which this module lies (fedagrac run EXPERIMENT.toml ...), or "
                "`trusted`: the name comes from a folder of results, and importing it runs its code",
            )
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
        """Return the folders that are searched for local modules."""
        return [*([] if self.beside is None else [self.beside.absolute()]), Path.cwd()]

    def _factory(self, path: str) -> Any:
        """Import the module and return its factory."""
        folder = self._folder(path)
        module_name, _, factory_name = path.partition(":")
        prefix = "" if folder is None else f"{_package_of(folder)}."
        try:
            with _searched(self._folders() if folder is None else [folder]):
                importlib.invalidate_caches()
                module = importlib.import_module(prefix + module_name)
            factory = getattr(module, factory_name)
        except Exception as error:  # importing a module may raise anything
            accepted = f"module:factory that can be imported ({type(error).__name__}: {error})"
            raise InputError("name", path, accepted) from error
        # a local file with `from os import system` must not make os.system available
        if folder is not None and not str(getattr(factory, "__module__", "")).startswith(prefix):
            accepted = f"a function or class that {module_name} itself defines (or `trusted`)"
            raise InputError("name", path, accepted)
        return factory


def _parameters(factory: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that may be given by name; empty if they are not known."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # it cannot be called, or it is written in C
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in named}


def _check_arguments(path: str, factory: Any, arguments: Mapping[str, Any]) -> None:
    """Check that a factory takes these arguments and needs no others."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        accepted = f"a factory that takes {', '.join(arguments) or 'nothing'} ({error})"
        raise InputError("name", path, accepted) from error


def _package_of(folder: Path) -> str:
    """Return the name of a package whose modules are exactly the files of this folder."""
    name = f"fedagrac_local_{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    if name not in sys.modules:
        package = types.ModuleType(name, f"The files of {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


@contextlib.contextmanager
def _searched(folders: list[Path]) -> Iterator[None]:
    """Let modules import their neighbours in these folders, as a script can."""
    added = [str(folder) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
