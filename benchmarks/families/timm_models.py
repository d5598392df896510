"""Tiny vision models of timm, with random weights."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

from benchmarks.families.captured import judged, recorded, softmaxes
from benchmarks.families.checks import Found, reason

#: Models by name, and what makes them small.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "vit_base_patch16_rope_reg1_gap_256": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "beit_base_patch16_224": {},
    "beitv2_base_patch16_224": {},
    "eva02_tiny_patch14_224": {},
    "swin_tiny_patch4_window7_224": {},
    "swinv2_tiny_window8_256": {},
    "swinv2_cr_tiny_224": {},
    "levit_128s": {},
    "convit_tiny": {},
    "coat_tiny": {},
    "coatnet_0_224": {},
    "maxvit_tiny_tf_224": {},
    "xcit_nano_12_p16_224": {},
    "cait_xxs24_224": {},
    "crossvit_tiny_240": {},
    "pit_ti_224": {},
    "tnt_s_legacy_patch16_224": {},
    "twins_pcpvt_small": {},
    "pvt_v2_b0": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "volo_d1_224": {},
    "nest_tiny": {},
    "mvitv2_tiny": {},
    "hiera_tiny_224": {},
    "davit_tiny": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "fastvit_sa12": {},
    "gcvit_xxtiny": {},
    "visformer_tiny": {},
    "vit_so150m_patch16_reg4_map_256": {},
}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision, of which timm's models use nothing: only its pipelines of images do."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def _timm() -> Any:
    if "timm" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Absent())
    return importlib.import_module("timm")


def built(name: str, fused: bool) -> tuple[nn.Module, Tensor]:
    """Return a model, on torch's attention or on its own, and images for it."""
    timm = _timm()
    timm.layers.set_fused_attn(fused)
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **MODELS[name]).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw) / parameter[0].numel() ** 0.5)
    size = model.default_cfg["input_size"]
    return model, torch.randn(1, *size, generator=draw)


def _weights(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a model's layers give to the dropout of their weights, or its softmaxes where they have none; both.

    A layer may mix its softmaxes before the dropout.
    """
    given: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("attn_drop"):
            module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach().clone()))
    made = softmaxes(lambda: model(images))
    return given or made, [*given, *made]


def checked(name: str) -> list[Found]:
    """Compare the record of a model with the softmaxes of its own attention."""
    try:
        own, images = built(name, fused=False)
        expected, seen = _weights(own, images)
        model, images = built(name, fused=True)
        record, matrices, warned = recorded(model, lambda: model(images))
    except Exception as error:
        return [Found("capture", "not run", reason(error))]
    return [judged(expected, seen, matrices, warned, str(record.coverage))]
