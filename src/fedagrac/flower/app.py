"""A new Flower app on disk."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from pathlib import Path

from fedagrac.errors import InputError
from fedagrac.files import make_folder, write_atomically
from fedagrac.version import __version__

__all__ = ["write_app"]

FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "{package}/task.py": "task.py.txt",
    "{package}/client_app.py": "client_app.py.txt",
    "{package}/server_app.py": "server_app.py.txt",
    "deploy/Dockerfile": "Dockerfile.txt",
    "deploy/requirements.txt": "requirements.txt.txt",
    "deploy/compose.yaml": "compose.yaml.txt",
    "deploy/prometheus.yml": "prometheus.yml.txt",
    "deploy/flower-superlink.service": "flower-superlink.service.txt",
    "deploy/flower-gate.service": "flower-gate.service.txt",
    "deploy/flower-supernode@.service": "flower-supernode@.service.txt",
}
"""The files of an app, and their templates."""


def write_app(folder: str | Path) -> Path:
    """Write a Flower app that is ready to run, and files to deploy it with, into a new or empty folder.

    Return the folder, which names the app.

    Examples:
        >>> import tempfile
        >>> made = write_app(Path(tempfile.mkdtemp()) / "my-app")
        >>> sorted(path.name for path in made.iterdir())
        ['README.md', 'deploy', 'my_app', 'pyproject.toml']
    """
    folder = Path(folder)
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-")
    package = name.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package):
        raise InputError("folder", str(folder), "a folder whose name begins with a letter, such as my-app")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("folder", str(folder), "a new or empty folder")
    make_folder(folder / package)
    make_folder(folder / "deploy")
    write_atomically(folder / package / "__init__.py", b'"""A Flower app."""\n')
    template = resources.files("fedagrac.flower").joinpath("template")
    for target, source in FILES.items():
        text = template.joinpath(source).read_text(encoding="utf-8")
        for placeholder, value in (("@NAME@", name), ("@PACKAGE@", package), ("@VERSION@", __version__)):
            text = text.replace(placeholder, value)
        write_atomically(folder / target.format(package=package), text.encode())
    return folder
