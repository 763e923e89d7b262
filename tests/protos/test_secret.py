from pathlib import Path

import pytest

from protos.errors import PlaneError
from protos.rpc import Plane, RpcConfig
from protos.secret import VARIABLE, Secret

TEXT = "correct horse battery staple"


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_file_before_environment(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT + "\n")
    other = {VARIABLE: "another one of some length"}
    assert Secret.load(path, other) == Secret(TEXT.encode())
    assert Secret.load(None, other) == Secret(b"another one of some length")
    assert Secret.load(None, {}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o777])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(PlaneError, match=f"secret_file: .*{mode:04o}.*chmod 600"):
        Secret.load(write(tmp_path, TEXT, mode), {})


def test_what_is_no_secret(tmp_path: Path) -> None:
    for text in ("", "short", "x" * 5000, " " * 40):
        with pytest.raises(PlaneError, match="secret_file: .*16 to 4096"):
            Secret.load(write(tmp_path, text), {})
        with pytest.raises(PlaneError, match=f"{VARIABLE}: .*16 to 4096"):
            Secret.load(None, {VARIABLE: text})
    with pytest.raises(PlaneError, match="cannot be read"):
        Secret.load(str(tmp_path / "absent"), {})
    with pytest.raises(PlaneError, match="cannot be read"):
        Secret.load(str(tmp_path), {})


def test_nothing_that_is_printed_shows_it(tmp_path: Path) -> None:
    plane = Plane.load(RpcConfig(secret_file=write(tmp_path, TEXT)), {})
    assert plane.secret == Secret(TEXT.encode())
    assert "horse" not in repr(plane)
    with pytest.raises(PlaneError) as caught:
        Secret.load(None, {VARIABLE: "hunter2"})
    assert "hunter2" not in str(caught.value)
