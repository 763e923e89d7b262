"""What is in deploy/ is what Ray, Serve, Kubernetes and the application take."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import hash_runtime_conf, prepare_config, validate_config
from ray.serve._private import constants
from ray.serve.schema import ServeDeploySchema

from cluster import api_keys
from cluster.app import shutdown_limit_s
from cluster.cluster_args import ClusterArgs
from cluster.ray_cluster import (
    CONTROLLER_SETTINGS,
    HAPROXY_SETTINGS,
    RAYLET_SETTINGS,
    REPLICA_SETTINGS,
)
from protos import secret
from tests.deploy.crd import ray_service_schema
from tests.deploy.wheel import ROOT, build_wheel, packages

DEPLOY = ROOT / "deploy"
CLUSTER_FILES = ["ray-cluster.yaml", "ray-local.yaml"]


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((DEPLOY / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def args_of(config: dict[str, Any]) -> ClusterArgs:
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "cluster.app:build"
    return ClusterArgs.checked(application.args)


def test_the_serve_config_is_the_default_cluster() -> None:
    config = load("serve.yaml")
    assert args_of(config) == ClusterArgs()
    assert config["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_ray_takes_its_cluster_files(name: str) -> None:
    validate_config(prepare_config(load(name)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build_wheel(folder)
    (built,) = folder.iterdir()
    return built


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_machines_get_the_files_that_were_made_and_install_our_wheel(
    name: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file's comments tell to make is there, and nothing else; then Ray's part is done, on
    a machine with another wheel of the same version, and with an older one in the folder."""
    home, there = tmp_path / "home", tmp_path / "there"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    comments = "".join(line for line in lines(name) if line.startswith("#"))
    made = {f"~/{path}" for path in re.findall(r"~/([\w./-]+)", comments)} - {"~/.kvrelay-labels"}
    for path in made:
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        Path(path).expanduser().write_text("x")
    assert "make wheel" in comments
    (folder,) = re.findall(r"--wheel-dir (\S+)", (ROOT / "Makefile").read_text())
    Path(folder).mkdir()
    shutil.copy(wheel, folder)

    config = load(name)
    # It reads them all.
    hash_runtime_conf(config["file_mounts"], None, {})  # type: ignore[no-untyped-call]
    assert set(config["file_mounts"].values()) == {folder, *made}
    for target, source in config["file_mounts"].items():
        target = there / Path(target).relative_to("/home/ubuntu")
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if Path(source).is_dir() else shutil.copy
        copy(Path(source).expanduser(), target)
    older = there / "kvrelay-dist/kvrelay-0.0-py3-none-any.whl"
    older.touch()
    os.utime(older, (0, 0))
    version = wheel.name.split("-")[1]
    assert is_installed(config["setup_commands"], there, version)


def is_installed(commands: list[str], home: Path, last: str) -> bool:
    """In place of that version, without what it depends on, into an environment of its own."""
    venv.create(home / "venv", with_pip=False)
    (site,) = (home / "venv/lib").glob("python*/site-packages")
    info = site / f"kvrelay-{last}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvrelay\nVersion: {last}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pip = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_PYTHON": str(home / "venv/bin/python")}
    environment = {**os.environ, "HOME": str(home), "PATH": path, **pip}
    for command in commands:
        subprocess.run(["bash", "-c", command], check=True, env=environment, cwd=home)
    ours = [(site / name / "__init__.py").is_file() for name in packages()]
    return all(ours) and any((site / "engine/bundled").glob("*.safetensors"))


def lines(name: str) -> list[str]:
    return (DEPLOY / name).read_text().splitlines(keepends=True)


def test_each_pool_has_a_node_type_of_its_own() -> None:
    types = load("ray-cluster.yaml")["available_node_types"]
    roles = {name: one.get("labels", {}).get("kvrelay-role") for name, one in types.items()}
    assert roles == {"head": None, "prefill": "prefill", "decode": "decode"}


def test_no_machine_is_left_to_ray_s_own_image() -> None:
    """Its Python is older than ours."""
    config = prepare_config({"cluster_name": "x", "provider": {"type": "aws", "region": "x"}})
    assert "_p310/bin" in str(config["setup_commands"])
    types = load("ray-cluster.yaml")["available_node_types"]
    assert all("ImageId" in one["node_config"] for one in types.values())


@pytest.mark.parametrize(
    "name", ["serve.yaml", "ray-cluster.yaml", "ray-local.yaml", "rayservice.yaml"]
)
def test_nodes_have_what_kvrelay_serve_has(name: str) -> None:
    text = (DEPLOY / name).read_text()
    settings = {**HAPROXY_SETTINGS, **RAYLET_SETTINGS, **CONTROLLER_SETTINGS, **REPLICA_SETTINGS}
    for setting, value in settings.items():
        said = re.findall(rf"""\b{setting}(?:=\$'|=|,?\s+value: ")([\w.]+(?:\\n[\w -]+)?)""", text)
        assert set(said) == {value.replace("\n", r"\n")}, setting


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_other_users_of_a_machine_do_not_reach_the_front_s_files(name: str) -> None:
    """Whoever connects to HAProxy's socket for its administration may lead callers elsewhere."""
    for place in (
        constants.RAY_SERVE_HAPROXY_SOCKET_PATH,
        constants.RAY_SERVE_HAPROXY_CONFIG_FILE_LOC,
        constants.RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH,
        constants.RAY_SERVE_HAPROXY_SERVER_STATE_FILE,
    ):
        assert Path(place).parent == Path("/tmp/haproxy-serve"), "Serve's own place has moved"
    for part in ("head", "worker"):
        commands = load(name)[f"{part}_start_ray_commands"]
        (start,) = [number for number, one in enumerate(commands) if "ray start" in one]
        assert "install -d -m 700 /tmp/haproxy-serve" in commands[:start]


@pytest.fixture(scope="module")
def kuberay() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(ray_service_schema())


def test_the_ray_service_fits_kuberay_s_definition(
    kuberay: jsonschema.Draft202012Validator,
) -> None:
    kuberay.validate(load("rayservice.yaml"))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("securityContext: {capabilities:", "securityContext: {capability:"),
        ('value: "3600"', "value: 3600"),
        ("secretKeyRef: {name: kvrelay-workers, key: secret}", "secretKeyRef: {name: workers}"),
        ("valueFrom: {secretKeyRef:", "valueFrom: {secretRef:"),
        ('{cpu: "8", memory: 64Gi}', '{cpu: "8", memory: 64 GB}'),
        ("limits: {memory: 8Gi}", "limit: {memory: 8Gi}"),
        ("terminationGracePeriodSeconds: 840", "terminationGracePeriod: 840"),
        ("authOptions: {mode: token}", "authOptions: {mode: tokens}"),
        ("maxReplicas: 8", "maxReplica: 8"),
        (
            "labels: {kvrelay-role: prefill}\n        template",
            "labels: [prefill]\n        template",
        ),
        ("  name: kvrelay\n", "  nam: kvrelay\n"),
    ],
)
def test_what_kuberay_would_drop_or_refuse_is_found(
    kuberay: jsonschema.Draft202012Validator, right: str, wrong: str
) -> None:
    text = (DEPLOY / "rayservice.yaml").read_text()
    assert right in text
    assert not kuberay.is_valid(yaml.safe_load(text.replace(right, wrong)))


def test_the_ray_service_s_groups_are_those_that_its_pools_ask_for() -> None:
    spec = load("rayservice.yaml")["spec"]
    args = args_of(yaml.safe_load(spec["serveConfigV2"]))
    groups = {
        one["groupName"]: one["labels"] for one in spec["rayClusterConfig"]["workerGroupSpecs"]
    }
    assert groups == {
        "prefill": args.prefill.label_selector,
        "decode": args.decode.label_selector,
        "ingress": args.ingress.label_selector,
    }
    sizes = {
        one["groupName"]: one["replicas"] for one in spec["rayClusterConfig"]["workerGroupSpecs"]
    }
    assert args.ingress.replicas == sizes["ingress"] == 2
    assert args.ingress.max_replicas_per_node == 1, "one may die"
    assert spec["rayClusterDeletionDelaySeconds"] >= shutdown_limit_s(args)
    for pod in ray_service_pods(spec):
        assert pod["terminationGracePeriodSeconds"] >= shutdown_limit_s(args)


def test_the_ray_service_s_secrets_reach_every_process_by_its_environment() -> None:
    """A mounted secret is root's, or open to a group: a key file like that is refused."""
    spec = load("rayservice.yaml")["spec"]
    args = args_of(yaml.safe_load(spec["serveConfigV2"]))
    assert args.front.require_api_key
    assert args.front.api_key_file is None
    for pod in ray_service_pods(spec):
        (container,) = pod["containers"]
        secrets = {one["name"] for one in container["env"] if "secretKeyRef" in str(one)}
        assert secrets == {api_keys.VARIABLE, secret.VARIABLE}


def ray_service_pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [one["template"]["spec"] for one in groups]


def test_the_image_has_every_package() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for package in packages():
        assert f"COPY {package} {package}\n" in dockerfile
