"""The images of prompts that samples show: what their first bytes tell, and their files.

Samples keep no files. A file is read from the job's data again when somebody looks at it, and the hash that its sample
has says whether it is still the one that the job used. Nothing is decoded here.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from pydantic import ValidationError

from millrace.data import PromptSource, open_section
from millrace.data.row import PromptRow
from millrace.errors import BadRow, InvalidJob, NotFound, Unavailable
from millrace.ids import row_of
from millrace.rest import ImageView
from millrace.spec import JobSpec
from services.coordinator.state.job import JobRecord

READ_S = 25.0
"""How long a request waits for its image. The reading goes on, so that a later request finds the data open."""
HELD_S = 300.0
"""The data that was opened last is held for so long after the last request."""
UNKNOWN: tuple[str, int | None, int | None] = ("", None, None)
FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of JPEG that a frame begins with, which has the size."""
ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers of JPEG that no length follows."""

MOST_SEGMENTS = 4096
"""Segments of a JPEG that are looked at for its size. A segment has up to 64 KiB."""


def views(files: Sequence[bytes]) -> list[ImageView]:
    """What samples say of the images of their prompt."""
    return [view(file) for file in files]


def view(file: bytes) -> ImageView:
    kind, width, height = header(file)
    digest = hashlib.sha256(file).hexdigest()
    return ImageView(media_type=kind, width=width, height=height, bytes=len(file), sha256=digest)


def header(file: bytes) -> tuple[str, int | None, int | None]:
    """Media type, width and height in pixels of a PNG, JPEG, WebP or GIF, by its first bytes. The size is None where
    they do not tell it; the type of any other file is empty."""
    if file.startswith(b"\x89PNG\r\n\x1a\n"):
        return ("image/png", *_sizes(file[16:24], 4, "big")) if file[12:16] == b"IHDR" else ("image/png", None, None)
    if file.startswith((b"GIF87a", b"GIF89a")):
        return ("image/gif", *_sizes(file[6:10], 2, "little"))
    if file.startswith(b"RIFF") and file[8:12] == b"WEBP":
        return ("image/webp", *_webp(file))
    if file.startswith(b"\xff\xd8\xff"):
        return ("image/jpeg", *_jpeg(file))
    return UNKNOWN


Order = Literal["big", "little"]
Size = tuple[int | None, int | None]


def _sizes(data: bytes, width: int, order: Order) -> Size:
    """Two numbers of `width` bytes each."""
    if len(data) < 2 * width:
        return None, None
    return int.from_bytes(data[:width], order), int.from_bytes(data[width : 2 * width], order)


def _webp(file: bytes) -> Size:
    kind = file[12:16]
    if kind == b"VP8X":
        width, height = _sizes(file[24:30], 3, "little")
        return (None, None) if width is None or height is None else (width + 1, height + 1)
    if kind == b"VP8L" and len(file) >= 25:
        packed = int.from_bytes(file[21:25], "little")
        return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and file[23:26] == b"\x9d\x01\x2a":
        width, height = _sizes(file[26:30], 2, "little")
        return (None, None) if width is None or height is None else (width & 0x3FFF, height & 0x3FFF)
    return None, None


def _jpeg(file: bytes) -> Size:
    """The size in the first frame. Each segment before it says how long it is."""
    at = 2
    for _ in range(MOST_SEGMENTS):
        if len(file) < at + 4 or file[at] != 0xFF:
            break
        marker = file[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in FRAMES:
            height, width = _sizes(file[at + 5 : at + 9], 2, "big")
            return width, height
        else:
            at += 2 if marker in ALONE else 2 + max(2, int.from_bytes(file[at + 2 : at + 4], "big"))
    return None, None


class ImageFiles:
    """The image files of prompts, from the data of their jobs. One thread reads, so that slow files hold up nothing
    else, and the data of one job is open at a time."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "images")
        self._held: tuple[str, PromptSource] | None = None
        self._forgetting: asyncio.TimerHandle | None = None

    async def get(self, job: JobRecord, prompt_id: str, number: int, sha256: str = "") -> tuple[bytes, str]:
        """The file of image `number`, counted from 1, of a prompt, and its media type. `sha256`: the hash that it has
        to have, if any. Raises NotFound for what is not there or is no picture that browsers show, and Unavailable if
        reading takes too long."""
        loop = asyncio.get_running_loop()
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = loop.call_later(HELD_S, self._forget)
        reading = loop.run_in_executor(self._reader, self._row, job, prompt_id)
        try:
            async with asyncio.timeout(READ_S):
                row = await reading
        except TimeoutError as error:
            what = f"the row of prompt {prompt_id} of {job.id} was not read within {READ_S:g} s."
            raise Unavailable(what, "repeat the request; the data may be open by then.") from error
        label = f"image {number} of prompt {prompt_id} of {job.id}"
        if not 1 <= number <= len(row.images):
            count = len(row.images)
            fix = f"ask for image 1{f' to {count}' if count > 1 else ''}." if count else "ask for another prompt."
            raise NotFound(f"{label}: the prompt has {count} image{'s' if count != 1 else ''}.", fix)
        file = row.images[number - 1]
        if sha256 and hashlib.sha256(file).hexdigest() != sha256:
            what = f"{label}: the data has another image now than the one that was shown to the model."
            raise NotFound(what, "put the data back as it was when the job ran.")
        kind = header(file)[0]
        if not kind:
            what = f"{label} is neither PNG, JPEG, WebP nor GIF, which are the kinds that are shown."
            raise NotFound(what, "look at it in the job's data, or store it as one of these.")
        return file, kind

    def _forget(self) -> None:
        self._held = None

    def _row(self, job: JobRecord, prompt_id: str) -> PromptRow:
        """The row of a prompt. Raises NotFound."""
        section: Literal["data", "evaluation"] = "evaluation" if prompt_id.startswith("e") else "data"
        source = self._source(job, section)
        try:
            return source[row_of(prompt_id)]
        except IndexError as error:
            what = f"prompt {prompt_id} of {job.id}: its {section} has {len(source)} rows."
            raise NotFound(what, "take a prompt of the job's samples.") from error
        except BadRow as error:
            raise NotFound(f"prompt {prompt_id} of {job.id}: {error.what}", error.fix) from error

    def _source(self, job: JobRecord, section: Literal["data", "evaluation"]) -> PromptSource:
        """The data of a job, opened if it is not that of the request before. Raises NotFound."""
        name = f"{job.id} {section} {job.spec_digest}"
        if (held := self._held) is not None and held[0] == name:
            return held[1]
        try:
            spec: JobSpec = job.spec
            source = open_section(spec, section) if spec.data.images is not None else None
        except ValidationError as error:
            what = f"the spec of {job.id} is of another release, so its data cannot be opened."
            raise NotFound(what, "look at its data.") from error
        except InvalidJob as error:
            raise NotFound(f"the data of {job.id} cannot be opened: {error.what}", error.fix) from error
        if source is None:
            lacks = "data.images" if spec.data.images is None else "evaluation"
            what = f"prompts of {job.id} have no images: its spec has no {lacks}."
            raise NotFound(what, "ask for an image that its samples name.")
        self._held = name, source
        return source
