"""Who may read the page of a run that goes on: the server, attacked."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.cli.main import main
from gradwire.watch import Follower, RunServer
from live_runs import four_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with four_ranks(tmp_path):
        yield tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[RunServer]:
    with RunServer(Follower(folder)) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


Ask = Callable[..., tuple[int, str, http.client.HTTPMessage]]


@pytest.fixture
def ask(server: RunServer) -> Ask:
    """Asks the server; with the token unless another path is given."""

    def asked(
        path: str, method: str = "GET", token: str | None = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)  # pyright: ignore[reportArgumentType]
        connection.putrequest(method, f"{path}?token={server.token if token is None else token}", skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{server.server_address[1]}"} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, answer.headers

    return asked


def test_who_has_the_address_sees_the_page_and_its_figures(server: RunServer, ask: Ask) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.endswith(f"/?token={server.token}")
    status, text, headers = ask("/")
    assert status == 200
    assert "10 steps, 100 ms each" in text
    assert f'src="watch.js?token={server.token}"' in text
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "<style" not in text  # the policy would not let it through
    assert "style=" not in text
    assert ask("/body")[1].strip() in text
    status, text, headers = ask("/figures.json")
    assert (status, headers["Content-Type"], json.loads(text)["steps"]) == (200, "application/json", 10)
    assert ask("/style.css")[0] == ask("/script.js")[0] == ask("/watch.js")[0] == 200


def test_a_run_that_has_begun_again_without_records_is_a_sentence_on_the_page(folder: Path, ask: Ask) -> None:
    for path in (folder / "live").iterdir():
        path.unlink()
    status, text, _ = ask("/body")
    assert status == 503
    assert "no rank tells" in text


@pytest.mark.parametrize("token", ["", "x", "%ff", "%C3%A9", "a&token=b"])
def test_nobody_sees_anything_without_the_token(ask: Ask, token: str) -> None:
    for path in ("/", "/body", "/figures.json", "/style.css", "/nothing"):
        status, text, _ = ask(path, token=token)
        assert status == 403
        assert text == "the token is missing or wrong: open the address that was printed\n"


def test_the_token_must_be_the_whole_one(server: RunServer, ask: Ask) -> None:
    for token in (server.token[:-1], server.token + "x", server.token.swapcase(), f"x&token={server.token}"):
        assert ask("/", token=token)[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "0.0.0.0", "[::]:1"])
def test_a_page_elsewhere_cannot_have_its_own_name_lead_here(ask: Ask, host: str) -> None:
    status, text, _ = ask("/", Host=host)
    assert status == 403
    assert text.startswith("open this page as http://127.0.0.1:")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "[::1]:80", "127.0.0.1:9"])
def test_a_tunnel_may_have_another_port(ask: Ask, host: str) -> None:
    assert ask("/body", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "<SCRIPT>"])
def test_nothing_but_get_is_answered(ask: Ask, method: str) -> None:
    status, text, headers = ask("/", method)
    assert (status, text, headers["Allow"]) == (405, "", "GET")


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/%2e%2e/style.css", "/live/rank0.json", "/rank0.json", "//etc/passwd", "/live/", "x"],
)
def test_no_file_is_served_by_a_name_from_outside(ask: Ask, path: str) -> None:
    status, text, _ = ask(path)
    assert (status, text) == (404, "there is nothing here\n")


def test_what_is_no_request_is_refused_without_being_repeated(server: RunServer) -> None:
    for raw in (b"<script>\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n"):
        with socket.create_connection(server.server_address[:2], timeout=20) as client:  # pyright: ignore[reportArgumentType]
            client.sendall(raw)
            answer = client.makefile("rb").read()
        assert b"<script" not in answer
        assert b" 4" in answer[:20] or b" 5" in answer[:20] or not answer


def test_clients_that_do_nothing_block_nobody_and_are_left(
    server: RunServer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [socket.create_connection(server.server_address[:2], timeout=20) for _ in range(20)]  # pyright: ignore[reportArgumentType]
    for client in slow:
        client.sendall(b"GET / HT")
    assert ask("/body")[0] == 200
    more = [socket.create_connection(server.server_address[:2], timeout=20) for _ in range(20)]  # pyright: ignore[reportArgumentType]
    assert more[-1].recv(1) == b""  # one too many is turned away at once
    for client in slow + more:
        client.close()
    from gradwire.watch import server as served

    monkeypatch.setattr(served._Handler, "timeout", 0.05)  # pyright: ignore[reportPrivateUsage]
    end_s = time.monotonic() + 20
    while True:  # those that have gone make room
        with socket.create_connection(server.server_address[:2], timeout=20) as client:  # pyright: ignore[reportArgumentType]
            began_s = time.monotonic()
            client.sendall(b"GET / HT")
            assert client.recv(1) == b""
            if time.monotonic() - began_s >= 0.04:
                break
        assert time.monotonic() < end_s


def test_a_port_that_is_in_use_is_said(server: RunServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.server_address[1]
    assert main(["watch", str(folder), "--serve", str(port)]) == 2
    assert f"port {port} is in use: give another one" in capsys.readouterr().err
    assert main(["watch", str(folder), "--serve", "99999"]) == 2
    assert "port 99999 cannot be taken" in capsys.readouterr().err
