"""How a machine ends itself, as far as the provider's answer decides it."""

from __future__ import annotations

import pytest

from spotd_jobs.runner import process
from tests.integration.runner.servers import Answer, Server

GONE = {
    "accepted": Answer(200, b'{"success": true}'),
    "gone already": Answer(404, b'{"success": false, "error": "no_such_instance"}'),
}
REFUSED = {
    "vast.ai refuses the key with a 404": Answer(404, b'{"success": false, "error": "auth_error"}'),
    "forbidden": Answer(403),
    "broken": Answer(500),
}


@pytest.mark.parametrize(
    ("answer", "is_over"),
    [*((a, True) for a in GONE.values()), *((a, False) for a in REFUSED.values())],
    ids=[*GONE, *REFUSED],
)
def test_a_machine_is_over_only_when_the_provider_says_so(
    answer: Answer, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINER_ID", "77")
    monkeypatch.setenv("CONTAINER_API_KEY", "only-this-machine")
    monkeypatch.setattr(process, "_LINGER_S", 0.0)
    with Server(lambda _: answer) as server:
        how = {"method": "vast", "base_url": server.url}
        assert process.end_machine(how, "done", try_for_s=0.0) is is_over
        assert server.requests[0].path == "/api/v0/instances/77/"
        assert server.requests[0].headers["authorization"] == "Bearer only-this-machine"
