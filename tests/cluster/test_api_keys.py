"""Keys: where they come from, what is refused, and who gets in."""

from pathlib import Path

import httpx
import pytest

from cluster.access import check_access
from cluster.api_keys import VARIABLE, ApiKeys
from cluster.cluster_args import ClusterArgs
from cluster.front_args import FrontArgs
from cluster.gate import Gate
from cluster.http import build_app
from cluster.openai.request_limits import LEAST_PRIORITY
from cluster.rate_limit import Rates
from engine.errors import ConfigError
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import FakeBackend, answer_tokens, small_model, small_tokenizer

KEY, OTHER = "sk-0123456789", "sk-9876543210"
PROMPT = {"prompt": "x", "max_tokens": 200}


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def name_of(keys: ApiKeys, header: str | None) -> str | None:
    key = keys.find(header)
    return None if key is None else key.name


def test_files_hold_one_a_line_with_a_name_or_without(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"# of two teams\n\nalice:{KEY}\n  {OTHER}  \r\nbob:with:colons\n")
    keys = ApiKeys.load(path, {VARIABLE: "another-key"})
    assert keys is not None
    assert name_of(keys, f"Bearer {KEY}") == "alice"
    assert name_of(keys, f"bearer   {OTHER} ") == "key-4"
    assert name_of(keys, "Bearer with:colons") == "bob"
    for header in (None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x"):
        assert keys.find(header) is None
    assert keys.find("Bearer another-key") is None, "the file is all there is"
    assert KEY not in repr(keys)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """The first part of the key in which it was cut had opened, and what follows was dropped."""
    rest = (1 << 20) - 10
    path = key_file(tmp_path, f"{'#' * (rest - 1)}\n{KEY}\n{OTHER}\n")
    with pytest.raises(ConfigError, match="^api_key_file: .*keys has more than 1048576 bytes$"):
        ApiKeys.load(path, {})
    keys = ApiKeys.load(key_file(tmp_path, f"{'#' * (rest - 5)}\n{KEY}\n"), {})
    assert keys is not None
    assert name_of(keys, f"Bearer {KEY}") == "key-2"


def test_the_environment_holds_several() -> None:
    keys = ApiKeys.load(None, {VARIABLE: f"a:{KEY},{OTHER}"})
    assert keys is not None
    assert [name_of(keys, f"Bearer {key}") for key in (KEY, OTHER)] == ["a", "key-2"]
    assert ApiKeys.load(None, {}) is None


def test_the_environment_may_hold_a_whole_file() -> None:
    """In which a comma parts nothing, neither a comment nor a key."""
    text = f"# by two, 2026-11-24\nalice:with,comma,{KEY}\n\n{OTHER}\n"
    keys = ApiKeys.load(None, {VARIABLE: text})
    assert keys is not None
    assert name_of(keys, f"Bearer with,comma,{KEY}") == "alice"
    assert name_of(keys, f"Bearer {OTHER}") == "key-4"
    for part in ("2026-11-24", KEY, f"comma,{KEY}"):
        assert keys.find(f"Bearer {part}") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("good-enough\nshort", "line 2: a key has 8 to 512"),
        ("a b:secret-key", "line 1: a name"),
        (":secret-key", "line 1: a name"),
        ("a:secret key", "line 1: a key"),
        ("a:sécret-key", "line 1: a key"),
        ("a:secret-key\na:another-key", "the names must differ"),
        ("a:secret-key\nb:secret-key", "the keys must differ"),
    ],
)
def test_files_that_are_wrong_are_refused_without_their_words(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        ApiKeys.load(key_file(tmp_path, text), {})
    assert caught.value.field == "api_key_file"
    assert "cret" not in str(caught.value)
    with pytest.raises(ConfigError, match=reason):
        ApiKeys.load(None, {VARIABLE: text})


def test_files_that_others_may_touch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mode 0640\); chmod 600"):
        ApiKeys.load(key_file(tmp_path, KEY, 0o640), {})
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="api_key_file"):
            ApiKeys.load(str(path), {})


def test_arguments_hold_a_path_and_never_a_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, KEY)
    args = ClusterArgs.checked({"front": {"api_key_file": path}})
    assert KEY not in args.model_dump_json()
    assert args.front.keys({}) is not None
    with pytest.raises(ConfigError, match=r"front\.api_key_file: 'keys', must be an absolute"):
        ClusterArgs.checked({"front": {"api_key_file": "keys"}})
    with pytest.raises(ConfigError, match=r"front\.api_keys: unknown option"):
        ClusterArgs.checked({"front": {"api_keys": [KEY]}})


def test_a_cluster_s_keys_are_named_where_they_are_said(tmp_path: Path) -> None:
    path = key_file(tmp_path, "")
    with pytest.raises(ConfigError, match=r"^front\.api_key_file: holds no key"):
        ClusterArgs.checked({"front": {"api_key_file": path}}).keys({})
    with pytest.raises(ConfigError, match=rf"^{VARIABLE}: holds no key"):
        ClusterArgs().keys({VARIABLE: ""})


def test_an_ingress_without_the_keys_it_needs_does_not_start() -> None:
    with pytest.raises(ConfigError, match="there is no API key here"):
        FrontArgs(require_api_key=True).keys({})
    assert FrontArgs(require_api_key=True).keys({VARIABLE: KEY}) is not None


def test_beyond_one_machine_s_loopback_there_is_a_key_or_a_word_for_it() -> None:
    keys = ApiKeys.load(None, {VARIABLE: KEY})
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        check_access(None, False, host=host)
    for host, num_nodes in (("0.0.0.0", 1), ("::", 1), ("example.org", 1), ("127.0.0.1", 2)):
        with pytest.raises(ConfigError, match="--api-key-file or KVRELAY_API_KEYS"):
            check_access(None, False, host=host, num_nodes=num_nodes)
        check_access(keys, False, host=host, num_nodes=num_nodes)
        check_access(None, True, host=host, num_nodes=num_nodes)


def guarded(rates: Rates | None = None) -> Server:
    return make_server(keys=ApiKeys.load(None, {VARIABLE: f"a:{KEY},b:{OTHER}"}), rates=rates)


async def ask(server: Server, key: str | None, path: str = "/v1/completions") -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return await server.client.post(path, json=PROMPT, headers=headers)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/small"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
async def test_without_a_key_nothing_is_read_or_told(method: str, path: str) -> None:
    server = guarded()
    needed, wrong = "an API key is needed", "the API key is not valid"
    for header, told in ((None, needed), ("Bearer wrong-key-1", wrong), (KEY, needed)):
        headers = {} if header is None else {"Authorization": header}
        response = await server.client.request(method, path, content=b"{", headers=headers)
        assert response.status_code == 401
        assert response.headers["x-request-id"]
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert error["message"].startswith(told)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "wrong-key-1" not in response.text
    headers = {"Authorization": f"Bearer {OTHER}"}
    response = await server.client.request(method, path, content=b"{", headers=headers)
    assert response.status_code in (200, 400)


async def test_who_asks_for_the_routing_is_known() -> None:
    """So that nobody is told whose requests the others are."""
    gate = Gate(ApiKeys.load(None, {VARIABLE: f"alice:{KEY},{OTHER}"}))

    def routing(caller: str) -> dict[str, str]:
        return {"caller": caller}

    app, _ = build_app(FakeBackend(), small_model(), gate=gate, routing=routing)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/debug/routing")).status_code == 401
        for key, name in ((KEY, "alice"), (OTHER, "key-2")):
            headers = {"Authorization": f"Bearer {key}"}
            response = await client.get("/debug/routing", headers=headers)
            assert response.json() == {"caller": name}


async def test_what_balancers_and_monitors_ask_needs_no_key() -> None:
    server = guarded()
    for path in ("/health", "/ready", "/version"):
        assert (await server.client.get(path)).status_code == 200


async def test_requests_are_counted_for_each_key() -> None:
    server = guarded(Rates(requests_per_minute=2))
    assert (await ask(server, "wrong-key-1")).status_code == 401
    assert [(await ask(server, KEY)).status_code for _ in range(2)] == [200, 200]
    response = await ask(server, KEY, "/tokenize")
    assert response.status_code == 429
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert (await ask(server, OTHER)).status_code == 200


async def test_one_of_two_servers_lets_half_in() -> None:
    server = guarded(Rates(requests_per_minute=4))
    server.gate.divide(2)
    assert [(await ask(server, KEY)).status_code for _ in range(3)] == [200, 200, 429]


async def test_tokens_are_counted_read_and_written() -> None:
    num_tokens = len(answer_tokens()) + len(small_tokenizer().encode("x"))
    server = guarded(Rates(tokens_per_minute=num_tokens))
    assert (await ask(server, KEY)).status_code == 200
    response = await ask(server, KEY)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert (await ask(server, OTHER)).status_code == 200


def test_with_keys_nobody_goes_before_the_others_by_a_number_of_its_own() -> None:
    keys = ApiKeys.load(None, {VARIABLE: KEY})
    assert FrontArgs().limits(keys).least_priority == 0
    assert FrontArgs().limits(None).least_priority == LEAST_PRIORITY
    for given in (None, keys):
        assert FrontArgs(least_priority=-3).limits(given).least_priority == -3


async def test_without_keys_everybody_is_one_caller() -> None:
    server = make_server(rates=Rates(requests_per_minute=1))
    assert (await ask(server, "any-key-at-all")).status_code == 200
    assert (await ask(server, None)).status_code == 429
