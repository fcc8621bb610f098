"""Tiny networks of many architectures of transformers train as lanes and get the numbers of serial."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, CLASSES = 30, 12, 3
RNG = np.random.default_rng(0)
BERT = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LLAMA = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "use_cache": False,
}  # fmt: skip
CLASSIFIERS = {
    "DistilBert": {
        "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "dropout": 0.0, "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "Roberta": BERT,
    "Albert": BERT | {"embedding_size": 4, "classifier_dropout_prob": 0.0},
    "Electra": BERT | {"embedding_size": 4},
    "DebertaV2": BERT | {"pooler_dropout": 0.0},
    "FNet": {
        "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "hidden_dropout_prob": 0.0,
        "max_position_embeddings": LENGTH,
    },
}  # fmt: skip
GENERATORS = {
    "GPT2": {
        "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "use_cache": False,
    },
    "GPTNeoX": {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
        "use_cache": False,
    },
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 4},
    "Gemma": LLAMA | {"head_dim": 4},
    "Qwen2": LLAMA,
    "Mamba": {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "use_cache": False},
    "Bloom": {
        "hidden_size": 8, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "use_cache": False,
    },
    "OPT": {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16, "dropout": 0.0,
        "word_embed_proj_dim": 8, "max_position_embeddings": LENGTH, "use_cache": False,
    },
}  # fmt: skip
VIEWERS = {
    "ViT": BERT | {"image_size": 32, "patch_size": 8},
    "DeiT": BERT | {"image_size": 32, "patch_size": 8},
    "Dinov2": {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    },
    "Swin": {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
        "drop_path_rate": 0.0,
    },
    "ConvNext": {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "PoolFormer": {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1], "drop_path_rate": 0.0},
    "ResNet": {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"},
    "MobileNetV2": {"depth_multiplier": 0.1, "output_stride": 8, "classifier_dropout_prob": 0.0},
}  # fmt: skip
ALONE = {  # one client after another, and why
    "Bloom": "setup_context",
    "OPT": "data-dependent control flow",
}


class Logits(nn.Module):
    def __init__(self, name, ending, **sizes):
        super().__init__()
        config = getattr(transformers, f"{name}Config")(**sizes)
        self.net = getattr(transformers, name + ending)(config)

    def forward(self, x):
        logits = self.net(x).logits
        return logits if logits.ndim == 2 else logits[:, -1]


def network(name):
    """Return a network and the inputs and number of classes of its task."""
    if name in CLASSIFIERS:
        net = Logits(name, "ForSequenceClassification", vocab_size=WORDS, num_labels=CLASSES, **CLASSIFIERS[name])
        return net, lambda n: RNG.integers(2, WORDS, (n, LENGTH)), CLASSES
    if name in GENERATORS:
        ending = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        net = Logits(name, ending, vocab_size=WORDS, **GENERATORS[name])
        return net, lambda n: RNG.integers(2, WORDS, (n, LENGTH)), WORDS
    net = Logits(name, "ForImageClassification", num_labels=CLASSES, **VIEWERS[name])
    return net, lambda n: RNG.normal(size=(n, 3, 32, 32)), CLASSES


@pytest.mark.parametrize("name", [*CLASSIFIERS, *GENERATORS, *VIEWERS])
def test_architectures_of_transformers(name):
    torch.manual_seed(0)
    ends = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module, inputs, classes = network(name)
        arrays = [(inputs(10), RNG.integers(0, classes, 10)) for _ in range(3)]
        for engine in ("serial", "lanes"):
            result = fg.simulate(
                copy.deepcopy(module).double(), fg.Federation.from_arrays(arrays), fg.FedaGrac(lr=0.001), rounds=1,
                steps=[1, 3, 2], batch_size=4, engine=engine, buffers="average",
            )  # fmt: skip
            ends.append(result.vector)
    before = torch.cat([value.detach().double().flatten() for value in module.parameters()])
    assert float((ends[0] - before).abs().max()) > 1e-4
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-8, atol=1e-10)
    texts = [str(warning.message) for warning in said if "one after another" in str(warning.message)]
    assert len(texts) == (name in ALONE)
    assert all(ALONE[name] in text for text in texts)
