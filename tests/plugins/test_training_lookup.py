"""The gradient of an embedding whose rows are added to the weight's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain_plugins.training.accumulation import Accumulation, under_way
from posttrain_plugins.training.lookup import Lookup

TOKENS = torch.tensor([[1, 2, 2, 0], [5, 1, 0, 0]])


class Tied(nn.Module):
    """An embedding that is the head as well, or has a head beside it."""

    def __init__(self, tied: bool, padding: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3, padding_idx=padding)
        self.head = nn.Linear(3, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens))).log_softmax(-1)[..., 3].sum()


def gradients(model: Tied) -> list[torch.Tensor]:
    return [tensor.grad.clone() for tensor in model.parameters()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [None, 0])
def test_rows_come_to_the_gradient_that_torch_has(tied: bool, padding: int | None):
    plain, quick = Tied(tied, padding), Tied(tied, padding)
    quick.embedding.forward = Lookup(quick.embedding)
    for part in TOKENS.split(1):
        plain.loss(part).backward()
        Accumulation().run(quick.loss(part))
    for expected, found in zip(gradients(plain), gradients(quick), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_another_backward_pass_gets_the_dense_gradient():
    plain, quick = Tied(True, 0), Tied(True, 0)
    quick.embedding.forward = Lookup(quick.embedding)
    for model in (plain, quick):
        model.loss(TOKENS).backward()
    torch.testing.assert_close(gradients(quick)[0], gradients(plain)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_a_hook_on_the_weight_is_given_the_whole_gradient(tied: bool):
    plain, quick = Tied(tied, None), Tied(tied, None)
    quick.embedding.forward = Lookup(quick.embedding)
    for model in (plain, quick):
        model.embedding.weight.register_hook(lambda gradient: gradient * 2)
    plain.loss(TOKENS).backward()
    Accumulation().run(quick.loss(TOKENS))
    for expected, found in zip(gradients(plain), gradients(quick), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    model = Tied(True, None)
    model.embedding.forward = Lookup(model.embedding)
    loss = model.loss(TOKENS)
    loss.register_hook(lambda gradient: _refused())
    with pytest.raises(MemoryError):
        Accumulation().run(loss)
    assert under_way(model.embedding.weight) is None


def _refused() -> torch.Tensor:
    raise MemoryError


@pytest.mark.parametrize(
    "embedding",
    [
        nn.Embedding(7, 3, max_norm=1.0),
        nn.Embedding(7, 3, scale_grad_by_freq=True),
        nn.Embedding(7, 3, sparse=True),
        nn.Linear(7, 3),
        type("Scaled", (nn.Embedding,), {})(7, 3),
    ],
    ids=["max_norm", "scale_grad_by_freq", "sparse", "another module", "subclass"],
)
def test_only_ordinary_embeddings_are_replaced(embedding: nn.Module):
    assert not Lookup.fits(embedding)
    assert Lookup.fits(nn.Embedding(7, 3))
