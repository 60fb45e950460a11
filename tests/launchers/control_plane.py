"""A real control plane of Kubernetes on this machine, and a node that runs pods as local processes.

etcd, kube-apiserver and kube-controller-manager are real. LATENTLINE_KUBERNETES names a folder with these
programs; Debian has etcd (etcd-server), but no recent version of the Kubernetes programs. The node takes
the place of scheduler, kubelet and image: it binds pods, runs their commands, reports their state and serves
their logs.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3 import disable_warnings
from urllib3.exceptions import HTTPError, InsecureRequestWarning

from tests.e2e.daemon import running, until
from tests.free_ports import free_ports
from tests.launchers.kubernetes_pods import Pod

VARIABLE = "LATENTLINE_KUBERNETES"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
NAMESPACE = "default"
TOKEN = "a-token-of-the-tests"
LIMITED_USER, LIMITED_TOKEN = "latentline", "a-token-of-a-user-without-permissions"
INDEX = "batch.kubernetes.io/job-completion-index"


def why_no_control_plane() -> str | None:
    """Return why no control plane can be started here, or None."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return f"{VARIABLE} is not set; see tests/launchers/control_plane.py"
    missing = [name for name in PROGRAMS if not Path(folder, name).exists()]
    return f"{', '.join(missing)} not found in {folder}" if missing else None


class Node:
    """A node of the cluster, which runs every pod as a process.

    Attributes:
        pods: All pods that it has run, by name.
        command_of: Returns the command of a pod on this machine, from its container's command.
    """

    def __init__(self, core: client.CoreV1Api, log_port: int) -> None:
        self._core = core
        self.pods: dict[str, Pod] = {}
        self._reported: dict[str, str] = {}
        self.command_of: Callable[[list[str]], list[str]] = lambda command: [sys.executable, *command[1:]]
        core.create_node({"metadata": {"name": "node"}})
        endpoint = {"kubeletEndpoint": {"Port": log_port}}
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        core.patch_node_status("node", {"status": {"addresses": addresses, "daemonEndpoints": endpoint}})

    def reconcile(self) -> None:
        """Start new pods, stop deleted ones, and report changes."""
        answer: Any = self._core.list_namespaced_pod(NAMESPACE, _preload_content=False)
        for each in json.loads(answer.data)["items"]:
            name, is_deleted = each["metadata"]["name"], "deletionTimestamp" in each["metadata"]
            pod = self.pods.get(name)
            if pod is None and not is_deleted:
                pod = self.pods[name] = self._start(each)
            if pod is None or (is_deleted and pod.has_ended()):
                self._core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
                continue
            if is_deleted:
                pod.terminate()
            status = pod.as_json("ContainerCreating")["status"]
            if status["phase"] != self._reported.get(name):
                self._core.patch_namespaced_pod_status(name, NAMESPACE, {"status": status})
                self._reported[name] = status["phase"]

    def _start(self, manifest: dict[str, Any]) -> Pod:
        metadata = manifest["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": "node"}
        binding = {"metadata": {"name": metadata["name"]}, "target": target}
        self._core.create_namespaced_binding(NAMESPACE, binding, _preload_content=False)
        pod = Pod(metadata["name"], int(metadata["annotations"][INDEX]), manifest["spec"])
        pod.start(self.command_of(manifest["spec"]["containers"][0]["command"]))
        return pod


class ControlPlane:
    """A running cluster.

    Attributes:
        kubeconfig: File with the access to it.
        node: Its only node.
        batch: Requests about jobs.
        core: Requests about pods and services.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        api = config.new_client_from_config(str(kubeconfig))
        self.batch, self.core = client.BatchV1Api(api), client.CoreV1Api(api)
        self.node: Any = None

    def is_ready(self) -> bool:
        """Return whether the API server answers and has created the namespace."""
        with suppress(ApiException, HTTPError):
            self.core.read_namespace(NAMESPACE)
            return True
        return False

    def jobs(self) -> list[str]:
        """Return the names of all jobs that exist."""
        return [job.metadata.name for job in self.batch.list_namespaced_job(NAMESPACE).items]

    def pods(self) -> list[Any]:
        """Return all pods that exist."""
        return self.core.list_namespaced_pod(NAMESPACE).items


@contextmanager
def control_plane(folder: Path) -> Generator[ControlPlane]:
    """Run a cluster with one node until the end of the body."""
    programs = {name: str(Path(os.environ[VARIABLE], name)) for name in PROGRAMS}
    etcd, peers, api, logs = free_ports(4)
    files = _write_files(folder, f"https://127.0.0.1:{api}")
    commands = {
        "etcd": [
            *(f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{etcd}"),
            *(
                f"--advertise-client-urls=http://127.0.0.1:{etcd}",
                f"--listen-peer-urls=http://127.0.0.1:{peers}",
            ),
            *(f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}", "--name=one"),
            f"--initial-cluster=one=http://127.0.0.1:{peers}",
        ],
        "kube-apiserver": [
            *(f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1", f"--secure-port={api}"),
            *(f"--cert-dir={folder}/certificates", "--service-account-issuer=https://kubernetes.default"),
            *(
                f"--service-account-key-file={files}/sa.key",
                f"--service-account-signing-key-file={files}/sa.key",
            ),
            *("--service-cluster-ip-range=10.0.0.0/24", f"--token-auth-file={files}/tokens.csv"),
            # No controller creates the service account that every pod would need.
            *("--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"),
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            *(f"--kubeconfig={files}/kubeconfig", "--leader-elect=false", "--secure-port=0"),
            "--controllers=job-controller,garbage-collector-controller",
        ],
    }
    with ExitStack() as stack:
        for name, options in commands.items():
            log = folder / f"{name}.txt"
            stack.enter_context(
                running([programs[name], *options], environment=dict(os.environ), cwd=folder, log=log)
            )
            if name == "kube-apiserver":
                plane = ControlPlane(files / "kubeconfig")
                until(plane.is_ready, "the API server", seconds=180, log=log)
        plane.node = Node(plane.core, logs)
        stack.enter_context(_node_running(plane.node, files, logs))
        yield plane


def _write_files(folder: Path, server: str) -> Path:
    """Write the keys, the token and the kubeconfig, and return their folder."""
    files = folder / "files"
    files.mkdir(parents=True)
    subprocess.run(["openssl", "genrsa", "-out", files / "sa.key", "2048"], check=True, capture_output=True)
    certificate = ["-nodes", "-keyout", files / "node.key", "-out", files / "node.crt", "-subj", "/CN=node"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *certificate]
    subprocess.run(command, check=True, capture_output=True)
    tokens = f'{TOKEN},tests,1,"system:masters"\n{LIMITED_TOKEN},{LIMITED_USER},2\n'
    (files / "tokens.csv").write_text(tokens)
    kubeconfig = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
    }
    (files / "kubeconfig").write_text(json.dumps(kubeconfig))
    return files


@contextmanager
def _node_running(node: Node, files: Path, port: int) -> Generator[None]:
    """Let the node run pods and serve their logs during the body."""
    disable_warnings(InsecureRequestWarning)
    over = threading.Event()

    class Logs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            _, kind, _, pod, _ = url.path.split("/")
            assert kind == "containerLogs"
            number = int(parse_qs(url.query)["tailLines"][0])
            text = "".join(line for _, line in list(node.pods[pod].log)[-number:]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    def reconcile() -> None:
        while not over.wait(0.1):
            with suppress(ApiException, HTTPError):  # a pod that another process has just deleted
                node.reconcile()

    server = ThreadingHTTPServer(("127.0.0.1", port), Logs)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "node.crt", files / "node.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threads = [threading.Thread(target=each, daemon=True) for each in (server.serve_forever, reconcile)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        threads[1].join(60)
        server.shutdown()
        server.server_close()
        for pod in node.pods.values():
            pod.kill()
