"""Low-rank adapters: their formula, what learns, and what is left when they are merged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, SequenceClassifier, load, save
from regard_lab.models.lora import TARGETS, LoRALinear, add_lora, merge_lora

TOKENS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def encoder(**fields: object) -> EncoderLM:
    torch.manual_seed(0)
    return EncoderLM(EncoderLMConfig(50, **{"width": 16, "layers": 2, "heads": 2, "dropout": 0.0} | fields)).eval()


def drawn(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.B)


def test_the_formula() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4).double(), torch.randn(5, 6).double()
    adapted = LoRALinear(layer, rank=3, alpha=12.0)
    assert torch.equal(adapted(x), layer(x)), "at first it changes nothing"
    drawn(adapted)
    whole = layer.weight + 12.0 / 3 * adapted.B @ adapted.A
    torch.testing.assert_close(adapted(x), x @ whole.T + layer.bias)
    torch.testing.assert_close(adapted.merged()(x), adapted(x), rtol=1e-14, atol=1e-14)


def test_its_gradient_is_that_of_the_whole_matrix_seen_through_the_factors() -> None:
    """dL/dB = α/r · dL/dW Aᵀ and dL/dA = α/r · Bᵀ dL/dW, where W is W₀ + α/r · B A."""
    torch.manual_seed(0)
    adapted, x = LoRALinear(nn.Linear(6, 4).double(), rank=2, alpha=5.0), torch.randn(7, 6).double()
    drawn(adapted)
    full = adapted.merged()
    for layer in (adapted, full):
        (layer(x) ** 3).sum().backward()
    torch.testing.assert_close(adapted.B.grad, 2.5 * full.weight.grad @ adapted.A.T)
    torch.testing.assert_close(adapted.A.grad, 2.5 * adapted.B.T @ full.weight.grad)
    assert adapted.weight.grad is None and adapted.bias.grad is None


@pytest.mark.parametrize("shared", [False, True])
def test_adapters_alone_learn_and_merging_leaves_a_plain_model(shared: bool, tmp_path) -> None:
    model = encoder(gated=True, shared=shared)
    names, before = set(model.state_dict()), model(TOKENS)
    adapted = add_lora(model, rank=4)
    assert len(adapted) == 5 * (1 if shared else 2) and all(name.endswith(TARGETS) for name in adapted)
    learn = [name for name, each in model.named_parameters() if each.requires_grad]
    assert all(name.endswith((".A", ".B")) for name in learn)
    E, F, layers = 16, model.config.hidden, 1 if shared else 2
    counted = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert counted == layers * 4 * ((E + 3 * E) + (E + E) + 3 * (E + F))
    assert torch.equal(model(TOKENS), before)
    drawn(model)
    changed = model(TOKENS)
    assert not torch.allclose(changed, before, atol=1e-2)
    merge_lora(model)
    assert set(model.state_dict()) == names and all(each.requires_grad for each in model.parameters())
    torch.testing.assert_close(model(TOKENS), changed, rtol=1e-4, atol=1e-4)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)(TOKENS), model(TOKENS))


def test_a_step_moves_adapters_and_the_head_alone() -> None:
    trunk = DecoderLM(DecoderLMConfig(50, width=16, layers=1))
    model = SequenceClassifier(trunk, ["a", "b"])
    add_lora(trunk, rank=2, dropout=0.1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(2):  # A has no gradient as long as B is 0
        optimizer.zero_grad()
        model(TOKENS).square().sum().backward()
        optimizer.step()
    moved = {name for name, each in model.state_dict().items() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if name.endswith((".A", ".B")) or name.startswith("output.")}


def test_what_is_refused() -> None:
    model = encoder()
    with pytest.raises(ValueError, match="targets must name linear layers, such as dense, down"):
        add_lora(model, targets=["query"])
    add_lora(model, rank=99)
    assert model.blocks[0].attention.out.rank == 16 and model.blocks[0].attention.out.scale == 16 / 99
    with pytest.raises(ValueError, match="model must have no adapters yet"):
        add_lora(model)
    for wrong in ({"rank": 0}, {"rank": 10}, {"alpha": 0.0}, {"dropout": 2.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            LoRALinear(nn.Linear(9, 12), **wrong)


def test_a_model_without_linear_layers_is_told() -> None:
    model = EncoderLM(EncoderLMConfig(50, width=16, layers=0, masked_head=False, pooled=False))
    with pytest.raises(ValueError, match="add_lora: model must have linear layers for adapters, got none"):
        add_lora(model)
