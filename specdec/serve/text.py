"""JSON text, as small as it can be written, and in ASCII: no reader mistakes a character inside for a line's end.

Next: errors.py and chunks.py, which write with it.
"""

import json
from typing import Any

_encoder = json.JSONEncoder(ensure_ascii=True, separators=(',', ':'), allow_nan=False)


def dumps(value: Any) -> str:
    return _encoder.encode(value)
