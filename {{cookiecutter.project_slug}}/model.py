"""The network, its loss and its metrics: yours to change.

A network takes normalised float images (N, 3, H, W) and gives logits (N, classes). To use one of your own, return it
from `build_model`; for another task change `compute_loss` and `compute_metrics` with it.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from config import Model
from fasttrain.errors import SettingsError
from fasttrain.stand_in import StandIn

SMALL = 64  # pixels; below this the stem of ImageNet networks throws away most of the image


def build_model(cfg: Model, classes: int, image_size: int) -> nn.Module:
    """The network that ``model.name`` asks for, with fresh weights, for images of this size."""
    if cfg.name == "small_resnet":
        return SmallResNet(classes)
    if cfg.name == "stand_in":
        return StandIn(classes, cfg.stand_in_ms, cfg.stand_in_holds_interpreter)

    from torchvision import models  # takes half a second: only when it is used

    names = models.list_models(module=models)
    if cfg.name not in names:
        near = difflib.get_close_matches(cfg.name, ["small_resnet", "stand_in", *names], n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise SettingsError("model.name", cfg.name, f"small_resnet, stand_in or a classifier of torchvision{hint}")
    options: dict[str, Any] = {"image_size": image_size} if cfg.name.startswith("vit_") else {}
    if cfg.name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # one output, as all others have
    try:
        model: nn.Module = models.get_model(cfg.name, weights=None, num_classes=classes, **options)
        model = with_small_stem(model) if image_size < SMALL else model
        with torch.no_grad():  # some take only certain sizes, and say so when they first see an image
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())[:150]
        raise SettingsError("data.image_size", image_size, f"a size that {cfg.name} takes ({reason})") from None
    return model.train()


def with_small_stem(model: nn.Module) -> nn.Module:
    """For ResNets: a first convolution that keeps the resolution, and no pooling after it. Others stay as they are."""
    first = getattr(model, "conv1", None)
    if isinstance(first, nn.Conv2d) and hasattr(model, "maxpool"):
        model.conv1 = nn.Conv2d(3, first.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


class SmallResNet(nn.Module):
    """Five convolutions, two of them in a residual block, for images of about 20 to 64 pixels; pleasant on a CPU.

    Pooling stands early, so that most of the work is done at a quarter of the pixels.
    """

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width // 2), nn.MaxPool2d(2))
        self.body = nn.Sequential(conv(width // 2, width), Residual(width), nn.MaxPool2d(2), conv(width, 2 * width))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.body(self.stem(images))
        logits: torch.Tensor = self.head(features.amax(dim=(2, 3)))
        return logits


class Residual(nn.Module):
    """Two convolutions beside an identity (He et al.: Deep residual learning for image recognition)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width, width), conv(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.body(x)
        return out


def conv(inputs: int, outputs: int) -> nn.Module:
    """3x3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def compute_loss(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """The mean loss of a batch, a scalar. labels: (N,) class numbers, or (N, classes) parts after mixup or cutmix."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)


def compute_metrics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Validation metrics: for each a value a sample, shape (N,). Their means over all samples are reported."""
    return {
        "accuracy": (logits.argmax(dim=1) == labels).float(),
        "loss": F.cross_entropy(logits.float(), labels, reduction="none"),
    }
