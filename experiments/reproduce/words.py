"""20News as sequences of words, and a small GPT trained to predict the next one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import TensorDataset

from experiments.reproduce.networks import Trained, trained
from experiments.reproduce.spec import Settings
from leaveout.builtin import data, models
from leaveout.builtin.data import news

WORDS, LENGTH = 500, 32


def sequences(words: int = WORDS, length: int = LENGTH) -> Int[Tensor, "texts positions"]:
    """Encode the first ``length`` + 1 words of every text with as many: the most frequent is 1, rare ones are 0."""
    texts = [re.findall(r"[a-z']+", text.lower()) for text in news.texts()]
    counted = Counter(word for text in texts for word in text)
    number = {word: place for place, (word, _) in enumerate(counted.most_common(words - 1), start=1)}
    long = [text[: length + 1] for text in texts if len(text) > length]
    return torch.tensor([[number.get(word, 0) for word in text] for text in long])


@contextmanager
def small_gpt(settings: Settings) -> Iterator[Trained]:
    """Record a run of the small GPT with ``n`` sequences and ``queries``; the seed draws split, weights and order."""
    tokens = sequences()
    train, val, _ = data.split(len(tokens), settings["n"], settings["queries"], settings["seed"])
    parts = [TensorDataset(tokens[rows][:, :-1], tokens[rows][:, 1:]) for rows in (train, val)]
    model = models.build("gpt", seed=settings["seed"]).to(getattr(torch, settings["dtype"]))
    with trained(model, parts[0], parts[1], settings) as problem:
        yield problem
