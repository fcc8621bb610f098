"""Every kind of module gives the numbers of plain PyTorch in every engine; what cannot be batched is named."""

import re
from pathlib import Path

import pytest
from torch import nn
from torch.nn import functional

import fedagrac as fg
import module_kinds
from fedagrac.errors import InputError
from module_kinds import ENGINES, KINDS, Kind, difference, plain, simulated, works

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


def test_compiled_steps_that_give_other_numbers_are_not_used(monkeypatch):
    """Without our copies, torch's compiler adds the messages of all lanes in one place."""
    from fedagrac.engines.lanes import compiled

    monkeypatch.setattr(compiled, "_with_own_memory", lambda graph: graph)
    result, said = simulated("graph", "compiled", [2, 5])
    reason = "torch's compiler gives other numbers than the steps themselves"
    assert said == [f"steps run uncompiled, which is slower: {reason}"]
    assert difference(result, plain("graph", [2, 5])) < 1e-12


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_compiled_steps_are_compared_in_every_width_and_leave_the_wave_as_it_was(monkeypatch, shift):
    """A compiler that moves one number of the narrowest steps by a tenth of the step is noticed."""
    from fedagrac.engines.lanes import fixed

    true_compile, widths = fixed.compile_step, []

    def shifted(step, buffers, rounded):
        compiled = true_compile(step, buffers, rounded)
        widths.append(len(widths))

        def steps():
            before = buffers.X[0][0].clone()
            compiled()
            if len(widths) == 2:
                buffers.X[0][0] += shift * (buffers.X[0][0] - before)

        return steps

    monkeypatch.setattr(fixed, "compile_step", shifted)
    result, said = simulated("lora", "compiled", [2, 9])
    assert len(widths) == 2
    assert bool(said) == bool(shift)
    assert difference(result, plain("lora", [2, 9])) < 1e-12


def test_operations_without_a_rule_for_lanes_are_named_by_their_layer_once(monkeypatch):
    class Unpooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
            self.unpool = nn.MaxUnpool2d(2)

        def forward(self, x):
            return self.out(
                self.unpool(*functional.max_pool2d(self.first(x), 2, return_indices=True)).mean((2, 3))
            )

    monkeypatch.setitem(KINDS, "unpooled", Kind("unpooled", Unpooled, module_kinds.pictures))
    result, said = simulated("unpooled", "lanes", [2, 5])
    assert said == [
        "clients run one after another in layer unpool (MaxUnpool2d), which is slower: torch has no rule for many "
        "lanes of aten::max_unpool2d"
    ]
    assert difference(result, plain("unpooled", [2, 5])) < 1e-12


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_bags_of_embeddings_have_the_numbers_of_torch(monkeypatch, mode, weighted):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(module_kinds.VOCABULARY, 4, mode=mode), nn.Linear(4, 3)

        def forward(self, x):
            weights = (1 + x).double() if weighted else None
            return self.out(self.bag(x, per_sample_weights=weights))

    monkeypatch.setitem(KINDS, "bags", Kind("bags", Bags, module_kinds.characters))
    result, said = simulated("bags", "lanes", [2, 5])
    assert said == []
    assert difference(result, plain("bags", [2, 5])) < 1e-12


@pytest.mark.parametrize("padding", [0, 3])
def test_bags_of_embeddings_leave_out_padding(monkeypatch, padding):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(module_kinds.VOCABULARY, 4, padding_idx=padding)
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.bag(x))

    monkeypatch.setitem(KINDS, "bags", Kind("bags", Bags, module_kinds.characters))
    result, said = simulated("bags", "lanes", [2, 5])
    assert all("aten::embedding_bag" in text for text in said)  # torch's own, not another gradient
    assert difference(result, plain("bags", [2, 5])) < 1e-12


def test_devices_given_by_their_operations_refuse_a_module_whose_operations_torch_cannot_count(monkeypatch):
    monkeypatch.setattr("torch.utils.flop_counter.FlopCounterMode.__enter__", lambda self: 1 / 0)
    result, _ = simulated("lora", "serial", [2, 5])
    assert difference(result, plain("lora", [2, 5])) < 1e-12
    _, module, clients = module_kinds.make("lora")
    steps = fg.Devices([fg.DeviceProfile("board", flops=1e9)] * 2, deadline=1.0)
    with pytest.raises(InputError, match="step_flops"):
        fg.simulate(module, fg.Federation.from_arrays(clients), fg.FedAvg(lr=0.1), rounds=1, steps=steps)
