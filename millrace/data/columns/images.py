"""The images of one row: verl's column of images with marks in the text, and parts of messages as OpenAI has them.

An image is the bytes of a file. A row gives them as bytes, as {bytes, path} (which the data sets of Hugging Face have),
as a data URL, or as the absolute path of a file below the folders that jobs may use. Nothing is downloaded.
"""

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Any

from millrace.data.columns.values import Values
from millrace.validation.places import ROOTS, lies_below, roots

MARK = "<image>"
"""Where an image of the column stands in the text of a message, in verl's files."""
PART = {"type": "image"}
"""The place of an image in the content of a message, as chat templates read it."""
KINDS = ("image", "image_url", "input_image")
"""Types of parts that are images, of Hugging Face and of OpenAI's two APIs."""
MOST_BYTES = 32 << 20
"""A prompt may have so many bytes of image files in all."""
FIX = "give its bytes, {bytes, path}, a data URL, or the absolute path of a file."


def data_url(file: bytes) -> str:
    """The file as a data URL. Raises TypeError for anything else than bytes."""
    return f"data:application/octet-stream;base64,{base64.b64encode(file).decode()}"


class RowImages:
    """The images of a row, in the order of their places in its prompt."""

    def __init__(self, row: Values, column: str | None, most: int | None) -> None:
        """`column` has a list of images, or is None; `most`: images that the row may have; None: it may have none.
        Raises BadRow."""
        self._row, self._column, self._most = row, column or "", most
        value = row.optional(column)
        if value is not None and not isinstance(value, list | tuple):
            raise row.wrong(self._column, value, "is not a list of images", "write a list, also of one image.")
        self._given = list(enumerate(value or ()))
        self.files: list[bytes] = []

    def split(self, text: str) -> str | list[dict[str, Any]]:
        """The content of a message with this text. If rows have a column of images each mark is the place of the
        next one. Raises BadRow."""
        if not self._column or MARK not in text:
            return text
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(text.split(MARK)):
            if number:
                parts.append(self._next(self._column))
            if piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def part(self, place: str, part: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a message that is an image. Without a value of its own it is the next one of the column. Raises
        BadRow."""
        found = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
        if found is None:
            return self._next(place)
        return self._add(place, found.get("url") if isinstance(found, Mapping) and "url" in found else found)

    def check_all_used(self) -> None:
        """Raises BadRow if the column has more images than the prompt has places."""
        if self._given:
            more = len(self._given)
            reason = f"has {more} more image{'s' if more > 1 else ''} than the prompt has places for"
            raise self._row.bad(self._column, reason, f"write {MARK} where each of them stands in the text.")

    def _next(self, place: str) -> dict[str, Any]:
        if not self._given:
            self._check_allowed(place)
            if not self._column:
                reason, fix = "has no image, and there is no column of images", "write image_url: {url} in it."
                raise self._row.bad(place, reason, fix)
            reason = "has fewer images than the prompt has places for"
            raise self._row.bad(self._column, reason, f"give an image for each {MARK} and each part {{type: image}}.")
        number, value = self._given.pop(0)
        return self._add(f"{self._column}[{number}]", value)

    def _check_allowed(self, place: str) -> None:
        """Raises BadRow if prompts have no images."""
        if self._most is None:
            fix = "set data.images in the job, or write {type: text, text}."
            raise self._row.bad(place, "is an image, and prompts of this job are text only", fix)

    def _add(self, place: str, value: Any) -> dict[str, Any]:
        self._check_allowed(place)
        if len(self.files) == self._most:
            reason = f"is image {self._most + 1} of the prompt, which may have {self._most}"
            raise self._row.bad(place, reason, "raise data.images.max_per_prompt, or leave images out.")
        self.files.append(self._bytes(place, value))
        if (size := sum(map(len, self.files))) > MOST_BYTES:
            reason = f"makes the prompt's images {size:,} bytes, more than {MOST_BYTES:,}"
            raise self._row.bad(place, reason, "store smaller images.")
        return dict(PART)

    def _bytes(self, place: str, value: Any) -> bytes:
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            value = self._from_url(place, value) if value.startswith("data:") else self._from_file(place, value)
        if not isinstance(value, bytes) or not value:
            raise self._row.bad(place, "is not an image", FIX)
        return value

    def _from_url(self, place: str, url: str) -> bytes:
        head, comma, body = url.partition(",")
        try:
            if comma and head.endswith(";base64"):
                return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            pass
        raise self._row.bad(place, "is not a data URL in base64", "write data:image/png;base64,... .")

    def _from_file(self, place: str, path: str) -> bytes:
        if "://" in path:
            fix = "store the file on the coordinator's host, and give its absolute path, or a data URL."
            raise self._row.wrong(place, path[:200], "is an address, and nothing is downloaded", fix)
        if not os.path.isabs(path):
            raise self._row.wrong(place, path[:200], "is neither a data URL nor an absolute path", FIX)
        real, allowed = os.path.realpath(path), roots()
        if allowed and not lies_below(real, allowed):
            fix = f"put it below one of {', '.join(allowed)}, or have an operator add its folder to {ROOTS}."
            raise self._row.wrong(place, path, "lies outside the folders that jobs may use", fix)
        try:
            with open(real, "rb") as file:
                return file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise self._row.wrong(place, path, reason, "give a file that the coordinator can read.") from error
