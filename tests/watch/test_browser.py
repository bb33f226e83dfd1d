"""What a browser makes of the page: it follows, and runs nothing of what a job is called."""

from __future__ import annotations

from dataclasses import replace

from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.live import live
from odyssey_megatron.watch import page
from odyssey_megatron.watch.serve import Server, listen

from .browser import shown

EVIL = "<img src=x onerror=\"document.title='evil'\"><script>document.title='evil'</script>"


def test_it_follows_and_runs_nothing_of_the_job_s(runs, tmp_path):
    state = live("shot_at", Follower(runs["shot_at"]).events())
    asked = []

    def part() -> tuple[str, bytes]:
        asked.append(state)
        return "text/html", page.part(
            replace(state, name=f"looked {len(asked)} times {EVIL}", verdict=None)
        ).encode()

    answers = {"/": lambda: ("text/html", page.document(replace(state, name=EVIL)).encode()), "/part": part}
    server = Server(listen("127.0.0.1", 0, "x"), answers, token="", policy=page.POLICY).start()
    found = shown(f"http://127.0.0.1:{server.socket.getsockname()[1]}/", tmp_path, wait_ms=4000)
    server.shutdown()
    server.server_close()
    assert len(asked) >= 2
    assert f"looked {len(asked)} times" in found or f"looked {len(asked) - 1} times" in found
    assert "<title>evil</title>" not in found
    assert "<img" not in found
    assert found.count('<td class="dead"') == 3
    assert 'class="gone"' not in found


def test_it_says_so_when_nobody_answers_any_more(runs, tmp_path):
    state = live("shot_at", Follower(runs["shot_at"]).events())
    answers = {"/": lambda: ("text/html", page.document(state).encode())}  # and nothing at /part
    server = Server(listen("127.0.0.1", 0, "x"), answers, token="", policy=page.POLICY).start()
    found = shown(f"http://127.0.0.1:{server.socket.getsockname()[1]}/", tmp_path)
    server.shutdown()
    server.server_close()
    assert '<body class="gone">' in found
    assert found.count('<td class="dead"') == 3, "what it was last"
