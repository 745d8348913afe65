"""DALI on the CPU, which decodes only the part of a JPEG that the crop needs, through its PyTorch iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.work import RATIO, Work, endless

NEEDS = ("nvidia.dali",)


def batches(work: Work) -> Iterator[Any]:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    def pipeline() -> Any:
        jpegs, labels = fn.readers.file(file_root=str(work.data), random_shuffle=True, name="photos")
        crops = fn.decoders.image_random_crop(
            jpegs, device="cpu", output_type=types.RGB, random_area=list(work.scale), random_aspect_ratio=list(RATIO)
        )
        small = fn.resize(crops, resize_x=work.size, resize_y=work.size, interp_type=types.INTERP_LINEAR)
        return fn.flip(small, horizontal=fn.random.coin_flip(probability=work.flip)), labels

    pipe = pipeline_def(batch_size=work.batch, num_threads=work.workers, device_id=None)(pipeline)()
    pipe.build()
    loader: Any = DALIGenericIterator(
        [pipe], ["image", "label"], reader_name="photos", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )
    return ((batch[0]["image"], batch[0]["label"]) for batch in endless(lambda: loader))
