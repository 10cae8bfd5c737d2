"""Pictures and sound in the messages of a chat, in OpenAI's format."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.model import Model
from ..errors import PictureError, SettingsError

PICTURES = ("image_url", "input_audio")
"""Types of message parts that are not text."""

NO_PROJECTOR = (
    "the model was loaded without a projector for pictures and sound: load one (mmproj, "
    "--mmproj FILE), or send only text"
)


def with_marks(model: Model, messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return messages with marks in place of pictures and sound."""
    handler = model.chat.handler
    if hasattr(handler, "clip_model_path"):
        raise SettingsError(
            "llama_cpp's chat handlers for pictures bypass this cache: give the projector as "
            "mmproj instead of chat_handler"
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
    """Return the bytes of a picture or sound in a message part."""
    match part:
        case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
            head, comma, data = url.partition(",")
            if not head.startswith("data:") or not head.endswith(";base64") or not comma:
                raise PictureError(
                    "only data: URLs are supported: send the picture itself as "
                    "data:image/png;base64,..."
                )
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            pass
        case _:
            raise PictureError(
                'unsupported part: use the type "text", "image_url" or "input_audio"'
            )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise PictureError(f"a picture or sound is not valid base64 ({error})") from error
