"""Rows with images, and pictures in many forms."""

from __future__ import annotations

import base64
import io
from typing import Any

from helpers.vision import picture


def encoded(kind: str = "PNG", width: int = 8, height: int = 6, seed: int = 0, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture(width, height, seed).save(buffer, kind, **options)
    return buffer.getvalue()


PNG = encoded()

TEXT = base64.b64encode(PNG).decode()
