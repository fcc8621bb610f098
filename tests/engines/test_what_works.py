"""Every kind of module gives the numbers of plain PyTorch in every engine; what cannot be batched is named."""

import re
from pathlib import Path

import pytest

import fedagrac as fg
import module_kinds
from module_kinds import ENGINES, KINDS, difference, plain, simulated, works

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows_of_the_page():
    """Return the cells of the table "What works" by module and engine."""
    text = PAGE.read_text()
    section = text[text.index("## What works") :]
    lines = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {title: dict(zip(ENGINES, cells, strict=True)) for title, *cells in lines[1:]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", KINDS)
def test_what_the_page_says_about_a_module_is_true(name, engine):
    assert rows_of_the_page()[KINDS[name].title][engine] == works(name, engine)


def test_the_page_has_a_row_for_every_kind():
    assert list(rows_of_the_page()) == ["---", *(kind.title for kind in KINDS.values())][1:]


@pytest.mark.parametrize("name", KINDS)
def test_calibration_and_first_gradients_do_not_depend_on_the_engine(name):
    algorithm = fg.FedaGrac(lr=0.05, first_steps=2)
    serial, lanes = (simulated(name, engine, [2, 6], algorithm)[0] for engine in ("serial", "lanes"))
    assert difference(lanes, serial.model().state_dict()) < 1e-12


@pytest.mark.parametrize("name", ["resnet-batch", "own-buffer", "spectral-norm"])
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_buffers_that_move_are_averaged_with_the_weights_of_the_clients(name, engine):
    result, _ = simulated(name, engine, [3, 2])
    state = plain(name, [3, 2])
    moving = {key for key in state if key not in result.params}
    assert set(result.buffers) == moving
    assert all((result.buffers[key].double() - state[key].double()).abs().max() < 1e-12 for key in moving)


def test_a_wrong_vmap_rule_is_noticed(monkeypatch):
    """Without our rule for embeddings, torch's forgets that padding has no gradient."""
    from torch.nn import functional

    from fedagrac.engines.lanes import layers

    monkeypatch.setattr(layers, "_embedding", functional.embedding)
    result, said = simulated("bert", "lanes", [2, 3])
    assert [text for text in said if "another gradient than the module itself" in text]
    assert difference(result, module_kinds.plain("bert", [2, 3])) < 1e-12
