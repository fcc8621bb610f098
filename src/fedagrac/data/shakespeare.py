"""Shakespeare's plays as a federation: every speaking role is a client, which predicts its next character.

The task is that of LEAF (Caldas et al. 2018): from 80 characters of a role's speech to the character that follows.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.data.sources import Samples
from fedagrac.errors import InputError, count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["ALPHABET", "PLAYS", "UNKNOWN", "WINDOW", "encode", "roles", "shakespeare", "speeches"]

WINDOW = 80
"""The characters of an input, as in LEAF."""

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters, in its order. A character's number is its place here."""

UNKNOWN = ">"
"""The character that stands for every one outside the alphabet; no play uses it otherwise."""

SHORTEST = 101
"""The shortest speech that leaves a training and a test sample: its first four fifths have 81 characters."""

PLAYS = {
    "alls_well_that_ends_well": "All's Well That Ends Well",
    "antony_and_cleopatra": "Antony and Cleopatra",
    "as_you_like_it": "As You Like It",
    "comedy_of_errors": "The Comedy of Errors",
    "coriolanus": "Coriolanus",
    "cymbeline": "Cymbeline",
    "hamlet": "Hamlet",
    "henry_iv_part_1": "Henry IV, Part 1",
    "henry_iv_part_2": "Henry IV, Part 2",
    "henry_v": "Henry V",
    "henry_vi_part_1": "Henry VI, Part 1",
    "henry_vi_part_2": "Henry VI, Part 2",
    "henry_vi_part_3": "Henry VI, Part 3",
    "henry_viii": "Henry VIII",
    "john": "King John",
    "julius_caesar": "Julius Caesar",
    "lear": "King Lear",
    "loves_labours_lost": "Love's Labour's Lost",
    "macbeth": "Macbeth",
    "measure_for_measure": "Measure for Measure",
    "merchant_of_venice": "The Merchant of Venice",
    "merry_wives_of_windsor": "The Merry Wives of Windsor",
    "midsummer_nights_dream": "A Midsummer Night's Dream",
    "much_ado_about_nothing": "Much Ado About Nothing",
    "othello": "Othello",
    "pericles": "Pericles",
    "richard_ii": "Richard II",
    "richard_iii": "Richard III",
    "romeo_and_juliet": "Romeo and Juliet",
    "taming_of_the_shrew": "The Taming of the Shrew",
    "tempest": "The Tempest",
    "timon_of_athens": "Timon of Athens",
    "tragedy_of_titus_andronicus": "Titus Andronicus",
    "troilus_and_cressida": "Troilus and Cressida",
    "twelfth_night": "Twelfth Night",
    "two_gentlemen_of_verona": "The Two Gentlemen of Verona",
    "winters_tale": "The Winter's Tale",
}
"""The titles of the plays by the names of their files, without the ending `_gut.txt`."""

_DIRECTION = re.compile(r"[\[{][^\[\]{}]{0,1000}[\]}]")
_BEGINNING = re.compile(r"(?:ACT|Act) (?:I|1|FIRST)\b|(?:THE )?PROLOGUE|INDUCTION")
_SECTION = re.compile(
    r"(?:ACT|Act) (?:[IVX]+|\d|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b|(?:SCENE|Scene)\b"
    r"|INDUCTION|DUMB SHOW|THE ORDER OF THE CORONATION"
)
_FRAME = re.compile(r"(?:THE )?(PROLOGUE|EPILOGUE)\.?")
_LABEL = re.compile(r"\s+[A-Z]+\.?|[A-Z ]{4,}\.?")  # of a song or its stanzas, "THE END", a title
_TOGETHER = re.compile(r"(?:ALL|BOTH)\b|.*[,&]|.*\bAND\b")
_WORD = r"[A-Z0-9][A-Z0-9'-]*"
_HEADINGS = {
    "capitals": re.compile(rf"({_WORD}(?:[ .,]+(?:{_WORD}|and|&c?))*)\."),
    "capitalised": re.compile(r"([A-Z0-9][\w'-]*(?:[ .]+(?:[A-Z0-9][\w'-]*|and))*)\."),
    "bare": re.compile(rf"({_WORD}(?: {_WORD})*)"),  # only A Midsummer Night's Dream
}
_LONGEST_HEADING = 40


def shakespeare(
    folder: Path,
    clients: int | None = None,
    least: int = 200,
    stride: int = 1,
    test_stride: int | None = None,
    seed: int = 0,
) -> Samples:
    """Read the plays: one client for every role, 80 characters to predict the next one.

    A role's speeches are joined in order. The targets of its training samples, and all characters of their inputs,
    come from the first four fifths of the text; the targets of its test samples are the last fifth. The inputs of
    the first 80 test samples begin in the first four fifths, where the role's text goes on from.

    Args:
        folder: the folder with the texts.
        clients: how many roles to draw, by the seed; None for all. More clients include the roles of fewer.
        least: the shortest text of a role, in characters.
        stride: the distance of one training sample to the next. LEAF uses every position, 1.
        test_stride: the distance of one test sample to the next; None for that of the training samples.
        seed: the seed of the draw.
    """
    count("least", least, least=SHORTEST)
    count("stride", stride)
    count("test_stride", 1 if test_stride is None else test_stride)
    texts = roles(folder, least)
    if not texts:
        raise InputError("least", least, "at most the characters of the longest role")
    chosen = np.arange(len(texts))
    if clients is not None:
        if count("clients", clients) > len(texts):
            raise InputError("clients", clients, f"at most {len(texts)}, the roles of at least {least} characters")
        chosen = np.sort(stream(seed, Purpose.DATA).permutation(len(texts))[:clients])
    names = [list(texts)[i] for i in chosen]
    train, test = [], []
    for name in names:
        codes = encode(texts[name])
        end = len(codes) - len(codes) // 5
        train.append(_windows(codes[:end], WINDOW, stride))
        test.append(_windows(codes, end, test_stride or stride))
    return Samples(
        train=_joined(train), test=_joined(test), natural=_runs(train), names=tuple(names), tests=_runs(test)
    )


def _windows(
    codes: npt.NDArray[np.uint8], first: int, stride: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the inputs and targets whose targets are at first, first + stride, ..."""
    windows = np.lib.stride_tricks.sliding_window_view(codes, WINDOW + 1)[first - WINDOW :: stride]
    return windows[:, :WINDOW], windows[:, WINDOW].astype(np.int64)


def _joined(
    parts: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    return np.concatenate([inputs for inputs, _ in parts]), np.concatenate([targets for _, targets in parts])


def _runs(parts: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]) -> list[npt.NDArray[np.int64]]:
    """Return the sample numbers of each part after the parts are joined."""
    ends = np.cumsum([len(targets) for _, targets in parts])
    return [np.arange(end - len(targets), end) for end, (_, targets) in zip(ends, parts, strict=True)]


def encode(text: str) -> npt.NDArray[np.uint8]:
    """Return the numbers of the characters in `ALPHABET`; other characters get the number of `UNKNOWN`.

    Examples:
        >>> encode("A b@").tolist()
        [25, 1, 54, 23]
    """
    numbers = np.full(256, ALPHABET.index(UNKNOWN), np.uint8)
    numbers[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return numbers[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def roles(folder: Path, least: int = 200) -> dict[str, str]:
    """Return the text of every role with at least so many characters, by names such as "MACBETH (Macbeth)"."""
    texts: dict[str, str] = {}
    for file, title in PLAYS.items():
        path = folder / f"{file}_gut.txt"
        spoken = speeches(path.read_text("latin-1"))
        if not spoken:
            raise InputError(str(path), "no speeches", "a play with headings of its speakers")
        texts |= {f"{role} ({title})": text for role, text in spoken.items() if len(text) >= least}
    return texts


def speeches(play: str) -> dict[str, str]:
    r"""Return what each role of a play says, its speeches joined and all white space made single spaces.

    A speech is a paragraph whose first line is the heading of its speaker, and the paragraphs that follow up to
    the next heading. Plays write headings as `KING HENRY.`, as `Ham.`, or (A Midsummer Night's Dream) as
    `THESEUS`; the way that matches most often is the play's. Names that were found so are also headings without
    their full stop and in front of a speech on the same line. Stage directions in brackets, and what several roles
    say together, are left out.

    Examples:
        >>> play = "ACT I.\n\nBEN.\nWho's [to ANN] there?\n\nANN.\nI.\n\n[Exit.]\n\nBEN.\nCome\nin."
        >>> speeches(play)
        {'BEN': "Who's there? Come in.", 'ANN': 'I.'}
    """
    paragraphs = list(_paragraphs(play))
    names = _names(paragraphs)
    spoken: dict[str, list[str]] = {}
    speaker: str | None = None
    for paragraph in paragraphs:
        frame = _FRAME.fullmatch(paragraph[0].strip())
        heading = _heading(paragraph[0], names)
        if heading is not None:
            speaker, paragraph[0] = heading
        elif frame is not None:
            speaker, paragraph[0] = frame[1], ""
        elif _SECTION.match(paragraph[0]):
            speaker = None
        for line in paragraph:
            if line.endswith(".") and line[:-1] in names:  # a heading without the empty line before it
                speaker = line[:-1]
            elif speaker is not None and not _TOGETHER.match(speaker) and not _LABEL.fullmatch(line):
                spoken.setdefault(speaker, []).append(line)
    return {role: " ".join(" ".join(lines).split()) for role, lines in spoken.items()}


def _paragraphs(play: str) -> Iterator[list[str]]:
    """Yield the lines of every paragraph from the beginning of the play on, without stage directions."""
    text = _DIRECTION.sub(" ", _DIRECTION.sub(" ", play))  # twice, for brackets inside brackets
    begun = False
    for block in re.split(r"\n\s*\n", text):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        begun = begun or bool(lines and _BEGINNING.match(lines[0]))
        if begun and lines and lines[0][0] not in "[{":  # a direction whose bracket is never closed
            yield [re.sub(r"\[.*|[]{}]", "", line) for line in lines]


def _names(paragraphs: list[list[str]]) -> set[str]:
    """Return the names in the headings that are written in the play's way."""
    found: dict[str, Counter[str]] = {way: Counter() for way in _HEADINGS}
    for first, *others in paragraphs:
        if others and len(first) <= _LONGEST_HEADING and not _SECTION.match(first):
            for way, pattern in _HEADINGS.items():
                match = pattern.fullmatch(first)
                if match is not None:
                    found[way][_name(match[1])] += 1
    sizes = {way: names.total() for way, names in found.items()}
    # a heading in capitals is capitalised too, so that way must match far more often to be the play's
    if sizes["capitalised"] > 2 * max(sizes["capitals"], sizes["bare"]):
        return set(found["capitalised"])
    return set(found["bare" if sizes["bare"] > sizes["capitals"] else "capitals"])


def _heading(line: str, names: set[str]) -> tuple[str, str] | None:
    """Return the speaker and the rest of the line, or None if the line does not begin with a heading."""
    name = _name(line.removesuffix("."))
    if name in names and not line.startswith(" "):
        return name, ""
    for stop in re.finditer(r"\.", line[:_LONGEST_HEADING]):
        name, rest = line[: stop.start()], line[stop.end() :]
        if name in names or (name.istitle() and _name(name) in names):
            return _name(name), rest
    return None


def _name(heading: str) -> str:
    return " ".join(heading.upper().split())
