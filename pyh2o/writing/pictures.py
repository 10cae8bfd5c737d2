"""Messages of a chat that have pictures and sound in them, as OpenAI's clients send them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.model import Model
from ..errors import PictureError, SettingsError

PICTURES = ("image_url", "input_audio")
"""Types of parts of a message that are no text."""

NO_PROJECTOR = (
    "the model was loaded without a projector for pictures and sound: give it one "
    "(mmproj, --mmproj FILE), or send text"
)


def with_marks(model: Model, messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Messages in which marks stand for pictures, as the model's prompts have them.

    Those that have none stay as they are.

    Raises:
        PictureError: a picture cannot be read, or is somewhere else, or there is no projector.
        SettingsError: a handler of the model has one of its own.
    """
    handler = model.chat.handler
    if hasattr(handler, "clip_model_path"):
        raise SettingsError(
            "llama_cpp's handlers of pictures write past this cache: give the projector as mmproj "
            "in place of chat_handler"
        )
    return [_with_marks(model, message) for message in messages]


def _with_marks(model: Model, message: Mapping[str, Any]) -> Any:
    parts = message.get("content")
    if not isinstance(parts, list) or not any(part.get("type") in PICTURES for part in parts):
        return message
    if model.projector is None:
        raise PictureError(NO_PROJECTOR)
    marked = [
        part["text"] if part.get("type") == "text" else model.projector.mark(picture_of(part))
        for part in parts
    ]
    return {**message, "content": "".join(marked)}


def picture_of(part: Mapping[str, Any]) -> bytes:
    """The bytes of a picture or of sound in a part of a message.

    Raises:
        PictureError: it has none, or another address than a data: URL; nothing is fetched.
    """
    match part:
        case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
            head, comma, data = url.partition(",")
            if not head.startswith("data:") or not head.endswith(";base64") or not comma:
                raise PictureError(
                    "nothing is fetched from elsewhere: give the picture itself as a URL that "
                    "begins with data:image/png;base64,"
                )
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            pass
        case _:
            raise PictureError(
                'give parts of the type "text", "image_url" or "input_audio": no others are read'
            )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise PictureError(f"a picture or sound is no base64 ({error}): encode it so") from error
