"""Images as a model takes them: opened within the job's limits, counted in tokens, made into pixels by the processor of
the model's folder. Every process that needs pixels makes them itself, from the same files with the same processor."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import BadRow, refused

FIELD = "data.images"
PROCESSOR = "preprocessor_config.json"
WHOLE = frozenset({"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Model types of which the trainer builds the whole, and takes out the tower. Of others with a tower it builds the
language model alone."""
MODELS = WHOLE | {"qwen3_5", "qwen3_5_moe"}
"""Model types whose log-probabilities with images were shown to be equal in transformers, trainer and engine."""
CAUSES = (OSError, ValueError, SyntaxError, EOFError, MemoryError)
"""What Pillow raises for a file that it cannot read."""


def loader_of(config: Any) -> Any:
    """transformers' loader of the model with this config: of the whole, with its tower for images, or of a language
    model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in WHOLE else AutoModelForCausalLM


def check_takes_images(folder: Path) -> None:
    """Raises InvalidJob if prompts for the model of this folder cannot have images. Reads its files only."""
    try:
        kind = str(json.loads((folder / "config.json").read_bytes()).get("model_type"))
    except (OSError, ValueError, AttributeError):
        return  # the check of the folder tells
    if kind not in MODELS:
        reason = f"the model in {folder} is {kind}, and images were shown to be right with {', '.join(sorted(MODELS))}"
        raise refused(FIELD, "given", reason, "leave data.images out, or give such a model.")
    if not (folder / PROCESSOR).is_file():
        reason = f"the model folder {folder} has no processor of images: there is no {PROCESSOR}"
        raise refused(FIELD, "given", reason, "save it there (processor.save_pretrained).")


@dataclass(frozen=True)
class Pictures:
    """The images that prompts of one job may have."""

    token: int
    """Id of the token that stands for an image in a prompt, and for each piece of it in what the model sees."""
    merged: int
    """Patches that are one token."""
    processor: Any = field(repr=False)
    """The processor of images of transformers."""
    max_pixels: int | None = None

    @classmethod
    def of_folder(cls, folder: str, max_pixels: int | None = None) -> "Pictures":
        """Loads the processor of a model folder. Raises InvalidJob."""
        check_takes_images(Path(folder))
        try:
            from transformers import AutoImageProcessor

            config = json.loads((Path(folder) / "config.json").read_bytes())
            processor = AutoImageProcessor.from_pretrained(folder)
            return cls(int(config["image_token_id"]), int(processor.merge_size) ** 2, processor, max_pixels)
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"the processor of images in {folder} cannot be loaded: {error}"
            raise refused(FIELD, "given", reason, f"correct its {PROCESSOR}, and install Pillow.") from error

    def opened(self, files: Sequence[bytes], label: str = "the prompt") -> list[Any]:
        """The images as Pillow has them, RGB. Raises BadRow for one that is damaged or too large."""
        return [self._opened(file, f"{label}: image {number}") for number, file in enumerate(files, 1)]

    def _opened(self, file: bytes, label: str) -> Any:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(file)) as image:
                width, height = image.size
                if self.max_pixels is None or width * height <= self.max_pixels:
                    return image.convert("RGB")
        except UnidentifiedImageError as error:
            what = f"{label} is no image: its {len(file):,} bytes are of no kind that Pillow knows."
            raise BadRow(what, "store the image again, for example as PNG.") from error
        except (*CAUSES, Image.DecompressionBombError) as error:
            raise BadRow(f"{label} cannot be read: {error}.", "store the file again, for example as PNG.") from error
        reason = f"{label} has {width} x {height} pixels, more than {self.max_pixels:,}"
        raise BadRow(f"{reason}.", "raise data.images.max_pixels, or store a smaller image.")

    def tokens(self, image: Any, label: str = "an image") -> int:
        """Tokens that the model sees of an image. Raises BadRow for one that the processor does not take, as of too
        narrow a shape."""
        try:
            return int(self.processor.get_number_of_image_patches(image.height, image.width, {})) // self.merged
        except ValueError as error:
            what = f"{label} has {image.width} x {image.height} pixels, which the model's processor refuses: {error}."
            raise BadRow(what, "store an image of another shape, or leave the row out.") from error

    def expanded(self, token_ids: Sequence[int], images: Sequence[Any], label: str = "the prompt") -> list[int]:
        """The prompt as the model sees it, from one with one token for each image. Raises BadRow if the numbers of
        both differ."""
        places = sum(token == self.token for token in token_ids)
        if places != len(images):
            count, room = len(images), f"{places} place{'s' if places != 1 else ''} for images"
            reason = f"{label} has {count} image{'s' if count != 1 else ''}, and its tokens have {room}"
            fix = "write no special tokens of images in texts, and check the model's chat template."
            raise BadRow(f"{reason}.", fix)
        counts = iter([self.tokens(image, f"{label}: image {number}") for number, image in enumerate(images, 1)])
        whole = list[int]()
        for token in token_ids:
            whole += [token] * (next(counts) if token == self.token else 1)
        return whole

    def pixels(self, images: Sequence[Any]) -> tuple[Any, Any]:
        """What the model's tower takes: patches, float32 [patches, values], and the grid of each image in patches, by
        time, height and width, int64 [images, 3]."""
        made = self.processor(images=list(images), return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]


def pictures_of(model: str, images: Any) -> Pictures | None:
    """The pictures of a job: `images` is its `data.images`. None if it has none. Raises InvalidJob."""
    return None if images is None else Pictures.of_folder(model, images.max_pixels)
