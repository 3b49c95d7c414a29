"""docker/: Containerfiles by a linter, manifests by the schemas of Kubernetes, and all flags,
variables and times by the code that reads them."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from sglang_router.launch_router import RouterArgs

from sglang.srt.arg_groups.checks import mistakes_of
from sglang.srt.arg_groups.cli import parse_flags
from sglang.srt.entrypoints.engine import WRITE_BACK_SECONDS
from sglang.srt.entrypoints.http_server import CLOSE_SECONDS
from sglang.srt.entrypoints.server_routes import HEALTH_TIMEOUT
from sglang.srt.environ import Envs
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

FOLDER: Final = Path(__file__).parents[3] / "docker"
PROJECT: Final = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
IMAGES: Final = {"cpu": None, "cuda": "cuda", "efa": "efa-cuda", "npu": "npu"}
"""Containerfiles, with the extra that names their Mooncake wheel."""
WHEEL: Final = "mooncake-transfer-engine-non-cuda"
LIBRARIES: Final = {
    "libcurl": "libcurl4", "libibverbs": "libibverbs1", "libnuma": "libnuma1",
}  # fmt: skip
"""Debian's packages of the libraries that Mooncake's wheel links, and does not contain."""
EVERYWHERE: Final = {"libc", "libdl", "libgcc_s", "libm", "libpthread", "libstdc++"}
VARIABLES: Final = {
    "POD_IP": "10.0.0.9",
    "POD_NETWORK": "10.0.0.0/8",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "sglang-large-0.sglang-large",
}
LWS_FIELDS: Final = {
    "": {"replicas", "leaderWorkerTemplate"},
    "leaderWorkerTemplate": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
}
"""Fields of LeaderWorkerSet's spec that are used; its schema is not among those of Kubernetes."""


def documents() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted((FOLDER / "k8s").glob("*.yaml")):
        found += yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return found


def name_of(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def pod_templates(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Pod templates of a document."""
    if document["kind"] == "Deployment":
        yield document["spec"]["template"]
    elif document["kind"] == "LeaderWorkerSet":
        template = document["spec"]["leaderWorkerTemplate"]
        yield from (template["leaderTemplate"], template["workerTemplate"])


def containers(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod spec and container of each container."""
    for template in pod_templates(document):
        for container in template["spec"]["containers"]:
            yield template["spec"], container


def expanded(words: list[str]) -> list[str]:
    """Arguments with the variables that Kubernetes replaces."""
    return [re.sub(r"\$\((\w+)\)", lambda m: VARIABLES[m[1]], word) for word in words]


DOCUMENTS: Final = documents()
CONTAINERS: Final = [
    (name_of(document), spec, container)
    for document in DOCUMENTS
    for spec, container in containers(document)
]
SERVERS: Final = [
    (spec, one) for _, spec, one in CONTAINERS if one.get("args", [])[:1] == ["serve"]
]


@pytest.mark.parametrize("image", IMAGES)
def test_a_linter_finds_nothing_in_containerfiles(image: str) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, FOLDER / f"Dockerfile.{image}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("image", "extra"), IMAGES.items())
def test_images_have_the_wheels_of_pyproject(image: str, extra: str | None) -> None:
    text = (FOLDER / f"Dockerfile.{image}").read_text(encoding="utf-8")
    wheels = re.findall(r"mooncake-transfer-engine[\w-]*==[\w.]+", text)
    assert wheels == ([] if extra is None else [PROJECT["optional-dependencies"][extra][0]])
    assert ("uninstall -y mooncake-transfer-engine-non-cuda" in text) is (extra is not None)
    torch = re.findall(r"torch==[\w.]+", text)
    setup = (FOLDER.parent / "scripts/setup.sh").read_text(encoding="utf-8")
    assert all(one in setup for one in torch)
    assert [*PROJECT["scripts"]] == ["sglang"] and 'ENTRYPOINT ["sglang"]' in text
    (command,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    words = [word.strip('" ') for word in command.split(",")]
    assert words[0] == "serve"
    check_server_flags(words[1:])


def test_images_and_the_setup_have_the_libraries_that_mooncake_links() -> None:
    """Names of libraries in the wheel's programs, but for those that it or every system has."""
    files = [Path(one.locate()) for one in distribution(WHEEL).files or ()]
    names = ("engine.so", "store.so", "mooncake_master")
    programs = [one for one in files if one.name in names and one.parent.name == "mooncake"]
    assert len(programs) == len(names)
    linked = {
        found.decode()
        for one in programs
        for found in re.findall(rb"\0(lib[\w+]+)[\w.-]*\.so[.\d]*(?=\0)", one.read_bytes())
    }
    inside = {found[0] for one in files if (found := re.match(r"lib[\w+]+(?=.*\.so)", one.name))}
    assert linked - inside - EVERYWHERE == LIBRARIES.keys()
    for name in (*(f"docker/Dockerfile.{image}" for image in IMAGES), "scripts/setup.sh"):
        words = re.findall(r"[\w.-]+", (FOLDER.parent / name).read_text(encoding="utf-8"))
        assert set(LIBRARIES.values()) <= set(words), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_manifests_fit_the_schemas(document: dict[str, Any]) -> None:
    if document["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        return
    assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = document["spec"]
    assert spec.keys() == LWS_FIELDS[""]
    template = spec["leaderWorkerTemplate"]
    assert template.keys() == LWS_FIELDS["leaderWorkerTemplate"]
    # Pod templates are those of Kubernetes.
    for pod in pod_templates(document):
        labels = pod["metadata"]["labels"]
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": document["metadata"],
            "spec": {"selector": {"matchLabels": labels}, "template": without_nulls(pod)},
        }
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)


def without_nulls(value: Any) -> Any:
    """`value` as the API server reads it: null means absent."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def check_server_flags(words: list[str]) -> ServerArgs:
    parsed = parse_flags(ServerArgs, words, prog="sglang serve", description="")
    args = ServerArgs(**parsed.values)
    if args.disaggregation_secret_file is not None:
        args.disaggregation_secret = "as if read from the file, which is not here"
    assert [*parsed.lines, *mistakes_of(args, parsed.malformed)] == []
    assert parsed.ignored == []
    return args


def test_servers_flags_are_the_engines(tmp_path: Path) -> None:
    (settings,) = (one for one in DOCUMENTS if one["kind"] == "ConfigMap")
    file = tmp_path / "server.yaml"
    file.write_text(settings["data"]["server.yaml"], encoding="utf-8")
    modes = []
    for _, container in SERVERS:
        words = [word.replace("/etc/sglang/server.yaml", str(file)) for word in container["args"]]
        args = check_server_flags(expanded(words[1:]))
        modes.append(str(args.disaggregation_mode))
        assert args.host == VARIABLES["POD_IP"]
    assert sorted(set(modes)) == ["decode", "null", "prefill"]
    assert len(modes) == 5


def test_the_routers_flags_are_the_packages() -> None:
    (router,) = (one for _, _, one in CONTAINERS if one["name"] == "router")
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, exclude_host_port=False)
    args = RouterArgs.from_cli_args(parser.parse_args(router["args"]))
    assert args.service_discovery and args.pd_disaggregation
    assert args.prefill_selector == {"app": "sglang-prefill"}
    assert args.decode_selector == {"app": "sglang-decode"}
    (annotated,) = (
        one["spec"]["template"]["metadata"]["annotations"]
        for one in DOCUMENTS
        if one["metadata"]["name"] == "sglang-prefill"
    )
    assert annotated == {args.bootstrap_port_annotation: "8998"}


def test_the_masters_flags_are_mooncakes() -> None:
    (master,) = (one for _, _, one in CONTAINERS if one["name"] == "master")
    program = Path(sys.executable).with_name(master["command"][0])
    known = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    for word in master["args"]:
        name = word.removeprefix("--").partition("=")[0]
        assert re.search(rf"^\s+-{name} \(", known, re.MULTILINE), name


@pytest.mark.parametrize(("name", "spec", "container"), CONTAINERS)
def test_variables_are_known_and_references_exist(
    name: str, spec: dict[str, Any], container: dict[str, Any]
) -> None:
    given = {one["name"] for one in container.get("env", ())}
    known = {*Envs.fields(), *VARIABLES}
    assert given <= known, name
    for word in re.findall(r"\$\((\w+)\)", str([container.get("args"), container.get("env")])):
        assert word in given or word.startswith("LWS_"), (name, word)
    volumes = {one["name"] for one in spec.get("volumes", ())}
    assert {one["name"] for one in container.get("volumeMounts", ())} == volumes, name
    ports = {one["name"] for one in container.get("ports", ())}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        found = container.get(probe) or {}
        for kind in ("httpGet", "tcpSocket"):
            assert found.get(kind, {}).get("port") in {None, *ports}, (name, probe)


def test_selectors_name_labels_that_pods_have() -> None:
    labels = [pod["metadata"]["labels"] for one in DOCUMENTS for pod in pod_templates(one)]
    for document in DOCUMENTS:
        if document["kind"] == "Service":
            wanted = document["spec"]["selector"].items()
            assert any(wanted <= have.items() for have in labels), name_of(document)


def test_pods_end_after_the_drain_and_probes_wait_for_their_answers() -> None:
    least = ServerArgs.drain_seconds + WRITE_BACK_SECONDS + CLOSE_SECONDS
    for spec, container in SERVERS:
        assert spec["terminationGracePeriodSeconds"] >= least
        startup, live = container["startupProbe"], container["livenessProbe"]
        if startup is None:
            continue  # A worker of a set, which serves no HTTP.
        assert startup["httpGet"]["path"] == "/health_generate"
        assert startup["timeoutSeconds"] > HEALTH_TIMEOUT
        assert live["httpGet"]["path"] == "/health"


def test_page_locked_memory_fits_and_is_reserved() -> None:
    for _, container in SERVERS:
        memory = container["resources"]["requests"]["memory"]
        assert memory == container["resources"]["limits"]["memory"]
        ranks = int(container["resources"]["limits"]["nvidia.com/gpu"])
        words = container["args"]
        if "--hicache-size" in words:
            gigabytes = ranks * int(words[words.index("--hicache-size") + 1])
            assert gigabytes * 10**9 < int(memory.removesuffix("Gi")) << 30


def test_secrets_come_from_files_alone() -> None:
    for document in DOCUMENTS:
        assert document["kind"] != "Secret"
    for _, _, container in CONTAINERS:
        assert not any("secretKeyRef" in str(one) for one in container.get("env", ()))
        for word in container.get("args", ()):
            assert word not in ("--api-key", "--admin-api-key"), container["name"]
