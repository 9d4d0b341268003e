"""What the balancer in front of the routers answers with itself: compose/haproxy.cfg."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = Path(__file__).parents[2] / "compose/haproxy.cfg"

LINE = re.compile(
    r"^    http-error status (\d+) content-type application/json string '([^']*)'$", re.M
)


def test_errors_have_the_shape_of_openai_s_and_say_what_to_do() -> None:
    text = FILE.read_text()
    found = {int(status): json.loads(body) for status, body in LINE.findall(text)}

    assert len(found) == text.count("http-error ")
    assert {400, 408, 500, 502, 503, 504} <= set(found)
    for status, body in found.items():
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert re.search(r": (send|mend) ", error["message"])
        assert (error["type"] == "invalid_request_error") == (status < 500)
