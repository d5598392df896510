"""The Set Transformer's blocks: permutations, padding, scale, errors, and a set's maximum learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import AuxRequest
from regard.nn.sets import ISAB, MAB, PMA, SAB

F64 = torch.float64
ORDER = [4, 0, 3, 1, 2]


def blocks(**parts: Any) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    parts = {"dtype": F64, **parts}
    return {
        "SAB": SAB(3, 8, 2, **parts),
        "ISAB": ISAB(3, 8, 2, 4, **parts),
        "PMA": PMA(3, 1, 2, **parts),
        "PMA without rFF": PMA(3, 3, feedforward=False, **parts),
    }


EVERY = list(blocks())
every_block = pytest.mark.parametrize("name", EVERY)


def elements(sets: int = 2, n: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(sets, n, 3, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["SAB", "ISAB"])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_permuting_the_elements_permutes_the_outputs(name: str, layer_norm: bool) -> None:
    block, x = blocks(layer_norm=layer_norm)[name], elements()
    torch.testing.assert_close(block(x[:, ORDER]), block(x)[:, ORDER], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["PMA", "PMA without rFF"])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_permuting_the_elements_does_not_change_what_is_pooled(name: str, layer_norm: bool) -> None:
    block, x = blocks(layer_norm=layer_norm)[name], elements()
    torch.testing.assert_close(block(x[:, ORDER]), block(x), rtol=1e-12, atol=1e-12)


def test_a_whole_network_is_invariant_padding_included() -> None:
    torch.manual_seed(0)
    one, two, pool = ISAB(3, 8, 2, 4, dtype=F64), SAB(8, 8, 4, dtype=F64), PMA(8, 2, dtype=F64)
    lengths = torch.tensor([3, 4])

    def pooled(x: Tensor) -> Tensor:
        return pool(two(one(x, lengths), lengths), lengths)

    x = elements()
    permuted = torch.stack([x[0, [2, 0, 1, 3, 4]], x[1, [3, 2, 0, 1, 4]]])
    torch.testing.assert_close(pooled(permuted), pooled(x), rtol=1e-12, atol=1e-12)


@every_block
def test_padding_is_as_if_the_set_were_smaller(name: str) -> None:
    block, x = blocks()[name], elements()
    found = block(torch.where(torch.arange(5)[None, :, None] < 3, x, torch.nan), torch.tensor([3, 3]))
    alone = block(x[:, :3])
    rows = alone.shape[1]
    torch.testing.assert_close(found[:, :rows], alone, rtol=1e-12, atol=1e-12)
    assert not found[:, rows:].any(), "elements that are none have no output"


@every_block
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e300])
def test_garbage_gets_no_gradient_and_gives_none(name: str, garbage: float) -> None:
    block, lengths = blocks()[name], torch.tensor([2, 0])
    gradients = []
    for value in (garbage, 0.0):
        x = elements()
        x[0, 2:] = x[1] = value
        block.zero_grad()
        output = block(x.requires_grad_(), lengths)
        output.square().sum().backward()
        assert output.isfinite().all()
        assert x.grad is not None and not x.grad[0, 2:].any() and not x.grad[1].any()
        gradients.append([x.grad, *(p.grad for p in block.parameters())])
    for a, b in zip(*gradients):
        assert torch.equal(a, b)


@every_block
def test_an_empty_set_reads_nothing(name: str) -> None:
    block, x = blocks(layer_norm=False)[name], elements()
    found = block(x, torch.tensor([0, 5]))
    torch.testing.assert_close(found[1], block(x)[1])
    if "PMA" in name:
        seeds = block.mab.fc_q(block.S[0])
        torch.testing.assert_close(found[0], seeds + block.mab.fc_o(seeds).relu())
    else:
        assert not found[0].any()
    assert block(x[:, :0]).shape[1] == found.shape[1] if "PMA" in name else block(x[:, :0]).shape[1] == 0


def test_the_scale_is_that_of_a_head_unless_told() -> None:
    query, key = elements(seed=2), elements(seed=3)
    mab = MAB(3, 3, 8, 2, dtype=F64)
    own = mab(query, key)
    for scale, same in ((4**-0.5, True), (8**-0.5, False)):
        mab.scale = scale
        assert torch.allclose(mab(query, key), own, rtol=1e-12, atol=1e-12) is same


def test_normalizer_and_engine_are_those_of_attention() -> None:
    query, key = 3 * elements(seed=2), 3 * elements(seed=3)
    mab = MAB(3, 3, 8, 2, normalizer="sparsemax", engine="reference", dtype=F64)
    _, aux = mab(query, key, return_aux=AuxRequest(weights=True))
    assert (aux.weights == 0).any()
    torch.testing.assert_close(aux.weights.sum(-1), torch.ones(2, 2, 5, dtype=F64))


def test_aux_tells_who_read_what_and_changes_nothing() -> None:
    x, lengths, ask = elements(), torch.tensor([3, 5]), AuxRequest(weights=True, entropy=True)
    sab, isab, pma = (blocks()[name] for name in ("SAB", "ISAB", "PMA"))
    for block, shape in ((sab, (2, 2, 5, 5)), (pma, (2, 1, 2, 5))):
        output, aux = block(x, lengths, return_aux=ask)
        assert torch.equal(output, block(x, lengths))
        assert aux.weights.shape == shape and aux.entropy.shape == shape[:3]
        assert not aux.weights[0, ..., 3:].any()
        torch.testing.assert_close(aux.weights.sum(-1), torch.ones(shape[:3], dtype=F64))
    output, (gathered, spread) = isab(x, lengths, return_aux=ask)
    assert torch.equal(output, isab(x, lengths))
    assert gathered.weights.shape == (2, 2, 4, 5) and spread.weights.shape == (2, 2, 5, 4)
    assert not gathered.weights[0, ..., 3:].any()


def test_dropout_obeys_training() -> None:
    torch.manual_seed(0)
    x, sab = elements(), SAB(3, 8, 2, 0.5, dtype=F64)
    assert not torch.equal(sab(x), sab(x))
    sab.eval()
    assert torch.equal(sab(x), sab(x))
    assert "dropout=0.5" in repr(sab)


def test_parameters_are_named_as_in_the_authors_code() -> None:
    mab = {f"{layer}.{part}" for layer in ("fc_q", "fc_k", "fc_v", "fc_o", "ln0", "ln1") for part in ("weight", "bias")}
    assert set(MAB(3, 3, 4, 2).state_dict()) == mab
    assert set(ISAB(3, 4, 2, 5).state_dict()) == {"I", *(f"mab{i}.{name}" for i in (0, 1) for name in mab)}
    plain = {f"mab.{name}" for name in mab if name.startswith("fc")}
    assert set(PMA(4, 2, feedforward=False, layer_norm=False).state_dict()) == {"S", *plain}


def test_gradients_of_a_block_are_right() -> None:
    isab = ISAB(2, 4, 2, 3, dtype=F64, engine="reference")
    x, lengths = torch.randn(2, 3, 2, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 3])
    assert torch.autograd.gradcheck(lambda x: isab(x, lengths), x.requires_grad_())


class Largest(nn.Module):
    """Tells the maximum of a set of numbers."""

    def __init__(self) -> None:
        super().__init__()
        # The engine with the least to do per call: sets are tiny and many.
        self.encode, self.pool = SAB(1, 32, 4, engine="reference"), PMA(32, 4, engine="reference")
        self.tell = nn.Linear(32, 1)

    def forward(self, numbers: Tensor, lengths: Tensor) -> Tensor:
        return self.tell(self.pool(self.encode(numbers.unsqueeze(2), lengths), lengths)).flatten()


def drawn(generator: torch.Generator, sets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sets of 1 to 10 numbers in [0, 1] with NaN behind them, how many, and the largest of each."""
    lengths = torch.randint(1, 11, (sets,), generator=generator)
    numbers = torch.rand(sets, 10, generator=generator)
    real = torch.arange(10) < lengths[:, None]
    return torch.where(real, numbers, torch.nan), lengths, torch.where(real, numbers, 0.0).amax(1)


@pytest.mark.campaign
@pytest.mark.slow
def test_the_maximum_of_a_set_is_learned() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Largest()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 600)
    for _ in range(600):
        numbers, lengths, largest = drawn(generator, 64)
        loss = (model(numbers, lengths) - largest).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    numbers, lengths, largest = drawn(generator, 1000)
    with torch.no_grad():
        error = (model(numbers, lengths) - largest).abs().mean()
    guess = (largest - largest.median()).abs().mean()
    assert error < 0.01 < guess / 10, (error, guess)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: MAB(3, 3, 8, 3), ValueError, "MAB: num_heads must divide hidden_size 8, got 3."),
    (lambda: SAB(3, 8, 3), ValueError, "SAB: num_heads must divide hidden_size 8, got 3."),
    (lambda: SAB(0, 8, 2), ValueError, "SAB: input_size must be an int of at least 1, got 0."),
    (lambda: ISAB(3, 8, 2, 0), ValueError, "ISAB: num_inducing must be an int of at least 1, got 0."),
    (lambda: PMA(8, 2, 1.5), TypeError, "PMA: num_seeds must be an int of at least 1, got 1.5."),
    (lambda: PMA(8, 2, 1, 2.0), ValueError, "PMA: dropout must be a probability in [0, 1], got 2.0."),
    (
        lambda: SAB(3, 8, 2)(torch.zeros(5, 3)),
        ValueError,
        "SAB: x must have shape (B, N, 3), got (5, 3).",
    ),
    (
        lambda: SAB(3, 8, 2)(torch.zeros(2, 5, 3), torch.ones(2)),
        TypeError,
        "SAB: valid_lens must be an integer tensor (2,), got a float32 tensor of shape (2,).",
    ),
    (
        lambda: PMA(8, 2)(torch.zeros(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)),
        TypeError,
        "PMA: valid_lens must be an integer tensor (2,), got a bool tensor of shape (2, 5).",
    ),
    (
        lambda: ISAB(3, 8, 2, 4)(torch.zeros(2, 5, 3), torch.tensor([1, 2, 3])),
        ValueError,
        "ISAB: valid_lens must have shape (2,), got (3,).",
    ),
    (
        lambda: MAB(3, 3, 8, 2)(torch.zeros(2, 5, 3), torch.zeros(1, 5, 3)),
        ValueError,
        "MAB: key must have query's 2 sets, got 1 (key (1, 5, 3)).",
    ),
    (
        lambda: MAB(3, 3, 8, 2)(torch.zeros(2, 5, 3), torch.zeros(2, 5, 3), query_lens=torch.tensor([[1, 2]])),
        ValueError,
        "MAB: query_lens must have shape (2,), got (1, 2).",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
