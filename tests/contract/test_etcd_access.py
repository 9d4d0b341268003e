"""The store on an etcd that wants TLS, client certificates, or a user and password."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_helpers import Watcher, eventually
from etcd_server import Etcd, ServerTls, b64

from kvlease.ca import Authority
from kvlease.config import ConfigError, Settings
from kvlease.store import Store, open_store
from kvlease.store.base import Changed, Committed, Put, StoreUnavailable

OpenStore = Callable[..., Store]
StartWatch = Callable[..., Watcher]
StartEtcd = Callable[..., Etcd]

USER = {"etcd_user": "kvlease", "etcd_password": "secret"}


async def use_all(store: Store, watcher: Watcher) -> None:
    """Every kind of call, each with success."""
    session = await store.open_session(60)
    result = await store.commit({}, [Put("/a", b"1", session)])
    assert isinstance(result, Committed)
    assert [item.key for item in await store.list("/")] == ["/a"]
    assert await store.keep_alive(session) == 60
    await watcher.until(lambda events: any(isinstance(event, Changed) for event in events))
    await store.close_session(session)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


class TestTls:
    @pytest.fixture
    def tls_etcd(self, authority: Authority, start_etcd: StartEtcd) -> Etcd:
        pair = authority.issue("server", ["localhost", "127.0.0.1"])
        return start_etcd(tls=ServerTls(authority.cert, pair.cert, pair.key))

    @pytest.fixture
    def mutual_etcd(self, authority: Authority, start_etcd: StartEtcd) -> Etcd:
        pair = authority.issue("server", ["localhost", "127.0.0.1"])
        return start_etcd(
            tls=ServerTls(authority.cert, pair.cert, pair.key),
            flags=["--client-cert-auth", f"--trusted-ca-file={authority.cert}"],
        )

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    async def test_all_goes_over_tls(
        self,
        tls_etcd: Etcd,
        authority: Authority,
        open_etcd_store: OpenStore,
        watch: StartWatch,
        host: str,
    ) -> None:
        store = open_etcd_store(f"{host}:{tls_etcd.port}", etcd_ca=str(authority.cert))
        await use_all(store, watch(store))

    async def test_a_client_certificate_opens_an_etcd_that_wants_one(
        self,
        mutual_etcd: Etcd,
        authority: Authority,
        open_etcd_store: OpenStore,
        watch: StartWatch,
    ) -> None:
        client = authority.issue("client", [])
        store = open_etcd_store(
            f"https://{mutual_etcd.endpoint}",
            etcd_ca=str(authority.cert),
            etcd_cert=str(client.cert),
            etcd_key=str(client.key),
        )
        await use_all(store, watch(store))

    async def test_a_missing_client_certificate_is_told_in_words(
        self, mutual_etcd: Etcd, authority: Authority, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(mutual_etcd.endpoint, etcd_ca=str(authority.cert))
        with pytest.raises(StoreUnavailable, match="etcd_cert and etcd_key"):
            await store.check()

    async def test_a_server_of_another_authority_is_told_in_words(
        self, tls_etcd: Etcd, tmp_path: Path, open_etcd_store: OpenStore
    ) -> None:
        other = Authority(tmp_path / "ca")
        store = open_etcd_store(tls_etcd.endpoint, etcd_ca=str(other.cert))
        with pytest.raises(StoreUnavailable, match="not signed by the CA in etcd_ca"):
            await store.check()

    async def test_a_certificate_for_another_host_is_told_in_words(
        self, authority: Authority, start_etcd: StartEtcd, open_etcd_store: OpenStore
    ) -> None:
        pair = authority.issue("elsewhere", ["elsewhere.example", "127.0.0.1"])
        server = start_etcd(tls=ServerTls(authority.cert, pair.cert, pair.key))
        store = open_etcd_store(f"localhost:{server.port}", etcd_ca=str(authority.cert))
        with pytest.raises(StoreUnavailable, match="another host name"):
            await store.check()

    async def test_a_plain_client_is_told_that_etcd_may_use_tls(
        self, tls_etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        with pytest.raises(StoreUnavailable, match="if it uses TLS, set etcd_ca"):
            await open_etcd_store(tls_etcd.endpoint).check()

    async def test_a_tls_client_is_told_that_etcd_may_not_use_it(
        self, etcd: Etcd, authority: Authority, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd.endpoint, etcd_ca=str(authority.cert))
        with pytest.raises(StoreUnavailable, match="leave etcd_ca empty"):
            await store.check()

    async def test_files_that_cannot_be_used_are_configuration_errors(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        client, other = authority.issue("client", []), authority.issue("other", [])
        empty = tmp_path / "empty.pem"
        empty.touch()
        ca = str(authority.cert)
        for files, message in (
            ({"etcd_ca": "/none.pem"}, "etcd_ca=/none.pem cannot be read"),
            ({"etcd_ca": str(empty)}, "holds no PEM certificate"),
            ({"etcd_ca": str(client.key)}, "holds no PEM certificate"),
            (
                {"etcd_ca": ca, "etcd_cert": str(client.cert), "etcd_key": "/none.key"},
                "etcd_key=/none.key cannot be read",
            ),
            (
                {"etcd_ca": ca, "etcd_cert": str(client.cert), "etcd_key": str(other.key)},
                "are not a PEM certificate and its unencrypted private key",
            ),
        ):
            with pytest.raises(ConfigError, match=message):
                open_store(Settings(etcd_endpoints="127.0.0.1:1", **files))

    @pytest.mark.parametrize(
        ("endpoints", "message"),
        [
            ("localhost", "host:port"),
            ("localhost:", "host:port"),
            (":2379", "host:port"),
            ("a:1,b", "host:port"),
            (" , ", "names no endpoint"),
            ("https://a:1", "set etcd_ca"),
        ],
    )
    async def test_endpoints_that_cannot_be_used_are_configuration_errors(
        self, endpoints: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            open_store(Settings(etcd_endpoints=endpoints))


class TestUsers:
    @pytest.fixture
    def auth_etcd(self, start_etcd: StartEtcd) -> Etcd:
        """An etcd with the user "kvlease", who may use the keys of kvlease."""
        server = start_etcd(flags=["--auth-token-ttl=1", "--bcrypt-cost=4"])
        turn_auth_on(server)
        return server

    async def test_a_user_with_a_role_for_the_prefix_can_do_everything(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        store = open_etcd_store(auth_etcd.endpoint, **USER)
        await store.check()
        await use_all(store, watch(store))

    async def test_a_token_that_has_expired_is_renewed(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        # Given a store whose token etcd forgets while it is not used.
        store = open_etcd_store(auth_etcd.endpoint, **USER)
        session = await store.open_session(60)
        await store.commit({}, [Put("/a", b"1", session)])
        await asyncio.sleep(2.5)
        # Then every call has another one, and a new watch too.
        await use_all(store, watch(store))
        await asyncio.sleep(2.5)
        late = watch(store, "/late")
        await asyncio.sleep(2.5)
        result = await store.commit({}, [Put("/late", b"1")])
        assert isinstance(result, Committed)
        await late.until(lambda events: len(events) >= 2)

    async def test_etcd_forgets_all_tokens_when_it_restarts_and_nothing_ends(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        store = open_etcd_store(auth_etcd.endpoint, **USER)
        session = await store.open_session(60)
        await store.keep_alive(session)
        watcher = watch(store)
        await watcher.synced()
        await asyncio.to_thread(auth_etcd.restart)

        async def put() -> bool:
            try:
                return isinstance(await store.commit({}, [Put("/a", b"1", session)]), Committed)
            except StoreUnavailable:
                return False

        await eventually(put)
        assert await store.keep_alive(session) == 60
        await watcher.until(lambda events: isinstance(events[-1], Changed))

    async def test_many_calls_authenticate_once(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(auth_etcd.endpoint, **USER)
        before = auth_etcd.requests("Authenticate")
        await asyncio.gather(*(store.get("/a") for _ in range(30)))
        assert auth_etcd.requests("Authenticate") == before + 1

    async def test_a_wrong_password_is_told_in_words(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(auth_etcd.endpoint, etcd_user="kvlease", etcd_password="wrong")
        with pytest.raises(StoreUnavailable, match=r"user 'kvlease'.*correct etcd_user or") as e:
            await store.check()
        assert "wrong" not in str(e.value)

    async def test_a_missing_user_is_told_in_words(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        with pytest.raises(StoreUnavailable, match="set etcd_user and etcd_password"):
            await open_etcd_store(auth_etcd.endpoint).check()

    async def test_a_user_where_none_is_needed_is_told_in_words(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        with pytest.raises(StoreUnavailable, match="leave etcd_user empty"):
            await open_etcd_store(etcd.endpoint, **USER).check()

    async def test_a_user_without_rights_on_the_prefix_is_told_how_to_get_them(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(auth_etcd.endpoint, etcd_prefix="/other", **USER)
        for call in (store.check(), store.list("/"), store.commit({}, [Put("/a", b"1")])):
            with pytest.raises(StoreUnavailable, match="--prefix /other`"):
                await call

    async def test_a_watch_without_rights_tries_again_until_it_has_them(
        self, auth_etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        store = open_etcd_store(auth_etcd.endpoint, etcd_prefix="/later", **USER)
        watcher = watch(store)
        await asyncio.sleep(0.3)
        assert watcher.events == []
        started = time.monotonic()
        token = auth_etcd.call("/v3/auth/authenticate", {"name": "root", "password": "root"})
        grant(auth_etcd, "/later", token["token"])
        await watcher.synced()
        assert time.monotonic() - started < 3


def turn_auth_on(server: Etcd) -> None:
    server.call("/v3/auth/user/add", {"name": "root", "password": "root"})
    server.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
    server.call("/v3/auth/user/add", {"name": USER["etcd_user"], "password": "secret"})
    server.call("/v3/auth/role/add", {"name": "kvlease"})
    server.call("/v3/auth/user/grant", {"user": "kvlease", "role": "kvlease"})
    grant(server, "/kvlease/v1")
    server.call("/v3/auth/enable", {})


def grant(server: Etcd, prefix: str, token: str = "") -> None:
    """What `etcdctl role grant-permission kvlease readwrite --prefix PREFIX` does."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    perm = {"permType": "READWRITE", "key": b64(prefix), "range_end": b64(end)}
    server.call("/v3/auth/role/grant", {"name": "kvlease", "perm": perm}, token)
