"""Networks that predict the next character of a text from the characters before it.

Inputs are character numbers [n, length] of any integer type; outputs are the logits [n, vocabulary] of the
character that follows the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fedagrac.errors import InputError, count, non_negative
from fedagrac.models.networks import MOST_CLASSES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CharGPT", "CharLSTM"]

MOST_WIDTH = 100_000
MOST_LAYERS = 1_000
"""The largest width and depth. They bound what an experiment file can ask for."""


class CharLSTM(nn.Module):
    """LEAF's network for Shakespeare: an embedding, LSTM layers, and a linear layer on the last position.

    With LEAF's 80 characters it has 819,920 parameters. LEAF's own count is 2,048 lower, as its LSTM cells have
    one bias where torch has two.

    Args:
        vocabulary: the number of characters.
        embedding: the numbers that stand for a character.
        hidden: the width of the LSTM layers.
        layers: the number of LSTM layers.

    Examples:
        >>> CharLSTM(hidden=16)(torch.zeros(3, 80, dtype=torch.uint8)).shape
        torch.Size([3, 80])
    """

    def __init__(self, vocabulary: int = 80, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        count("vocabulary", vocabulary, least=2, most=MOST_CLASSES)
        count("embedding", embedding, most=MOST_WIDTH)
        count("hidden", hidden, most=MOST_WIDTH)
        count("layers", layers, most=MOST_LAYERS)
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character."""
        states, _ = self.lstm(self.embedding(characters.long()))
        logits: Tensor = self.head(states[:, -1])
        return logits


class CharGPT(nn.Module):
    """A GPT: learned positions, pre-norm blocks of causal attention and GELU layers, a final norm, a linear layer.

    Weights of linear layers and embeddings start from Normal(0, 0.02) and biases from zero, as in GPT-2. With
    dropout, the embedding and the output of every block's two branches drop out; the attention weights do not.

    Args:
        vocabulary: the number of characters.
        context: the longest input.
        width: the numbers that stand for a character.
        layers: the number of blocks.
        heads: the attention heads of a block; they divide the width.
        dropout: the probability of dropout.

    Examples:
        >>> CharGPT(width=16, layers=1)(torch.zeros(3, 80, dtype=torch.uint8)).shape
        torch.Size([3, 90])
    """

    def __init__(
        self,
        vocabulary: int = 90,
        context: int = 80,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        count("vocabulary", vocabulary, least=2, most=MOST_CLASSES)
        count("context", context, most=MOST_WIDTH)
        count("width", width, most=MOST_WIDTH)
        count("layers", layers, most=MOST_LAYERS)
        if width % count("heads", heads):
            raise InputError("heads", heads, f"a divisor of the width {width}")
        if non_negative("dropout", dropout) >= 1:
            raise InputError("dropout", dropout, "a probability below 1")
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = _dropout(dropout)
        self.blocks = nn.ModuleList([_Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.apply(_gpt2_start)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character."""
        length = characters.shape[1]
        if length > self.context:
            raise InputError("inputs", f"{length} characters", f"at most {self.context}, the context of the model")
        places = torch.arange(length, device=characters.device)
        x = self.drop(self.characters(characters.long()) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits


class _Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a layer of four times the width with GELU."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.attention_drop = _dropout(dropout)
        self.layer_norm = nn.LayerNorm(width)
        self.layer = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), _dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        heads = self.queries_keys_values(self.attention_norm(x)).view(n, length, 3, self.heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        attended = attended.transpose(1, 2).reshape(n, length, width)
        x = x + self.attention_drop(self.attention_output(attended))
        result: Tensor = x + self.layer(self.layer_norm(x))
        return result


def _dropout(probability: float) -> nn.Module:
    """Return a dropout layer, or none at all, so that a model without dropout has no random layer."""
    return nn.Dropout(probability) if probability else nn.Identity()


def _gpt2_start(layer: nn.Module) -> None:
    """Draw the weights of a linear layer or an embedding from Normal(0, 0.02), and set its bias to zero."""
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)
