"""Contacts of a protein from a record, by the model's own head (Rao et al. 2021, doi 10.1101/2020.12.15.422761)."""

from __future__ import annotations

import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM

from regard.inspect import capture


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_record_is_what_esm_predicts_contacts_from(implementation: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = EsmConfig(
        **sizes, vocab_size=33, pad_token_id=1, mask_token_id=32, max_position_embeddings=40,
        position_embedding_type="rotary", token_dropout=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = EsmForMaskedLM(config).eval()
    tokens = torch.tensor([[0, 5, 9, 12, 20, 7, 7, 2]])
    model.set_attn_implementation("eager")  # transformers predicts contacts on no other
    with torch.no_grad():
        expected = model.predict_contacts(tokens, torch.ones_like(tokens))
        model.set_attn_implementation(implementation)
        with capture(model) as record:
            model(tokens)
        found = model.esm.contact_head(tokens, torch.stack([run.weights() for run in record], 1))
    assert found.shape == (1, 6, 6)
    torch.testing.assert_close(found, expected)
