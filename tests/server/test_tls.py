"""TLS on the server's port, with and without certificates of clients, and large messages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest

from k3jax.config import ConfigError
from serving.rpc.protocol import Stub, messages
from serving.tls import TlsFiles, find_tls
from tests.server.harness import PROMPT, collect, request, serving, status_of, write_model_folder
from tests.server.test_client import client, text_of

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make certificates"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two self-signed certificates for 127.0.0.1 and their keys: `a` and `b`."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("a", "b"):
        command = [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")),
        ]
        subprocess.run(command, check=True, capture_output=True)
    return folder


@needs_openssl
async def test_clients_talk_over_tls_and_need_a_certificate_if_it_is_asked_for(
    made: Path, tmp_path: Path
):
    tls = TlsFiles(cert=made / "a.pem", key=made / "a.key", client_ca=made / "b.pem")
    async with serving(tls=tls, folder=write_model_folder(tmp_path)) as harness:

        async def ask(*credentials: bytes) -> bool:
            secure = grpc.ssl_channel_credentials(*credentials)
            async with grpc.aio.secure_channel(harness.address, secure) as channel:
                call = Stub(channel).HealthCheck(messages.HealthCheckRequest(), timeout=5)
                return (await call).healthy

        a, b, b_key = ((made / name).read_bytes() for name in ("a.pem", "b.pem", "b.key"))
        assert await ask(a, b_key, b)
        for credentials in ((a,), (a, (made / "a.key").read_bytes(), a), (b, b_key, b)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ask(*credentials)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        files = {"--ca": "a.pem", "--cert": "b.pem", "--key": "b.key"}
        options = [word for name, file in files.items() for word in (name, str(made / file))]
        ids = ("--request-id", "c", "--max-tokens", "5", "--seed", "0")
        run = await client("--address", harness.address, *options, *ids, "HI")
        assert (run.code, run.stdout) == (0, text_of("HI", 5) + "\n"), run.stderr


@needs_openssl
def test_files_that_do_not_fit_are_refused(made: Path, tmp_path: Path):
    assert find_tls(None, None, None) is None
    cert, key = made / "a.pem", made / "a.key"
    for arguments, words in (
        ((cert, None, None), "--tls-key is missing"),
        ((None, None, cert), "--tls-cert is missing"),
        ((cert, made / "b.key", None), "--tls-cert, --tls-key cannot be used"),
        ((tmp_path / "none", key, None), "No such file"),
        ((cert, key, key), "--tls-client-ca cannot be used"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_tls(*arguments)


async def test_a_message_above_the_limit_is_refused_and_the_next_one_is_served():
    async with serving(max_message_bytes=2000) as harness:
        status, _, _ = await status_of(harness.stub.Generate(request(prompt=PROMPT * 1000)))
        assert status == "RESOURCE_EXHAUSTED"
        assert (await collect(harness.stub.Generate(request()))).complete is not None
