"""What every encoder–decoder keeps: steps are forward, padding is nothing, sequences are alone, gradients arrive."""

from __future__ import annotations

import copy

import pytest
import torch
from model_cases import CASES, LENGTHS, SOURCE, SOURCES, TARGET, made
from torch import Tensor

from regard_lab.models import EncoderDecoder

GARBAGE = SOURCES - 1
#: Where no rounding moves a choice or a window.
ROUNDED = [
    *("rnn after additive", "rnn layers", "rnn gru layers", "rnn no attention gru", "rnn feeding", "rnn before gru"),
    *("rnn encoder projected", "rnn local-m", "rnn all tied"),
    *("transformer pre", "transformer rotary", "transformer all tied"),
]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def loss_of(model: EncoderDecoder, source: Tensor = SOURCE) -> Tensor:
    """Return a loss that depends on every logit, and on how likely draws of hard attention were."""
    logits = model(source, LENGTHS, TARGET)
    loss = (logits.log_softmax(-1) * torch.arange(logits.shape[-1]).double().cos()).sum()
    if model.training and getattr(model.config, "hard", "none") == "reinforce":
        loss = loss + model.surrogate(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    return loss


@pytest.mark.campaign(keep=9)
@torch.no_grad()
def test_steps_of_reordered_beams_are_forward(case: str) -> None:
    model, (B, T), K = made(case), TARGET.shape, 3
    generator = torch.Generator().manual_seed(2)
    memory = model.encode(SOURCE, LENGTHS)
    state, written = model.start(memory, K), torch.ones(B, K, 1, dtype=torch.long)
    for t in range(T):
        logits, state = model.step(written[..., -1], memory, state)
        if t in (0, 3, T - 1):
            every = model(SOURCE.repeat_interleave(K, 0), LENGTHS.repeat_interleave(K), written.flatten(0, 1))
            torch.testing.assert_close(logits, every[:, -1].view(B, K, -1), **EXACT)
        parent = torch.randint(K, (B, K), generator=generator)
        state = state.select((parent + K * torch.arange(B)[:, None]).flatten())
        written = written.gather(1, parent[..., None].expand_as(written))
        written = torch.cat([written, torch.randint(1, 9, (B, K, 1), generator=generator)], -1)


@torch.no_grad()
def test_a_step_leaves_its_state_and_memory_as_they_were(case: str) -> None:
    model, rows = made(case), torch.tensor([2, 0])
    memory = model.encode(SOURCE, LENGTHS)
    _, state = model.step(TARGET[:, :1], memory, model.start(memory, 1))
    first, then = model.step(TARGET[:, 1:2], memory, state)
    model.step(TARGET[:, 2:3], memory, then)
    again, _ = model.step(TARGET[:, 1:2], memory, state)
    fewer, _ = model.step(TARGET[rows, 1:2], memory.select(rows), state.select(rows))
    assert torch.equal(first, again)
    torch.testing.assert_close(fewer, first[rows], **EXACT)


@torch.no_grad()
def test_weights_are_shares_of_what_is_real(case: str) -> None:
    model = made(case)
    weights = model.align(SOURCE, LENGTHS, TARGET)
    assert weights.shape == (3, len(model.maps), 8, 6)
    assert (weights >= 0).all()
    for row, length in enumerate(LENGTHS.tolist()):
        assert not weights[row, ..., length:].any()
    if "sigmoid" not in case:
        totals = weights.sum(-1)
        if "epanechnikov" in case or "triangular" in case:  # a row with no key in reach reads nothing
            totals = torch.where(totals == 0, 1, totals)
        torch.testing.assert_close(totals, torch.ones(3, len(model.maps), 8, dtype=torch.float64))
    if " hard " in case:
        assert ((weights == 0) | (weights == 1)).all()


@pytest.mark.campaign(keep=9)
def test_nothing_behind_the_end_is_seen(case: str) -> None:
    behind, results = torch.arange(6) >= LENGTHS[:, None], []
    for garbage in (0, GARBAGE):
        model = made(case)
        embedding = getattr(model, "source_embedding", None) or model.target_embedding
        if garbage:
            with torch.no_grad():
                embedding.weight[garbage] = torch.nan
        logits = model(SOURCE.masked_fill(behind, garbage), LENGTHS, TARGET)
        # Where the embedding is tied, the logit of the poisoned symbol is NaN, and all gradients of what it comes from.
        read = [each for each in model.parameters() if each is not embedding.weight and "all tied" not in case]
        found = torch.autograd.grad(logits.cos().sum(), read, allow_unused=True) if read else ()
        results.append((logits[..., : min(GARBAGE, logits.shape[-1])].detach(), *found))
    for clean, other in zip(*results):
        assert (clean is None and other is None) or torch.equal(clean, other)


@pytest.mark.campaign(keep=9)
@torch.no_grad()
def test_sequences_are_alone(case: str) -> None:
    model = made(case)
    logits, weights = model(SOURCE, LENGTHS, TARGET), model.align(SOURCE, LENGTHS, TARGET)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = SOURCE[row : row + 1, :length], LENGTHS[row : row + 1], TARGET[row : row + 1]
        torch.testing.assert_close(model(*alone)[0], logits[row], **EXACT)
        torch.testing.assert_close(model.align(*alone)[0], weights[row, ..., :length], **EXACT)


@pytest.mark.campaign(keep=9)
@torch.no_grad()
def test_later_targets_do_not_reach_earlier_logits(case: str) -> None:
    model, changed = made(case), TARGET.clone()
    changed[:, 3:] = 0
    logits = model(SOURCE, LENGTHS, TARGET)
    torch.testing.assert_close(model(SOURCE, LENGTHS, changed)[:, :3], logits[:, :3], **EXACT)
    torch.testing.assert_close(model(SOURCE, LENGTHS, TARGET[:, :3]), logits[:, :3], **EXACT)


@pytest.mark.campaign(keep=9)
@torch.no_grad()
def test_without_teacher_forcing_a_model_reads_what_it_writes(case: str) -> None:
    model, written = made(case), TARGET[:, :1]
    logits = model(SOURCE, LENGTHS, TARGET, teacher_forcing=0.0)
    for _ in range(TARGET.shape[1] - 1):
        written = torch.cat([written, model(SOURCE, LENGTHS, written)[:, -1:].argmax(-1)], 1)
    torch.testing.assert_close(logits, model(SOURCE, LENGTHS, written), **EXACT)
    assert not torch.equal(written, TARGET)


def test_every_parameter_gets_a_gradient(case: str) -> None:
    model = made(case).train()
    loss_of(model).backward()
    for name, parameter in model.named_parameters():
        if "constant" in case and name.endswith(("q_proj_weight", "k_proj_weight")):
            continue  # the score compares nothing
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_gradients_arrive_without_teacher_forcing() -> None:
    for case in ("rnn after additive", "rnn before gru", "transformer post"):
        model = made(case).train()
        model(SOURCE, LENGTHS, TARGET, teacher_forcing=0.3).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()), case


@pytest.mark.parametrize("case", ["rnn after additive", "rnn before gru", "rnn tied", "transformer post"])
def test_a_model_is_its_parameters(case: str) -> None:
    model, other = made(case), made(case)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    expected = model(SOURCE, LENGTHS, TARGET)
    assert not torch.equal(other(SOURCE, LENGTHS, TARGET), expected)
    called = torch.func.functional_call(other, dict(model.named_parameters()), (SOURCE, LENGTHS, TARGET))
    torch.testing.assert_close(called, expected, **EXACT)
    torch.testing.assert_close(copy.deepcopy(model)(SOURCE, LENGTHS, TARGET), expected, **EXACT)
    storages = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert len(set(storages)) == len(storages), "a tied matrix is saved once"
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(SOURCE, LENGTHS, TARGET), expected)


def test_deep_copies_of_models_that_drew() -> None:
    model = made("rnn hard reinforce").train()
    model(SOURCE, LENGTHS, TARGET)
    torch.manual_seed(1)
    copied = copy.deepcopy(model)(SOURCE, LENGTHS, TARGET)
    torch.manual_seed(1)
    assert torch.equal(copied, model(SOURCE, LENGTHS, TARGET))


def test_reset_parameters_draws_anew(case: str) -> None:
    model = made(case)
    torch.manual_seed(3)
    model.reset_parameters()
    first = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    torch.manual_seed(3)
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, first[name]), name
        assert not (parameter == 7).any(), name


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_is_close(case: str) -> None:
    model = made(case).float()
    exact = model(SOURCE, LENGTHS, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(SOURCE, LENGTHS, TARGET)
        rounded.float().sum().backward()
        memory = model.encode(SOURCE, LENGTHS)
        state = model.start(memory, 1)
        with torch.no_grad():
            for t in range(2):
                logits, state = model.step(TARGET[:, t : t + 1], memory, state)
    bound = 3 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (rounded.float() - exact).abs().max() < bound
    assert (logits[:, 0].float() - exact[:, 1]).abs().max() < bound


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("rnn layers", "dropout"),
        ("rnn before gru", "dropout"),
        ("rnn feeding tied gru", "dropout"),
        ("transformer pre", "dropout"),
        ("transformer post", "attention_dropout"),
        ("transformer pre", "activation_dropout"),
    ],
)
def test_dropout_obeys_training(case: str, name: str) -> None:
    model = made(case, **{name: 0.5})
    assert torch.equal(model(SOURCE, LENGTHS, TARGET), model(SOURCE, LENGTHS, TARGET))
    model.train()
    assert not torch.equal(model(SOURCE, LENGTHS, TARGET), model(SOURCE, LENGTHS, TARGET))


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "1", float("nan")])
@pytest.mark.parametrize("case", ["rnn gru", "transformer post"])
def test_the_teacher_forcing_ratio_is_checked(case: str, share: object) -> None:
    model = made(case)
    with pytest.raises(ValueError) as caught:
        model(SOURCE, LENGTHS, TARGET, teacher_forcing=share)
    name = type(model).__name__
    assert str(caught.value) == f"{name}: teacher_forcing must be a probability in [0, 1], got {share!r}."


@pytest.mark.campaign(keep=9)
def test_attention_that_a_loss_guides_is_that_of_the_same_pass(case: str) -> None:
    model = made(case)
    weights = model.align(SOURCE, LENGTHS, TARGET)
    for place, name in enumerate(model.maps):
        features, told = model.features_and_attention(SOURCE, LENGTHS, TARGET, name=name)
        torch.testing.assert_close(features, model.features(SOURCE, LENGTHS, TARGET), **EXACT)
        torch.testing.assert_close(told, weights[:, place], **EXACT)


@pytest.mark.parametrize("name", [name for name in ROUNDED if "no attention" not in name])
def test_attention_that_a_loss_guides_has_its_gradient(name: str) -> None:
    model = made(name)
    wanted = torch.zeros(3, 8, 6, dtype=torch.float64)
    wanted[:, :, 0] = 1

    def loss() -> Tensor:
        return ((model.features_and_attention(SOURCE, LENGTHS, TARGET, name=model.maps[0])[1] - wanted) ** 2).sum()

    loss().backward()
    found = [parameter for parameter in model.parameters() if parameter.grad is not None and parameter.grad.any()]
    step = 1e-6
    for parameter in found[:6]:
        place = tuple(torch.nonzero(parameter.grad.abs() == parameter.grad.abs().max())[0])
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter[place] += sign * step
                ends.append(float(loss()))
                parameter[place] -= sign * step
        rounding = torch.finfo(torch.float64).eps * abs(ends[0]) / step  # of a difference of two losses
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float(parameter.grad[place]) == pytest.approx(slope, rel=1e-5, abs=rounding)
    assert found


@pytest.mark.parametrize("case", ["rnn gru", "rnn no attention", "transformer post"])
def test_a_map_that_there_is_not_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"knows no map 'layer 9'|map must be"):
        made(case).features_and_attention(SOURCE, LENGTHS, TARGET, name="layer 9")


@pytest.mark.campaign(keep=9)
@torch.no_grad()
def test_what_a_target_is_due_to_is_shared_among_what_is_real(case: str) -> None:
    model = made(case)
    if not model.maps or " hard " in case:
        return
    written = torch.cat([TARGET[:, 1:], TARGET[:, :1]], 1)
    for name in (None, model.maps[-1]):
        shares = model.posterior(SOURCE, LENGTHS, TARGET, written, name)
        assert shares.shape == (3, 8, 6) and (shares >= 0).all()
        for row, length in enumerate(LENGTHS.tolist()):
            assert not shares[row, :, length:].any()
            alone = model.posterior(
                SOURCE[row : row + 1, :length],
                LENGTHS[row : row + 1],
                TARGET[row : row + 1],
                written[row : row + 1],
                name,
            )
            torch.testing.assert_close(alone[0], shares[row, :, :length], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rnn after additive", "rnn feeding", "rnn before gru"])
def test_what_a_target_is_due_to_is_attention_times_likelihood(name: str) -> None:
    model = made(name)
    written = torch.cat([TARGET[:, 1:], TARGET[:, :1]], 1)
    found = model.posterior(SOURCE, LENGTHS, TARGET, written, None)
    weights = model.align(SOURCE, LENGTHS, TARGET)[:, 0]
    memory = model.encode(SOURCE, LENGTHS)
    state = memory.start
    for t in range(3):
        _, state = model.step(TARGET[:, t : t + 1], memory, state)
        for row, length in enumerate(LENGTHS.tolist()):
            likely = []
            for s in range(length):
                seen = torch.cat([state.hidden[-1][row], memory.values[row, s]])
                logits = model.logits(torch.tanh(model.combine(seen)))
                likely.append(float(logits.softmax(-1)[written[row, t]] * weights[row, t, s]))
            right = torch.tensor(likely, dtype=torch.float64)
            torch.testing.assert_close(found[row, t, :length], right / right.sum(), **EXACT)
