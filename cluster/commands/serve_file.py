"""What a file says to `kvrelay serve`: the arguments themselves, or what `serve deploy` takes, also
within a RayService."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, Self

from cluster.validation import check_known, checked
from cluster.worker_config import only, parse_options, read_documents
from engine.errors import ConfigError

# What an application says here, `kvrelay serve` says as well, or it changes nothing.
_KNOWN = {"name", "args", "import_path", "route_prefix", "autoscaling_policy", "logging_config"}
# As `cluster.deployment` has them, which loads Ray: a file of arguments alone takes none.
_OURS = {"route_prefix": "/", "import_path": "cluster.app:build"}
_OF_FRONT = {"host", "port"}
# Where a file has what flags call by these names.
IN_FILE = {
    "host": "http_options.host",
    "port": "http_options.port",
    "grpc_port": "grpc_options.port",
}
_RAY_SERVICE, _IN_SPEC = "RayService", "serveConfigV2"


class ServeFile(NamedTuple):
    """`host` and ports are of Serve's front, as far as the file says them."""

    args: Mapping[str, Any]
    host: str | None = None
    port: int | None = None
    grpc_port: int | None = None
    others: tuple[str, ...] = ()  # that Serve alone keeps to
    is_ray_service: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """ConfigError for what Serve would refuse, or drop without a word; `check_only_ours` is for
        what `kvrelay serve` would drop."""
        options = _document(path)
        is_ray_service = options.get("kind") == _RAY_SERVICE
        if is_ray_service:
            options = _serve_config(options, path)
        if "applications" not in options and not is_ray_service:
            return cls(options)
        from ray.serve.schema import ServeDeploySchema

        read = checked(ServeDeploySchema, options).model_dump(exclude_unset=True)
        check_known(options, read)
        try:
            (application,) = read["applications"]
            _check_code(application)
            args = dict(application.get("args") or {})
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError("config", f"{path}: applications: must be one, with args") from error
        front, grpc = read.get("http_options") or {}, read.get("grpc_options") or {}
        others = [f"applications.0.{name}" for name in _others(application)]
        others += [f"http_options.{name}" for name in front.keys() - _OF_FRONT]
        ports = front.get("port"), grpc.get("port")
        return cls(args, front.get("host"), *ports, tuple(others), is_ray_service)

    def check_only_ours(self) -> None:
        """ConfigError for the first of the others."""
        if self.is_ray_service:
            raise ConfigError("kind", f"a {_RAY_SERVICE} is for `kubectl apply`, and for --check")
        if self.others:
            raise ConfigError(self.others[0], "is for `serve run` and `serve deploy`")


def _document(path: Path) -> dict[str, Any]:
    """The only one, or the RayService among others that `kubectl apply` is given with it."""
    documents = read_documents(path)
    ray_services = [one for one in documents if one.get("kind") == _RAY_SERVICE]
    return only(ray_services or documents, str(path))


def _serve_config(ray_service: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A text in it, which Kubernetes does not look into. The rest KubeRay's definition is for."""
    spec = ray_service.get("spec")
    text = spec.get(_IN_SPEC) if isinstance(spec, Mapping) else None
    if not isinstance(text, str):
        raise ConfigError(f"spec.{_IN_SPEC}", "must be given: the Serve config, as a text")
    return parse_options(text, f"{path}: spec.{_IN_SPEC}")


def _others(application: Mapping[str, Any]) -> list[str]:
    differs = [name for name, value in _OURS.items() if application.get(name, value) != value]
    return differs + [name for name in application if name not in _KNOWN and application[name]]


def _check_code(application: Mapping[str, Any]) -> None:
    """That what it names is there, which Serve finds out after having started a process for it."""
    if application.get("runtime_env"):
        return  # of which it may be
    policy = (application.get("autoscaling_policy") or {}).get("policy_function")
    named = {"import_path": application["import_path"], "autoscaling_policy": policy}
    for key, path in named.items():
        try:
            if path is not None:
                resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"applications.0.{key}", f"{path}: {error}") from error
