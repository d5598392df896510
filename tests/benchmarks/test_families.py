"""The sweep over families of transformers: a slice of it, and how it judges."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from benchmarks import captured_families, transformers_families
from benchmarks.families import captured, processes
from benchmarks.families.checks import apart, cast, fresh
from benchmarks.families.processes import alone
from benchmarks.families.tiny_configs import tiny
from transformers import BambaConfig, BartConfig, DeformableDetrConfig, LlamaConfig
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

#: Modules and classes whose masks, sinks, selected keys, biases or caches are each of another kind.
SLICE = (
    ("qwen2", "Qwen2ForCausalLM"), ("gemma3", "Gemma3ForCausalLM"), ("gpt_oss", "GptOssModel"),
    ("deepseek_v32", "DeepseekV32ForCausalLM"), ("deepseek_v4", "DeepseekV4ForCausalLM"),
    ("inkling2", "Inkling2ForCausalLM"), ("minimax_m3_vl", "MiniMaxM3VLTextModel"), ("mllama", "MllamaForCausalLM"),
    ("mt5", "MT5ForConditionalGeneration"), ("marian", "MarianMTModel"), ("roberta", "RobertaModel"),
    ("doge", "DogeForCausalLM"), ("blt", "BltGlobalTransformer"), ("deit", "DeiTModel"),
    ("lfm3_vl", "Lfm3VlVisionModel"), ("zamba2", "Zamba2ForCausalLM"), ("dory", "DoryForCausalLM"),
    ("sam2_video", "Sam2VideoModel"),
)  # fmt: skip


@pytest.mark.campaign(keep=9)
@pytest.mark.parametrize(("family", "name"), SLICE, ids=[name for _, name in SLICE])
def test_a_class_is_equal_on_regard(family: str, name: str) -> None:
    found = alone(transformers_families.examined, f"transformers.models.{family}.modeling_{family}", name)
    verdicts = {each["check"]: (each["verdict"], each["detail"]) for each in found}
    assert {verdict for verdict, _ in verdicts.values()} <= {"equal", "not run"}, verdicts
    assert verdicts["forward"][0] == "equal"
    assert verdicts["gradients"][0] == "equal" or name == "Sam2VideoModel"  # which runs without gradients


def test_the_families_are_those_with_the_interface() -> None:
    found = transformers_families.families()
    assert len(found) > 300 and {"llama", "bert", "t5", "vit"} <= found.keys() and "bloom" not in found
    assert "LlamaForCausalLM" in [cls.__name__ for cls in transformers_families.classes(found["llama"][0])]


def test_a_class_that_cannot_be_built_or_ends_its_process_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = alone(transformers_families.examined, "transformers.models.llama.modeling_llama", "NoSuchClass")
    assert found["verdict"] == "not built" and "NoSuchClass" in found["detail"]
    monkeypatch.setattr(processes, "_in_child", lambda *_: os._exit(3))
    (found,) = alone(transformers_families.examined, "transformers.models.llama.modeling_llama", "LlamaModel")
    assert found == {"check": "run", "verdict": "not run", "detail": "its process ended with 3"}


def test_a_class_that_calls_no_attention_of_ours_is_not_compared() -> None:
    """The image encoder of SAM computes its own attention, and would be equal whatever ours does."""
    found = alone(transformers_families.examined, "transformers.models.sam.modeling_sam", "SamVisionModel")
    assert [(each["check"], each["verdict"]) for each in found] == [("forward", "no attention")]
    assert transformers_families.judgement({"SamVisionModel": found}).startswith("not built: SamVisionModel: no layer")


def test_what_makes_outputs_differ() -> None:
    right = {"logits": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))}
    assert apart(right, {"logits": right["logits"].clone()}) == (0.0, "")
    moved = right["logits"].clone()
    moved[1, 0, 0] += 0.5
    worst, where = apart(right, {"logits": moved})
    assert where == "logits" and worst == pytest.approx(0.5 / float(right["logits"].abs().max()))
    keep = torch.ones(2, 3, dtype=torch.bool)
    keep[1, 0] = False
    assert apart(right, {"logits": moved}, keep)[0] == 0.0
    pooled, other = {"pooled": torch.zeros(2, 4)}, {"pooled": torch.tensor([[0.0] * 4, [1.0] * 4])}
    assert apart(pooled, other, keep)[0] == 0.0 and apart(pooled, other)[0] == 1.0
    nothing = {"logits": torch.full((2, 3, 4), torch.nan)}
    assert apart(right, nothing)[0] == float("inf") and apart(nothing, nothing)[0] == 0.0
    assert apart(right, {})[0] == float("inf") and apart(right, {"logits": moved[:, :2]})[0] == float("inf")


def test_a_family_is_judged_by_its_worst_class() -> None:
    def result(verdict: str, check: str = "forward", detail: str = "why") -> dict[str, str]:
        return {"check": check, "verdict": verdict, "detail": detail}

    equal: dict[str, list[dict[str, str]]] = {"A": [result("equal"), result("equal", "gradients")]}
    assert transformers_families.judgement(equal) == "equal to 1e-5: forward, gradients"
    ended = {"B": [{"check": "run", "verdict": "not run", "detail": "took more than 120 s"}]}
    assert transformers_families.judgement(equal | ended).endswith("gradients; not compared: B took more than 120 s")
    assert transformers_families.judgement(equal | {"B": [result("refused")]}) == "refused: why (B, forward)"
    assert transformers_families.judgement(equal | {"B": [result("different"), result("refused")]}).startswith("differ")
    assert transformers_families.judgement({"B": [result("not built", "build")]}) == "not built: B: why"
    page = transformers_families.table({"one": equal, "two": {"B": [result("not built", "build", "a|b")]}}, "versions")
    assert "2 families: 1 equal to 1e-5, 0 rejected with an error, 0 different, 1 not built. versions." in page
    assert (
        "| one | 1 of 1 | equal to 1e-5: forward, gradients |" in page
        and "| two | 0 of 1 | not built: B: a/b |" in page
    )


def test_tiny_configurations() -> None:
    llama: Any = tiny(LlamaConfig)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.hidden_size) == (4, 4, 32)
    bart: Any = tiny(BartConfig)
    assert bart.decoder_start_token_id == 0 and bart.encoder_layers == 2
    assert tiny(DeepseekV32Config).index_topk == 4


def test_configurations_with_settings_derive_their_other_fields() -> None:
    bamba: Any = tiny(BambaConfig)
    assert (bamba.mamba_n_heads, bamba.mamba_d_head, bamba.layer_types) == (
        4,
        16,
        ["linear_attention", "full_attention"],
    )
    detr: Any = tiny(DeformableDetrConfig)
    assert detr.backbone_config.model_type == "resnet" and detr.backbone_config.out_indices == [2, 3, 4]


@pytest.mark.slow
def test_images_stand_in_the_texts_that_are_compared() -> None:
    found = alone(
        transformers_families.examined, "transformers.models.gemma3.modeling_gemma3", "Gemma3ForConditionalGeneration"
    )
    assert {"check": "images", "verdict": "equal"}.items() <= next(f for f in found if f["check"] == "images").items()


def test_inputs_are_copied_and_cast_in_all_their_parts() -> None:
    given = {"maps": [torch.ones(2), torch.ones(3)], "place": 1, "ids": torch.ones(2, dtype=torch.long)}
    copied, doubled = fresh(given), cast(given, torch.float64)
    copied["maps"][0] += 1
    assert given["maps"][0].tolist() == [1, 1] and copied["place"] == 1  # type: ignore[index]
    assert [t.dtype for t in doubled["maps"]] == [torch.float64] * 2 and doubled["ids"].dtype == torch.long


CAPTURED = (
    ("diffllama", "DiffLlamaModel", "recorded"), ("granite_swa", "GraniteSWAModel", "recorded"),
    ("longformer", "LongformerForSequenceClassification", "reported"), ("wavlm", "WavLMModel", "recorded"),
    ("idefics", "IdeficsModel", "recorded"), ("sam2_video", "Sam2VideoModel", "reported"),
)  # fmt: skip


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(("family", "name", "verdict"), CAPTURED, ids=[name for _, name, _ in CAPTURED])
def test_what_is_captured_of_a_class(family: str, name: str, verdict: str) -> None:
    found = alone(captured_families.examined, f"transformers.models.{family}.modeling_{family}", name)
    assert found and {each["verdict"] for each in found} == {verdict}, found


def test_a_wrong_matrix_is_different_and_a_missing_one_must_be_told() -> None:
    right, other = (torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(i)).softmax(-1) for i in (0, 1))
    judge = captured.judged
    assert judge([right], [], [right], warned=False, coverage="").verdict == "recorded"
    assert judge([right], [], [right * 0.5], warned=False, coverage="").verdict == "recorded"  # a sink took half
    assert judge([right], [], [other], warned=True, coverage="").verdict == "different"
    assert judge([right, other], [], [right], warned=False, coverage="").verdict == "different"
    assert judge([right, other], [], [right], warned=True, coverage="").verdict == "reported"
    assert judge([], [], [], warned=False, coverage="").verdict == "no attention"
