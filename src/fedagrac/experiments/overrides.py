"""Settings `key=value` that change the table of an experiment before it is checked."""

from __future__ import annotations

import copy
from typing import Any

from fedagrac.errors import InputError, nearest
from fedagrac.imports import last_name
from fedagrac.parsing import DEEPEST, ParseError, parse_toml

__all__ = ["TABLES", "apply_settings"]

TABLES = ("lr", "local", "calibration", "inner")
"""The settings of algorithms that may be tables."""


def apply_settings(table: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return the table with `key=value` settings applied.

    Keys are dotted (`data.clients=10`). Under `algorithm`, a number selects one entry (`algorithm.0.lr=0.1`), and
    a name selects the entries with that name (`algorithm.fedavg.lr=0.1`). Without either, all entries are set
    (`algorithm.lr=0.1`, `algorithm.local.momentum=0.9`). Values are TOML; a value that is not TOML is a string.

    Examples:
        >>> apply_settings({"rounds": 5, "data": {"clients": 2}}, ["rounds=7", "data.name=digits"])
        {'rounds': 7, 'data': {'clients': 2, 'name': 'digits'}}
    """
    result: dict[str, Any] = copy.deepcopy(table)
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise InputError("set", setting, "key=value, such as rounds=50 or data.clients=10")
        if len(parts) > DEEPEST or not _is_text(setting):
            raise InputError("set", setting, f"text, with at most {DEEPEST} parts in its key")
        for target in _targets(result, parts, setting):
            target[parts[-1]] = _value(text.strip())
    return result


def _targets(table: dict[str, Any], parts: list[str], setting: str) -> list[dict[str, Any]]:
    """Return the tables in which the last part of the key is set."""
    if parts[0] == "algorithm" and len(parts) > 1:
        entries: list[dict[str, Any]] = table.get("algorithm", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError("set", setting, "an experiment with algorithms: its algorithm is not [[algorithm]]")
        if len(parts) == 2:
            return entries
        if parts[1] in TABLES and not any(parts[1] in _names(entry) for entry in entries):
            return [_inside(entry, table.get("lr"), parts[1:-1], setting) for entry in entries]
        if parts[1].isdecimal():
            chosen = [entry for i, entry in enumerate(entries) if str(i) == parts[1]]
        else:
            chosen = [entry for entry in entries if parts[1] in _names(entry)]
        names = [str(entry.get("label", last_name(str(entry.get("name"))))) for entry in entries]
        if not chosen:
            accepted = f"algorithm.NAME.key with one of {', '.join(names)}{nearest(parts[1], names)}"
            raise InputError("set", setting, accepted)
        return [_inside(entry, table.get("lr"), parts[2:-1], setting) for entry in chosen]
    return [_descend(table, parts[:-1], setting)]


def _names(entry: dict[str, Any]) -> list[Any]:
    """Return what selects an algorithm: its name, also without the module of an import path, and its label."""
    name = entry.get("name")
    return [name, last_name(str(name)), entry.get("label")]


def _inside(entry: dict[str, Any], lr: Any, parts: list[str], setting: str) -> dict[str, Any]:
    """Return the table inside an algorithm's; a schedule of lr that it does not give is a copy of that of all."""
    if parts[:1] == ["lr"] and isinstance(lr, dict):
        entry.setdefault("lr", copy.deepcopy(lr))
    return _descend(entry, parts, setting)


def _descend(table: dict[str, Any], parts: list[str], setting: str) -> dict[str, Any]:
    """Return the table inside a table at a path of keys, and make it if it is missing."""
    for part in parts:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError("set", setting, f"a key inside a table: {part} is a value")
        table = inner
    return table


def _value(text: str) -> Any:
    """Return the TOML value of a text, or the text if it is not TOML."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ParseError:
        return text


def _is_text(argument: str) -> bool:
    """Return whether an argument is valid text. Python turns bytes that are not UTF-8 into lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True
