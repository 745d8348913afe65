"""The networks: small images, torchvision's peculiarities, names and sizes that don't fit."""

from __future__ import annotations

import pytest
import torch

from config import Model
from fasttrain.errors import SettingsError
from model import build_model, compute_loss, compute_metrics


def settings(name: str) -> Model:
    return Model(name, None, False, True, False, 0.0, False)


@pytest.mark.parametrize(
    ("name", "size"), [("small_resnet", 28), ("stand_in", 28), ("resnet18", 32), ("vit_b_32", 64), ("googlenet", 64)]
)
def test_networks_give_logits_for_the_size_of_the_images(name: str, size: int) -> None:
    net = build_model(settings(name), 5, size)
    assert net.training
    assert net(torch.randn(2, 3, size, size)).shape == (2, 5)


def test_small_images_keep_their_resolution_in_a_resnet() -> None:
    small, large = (build_model(settings("resnet18"), 5, size) for size in (40, 64))
    assert small.conv1.stride == (1, 1)
    assert large.conv1.stride == (2, 2)
    assert isinstance(small.maxpool, torch.nn.Identity)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("resnet81", 64, "model.name=resnet81: .*nearest: resnet18"),
        ("vit_b_16", 40, "data.image_size=40: expected a size that vit_b_16 takes"),
        ("inception_v3", 40, "data.image_size=40: expected a size that inception_v3 takes"),
    ],
)
def test_what_does_not_fit_is_one_line(name: str, size: int, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        build_model(settings(name), 5, size)
    assert "\n" not in str(caught.value)


def test_loss_takes_class_numbers_and_mixed_labels() -> None:
    logits = torch.randn(4, 3)
    labels = torch.tensor([0, 1, 2, 1])
    mixed = torch.nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(compute_loss(logits, labels, 0.1), compute_loss(logits, mixed, 0.1))


def test_metrics_are_values_a_sample() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    metrics = compute_metrics(logits, torch.tensor([0, 1, 0]))
    assert metrics["accuracy"].tolist() == [1, 1, 0]
    assert metrics["loss"].shape == (3,)
