"""Kubernetes does what every provider must do, against its fake cluster, and what is special of it."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.values import InstanceState, Loss, Offer
from spotd_providers.kubernetes.access import read_access
from spotd_providers.kubernetes.machines import job_of, secrets_of
from spotd_providers.kubernetes.market import offers_of
from spotd_providers.kubernetes.plugin import RIGHTS, KubernetesProvider
from spotd_providers.kubernetes.wire import KubernetesSettings
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.harness import CANARY
from spotd_providers.testkit.suite import Behaviour, run
from tests.fakes.kubernetes import ADMIN, KubeQuirks
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.kubernetes.harness import KubernetesHarness, open_harness, play


@pytest.mark.parametrize("behaviour", stories())
def test_kubernetes_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


async def _offer(h: KubernetesHarness, provider: KubernetesProvider) -> Offer:
    page = await provider.offers(h.query())
    return next(one for one in page.offers if one.gpu == "H100_SXM" and one.gpu_count == 1)


def test_a_launch_whose_secret_cannot_be_created_leaves_nothing(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        request = h.request(await _offer(h, provider))
        h.cloud.rights["me"] = {f"{verb} {what}" for _, what, verbs in RIGHTS for verb in verbs if what != "secrets"}
        h.cloud.tokens[CANARY] = "me"
        with pytest.raises(AuthFailed):
            await provider.launch(request)
        await h.settle()
        assert not h.live(request.key)
        assert not h.cloud.objects["jobs"].rows

    play(tmp_path, story)


@pytest.mark.parametrize("may_look", [True, False])
def test_doctor_names_a_namespace_that_is_not_there(may_look: bool, tmp_path: Path) -> None:
    """Rights are granted in it and its lists are empty: a launch would be the first to say so."""

    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        if not may_look:
            h.cloud.rights["me"] = {f"{verb} {what}" for _, what, verbs in RIGHTS for verb in verbs}
            h.cloud.tokens[CANARY] = "me"
        lines = {line.name: line for line in await provider.check()}
        assert lines["rights"].ok, lines["rights"]
        h.more = {"namespace": "absent"}
        async with h.opened() as elsewhere:
            lines = {line.name: line for line in await elsewhere.check()}
            assert lines["rights"].ok is not may_look
            assert ("kubectl create namespace absent" in lines["rights"].detail) is may_look

    play(tmp_path, story)


def test_a_second_pod_that_the_cluster_starts_by_itself_is_ended_with_the_job(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        request = h.request(await _offer(h, provider))
        made = (await provider.launch(request)).instance
        await h.settle()
        h.cloud.add_second_pod(h.cloud.get("jobs", "spotd", request.key))
        await h.settle()
        shown = (await provider.find(request.key))[0]
        assert (shown.state, shown.loss) == (InstanceState.PAUSED, Loss.PREEMPTED)
        await provider.terminate(made.ref)
        await h.settle()
        assert not h.live(request.key)
        assert not h.cloud.objects["pods"].rows

    play(tmp_path, story)


def test_pods_end_although_the_clusters_collector_stands_still(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        request = h.request(await _offer(h, provider))
        made = (await provider.launch(request)).instance
        await h.settle()
        await provider.terminate(made.ref)
        await h.settle()
        assert not h.live(request.key)

    play(tmp_path, story, quirks=KubeQuirks(collector_stands_still=True))


def test_a_job_of_the_same_name_made_again_by_another_is_not_ended_in_place_of_ours(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        request = h.request(await _offer(h, provider))
        made = (await provider.launch(request)).instance
        await h.settle()
        h.cloud.delete("jobs", "spotd", request.key, {"propagationPolicy": "Background"})
        await h.settle()
        twin = h.cloud.add_running_job(request.key, {}, {})
        await provider.terminate(made.ref)
        await h.settle()
        assert h.cloud.get("jobs", "spotd", request.key) is twin

    play(tmp_path, story)


def test_without_the_right_to_list_nodes_only_pools_are_offered_and_it_is_said(tmp_path: Path) -> None:
    pool = {"name": "big", "gpu": "H100", "count": 8, "price": 16, "cpus": 90, "memory_gb": 900}

    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        h.cloud.rights["me"] = {f"{verb} {what}" for _, what, verbs in RIGHTS for verb in verbs}
        h.cloud.tokens[CANARY] = "me"
        page = await provider.offers(h.query())
        assert [one.offer_id for one in page.offers] == ["pool:big:8"]
        assert "only configured pools" in page.note

    play(tmp_path, story, pools=[pool])


# The way in.

LOGIN = """#!{python}
import json, pathlib, sys
path = pathlib.Path({count!r})
number = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(number))
status = {{"token": f"token-{{number}}"}}
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}}))
"""


def _kubeconfig(folder: Path, server: str, user: dict[str, object], **cluster: object) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return path


@pytest.mark.process
def test_a_token_that_runs_out_is_fetched_anew_from_the_login_program(tmp_path: Path) -> None:
    program = tmp_path / "login"
    program.write_text(LOGIN.format(python=sys.executable, count=str(tmp_path / "count")))
    program.chmod(0o755)
    login = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "interactiveMode": "Never"}

    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        h.cloud.tokens["token-1"] = ADMIN
        offer = await _offer(h, provider)
        h.cloud.tokens = {"token-2": ADMIN}
        await provider.launch(h.request(offer))
        assert len(h.live()) == 1
        h.cloud.tokens.clear()
        with pytest.raises(AuthFailed):
            await provider.instances()

    with open_harness(tmp_path) as h:
        path = _kubeconfig(tmp_path, h.served.url, {"exec": login})
        h.more = {"base_url": None, "kubeconfig": str(path)}

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, KubernetesProvider)
                await story(h, provider)

        run_virtually(main)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not lead into a cluster"),
        ("]", "does not lead into a cluster"),
        ('{"clusters": []}', "does not lead into a cluster"),
        ("insecure", "insecure-skip-tls-verify"),
        ("clear", "in the clear"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_said_with_the_way_out(
    content: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    if content == "insecure":
        path = _kubeconfig(tmp_path, "https://198.51.100.1", {"token": "t"}, **{"insecure-skip-tls-verify": True})
    elif content == "clear":
        path = _kubeconfig(tmp_path, "http://198.51.100.1", {"token": "t"})
    elif content is not None:
        path.write_text(content)
    with pytest.raises(AuthFailed, match=said) as caught:
        read_access(KubernetesSettings(kubeconfig=str(path)))
    assert "'t'" not in str(caught.value)


# The fake, by the official client: what it answers is what the client's models expect.


@pytest.mark.process
def test_the_official_client_reads_what_the_fake_says(tmp_path: Path) -> None:
    from kubernetes import client

    with open_harness(tmp_path) as h:
        found = client.Configuration(host=h.served.url)
        found.api_key = {"authorization": f"Bearer {CANARY}"}
        api = client.ApiClient(found)
        batch, core = client.BatchV1Api(api), client.CoreV1Api(api)
        assert {one.metadata.name for one in core.list_node().items} == {"big", "small", "cheap"}
        offer = offers_of([api.sanitize_for_serialization(core.read_node("big"))], None, h.settings())[0][0]
        request = h.request(offer)
        made = batch.create_namespaced_job("spotd", job_of(request, h.settings()))
        for secret in secrets_of(request, made.metadata.uid):
            core.create_namespaced_secret("spotd", secret)
        with pytest.raises(client.ApiException) as twice:
            batch.create_namespaced_job("spotd", job_of(request, h.settings()))
        assert (twice.value.status, json.loads(twice.value.body)["reason"]) == (409, "AlreadyExists")
        h.fake_clock.advance(timedelta(minutes=1))
        core.list_namespaced_pod("spotd")
        h.fake_clock.advance(timedelta(minutes=1))
        pod = core.list_namespaced_pod("spotd", label_selector=f"batch.kubernetes.io/job-name={request.key}").items[0]
        assert pod.status.phase == "Running"
        assert pod.status.container_statuses[0].state.running.started_at
        assert batch.read_namespaced_job(request.key, "spotd").spec.backoff_limit == 0
        batch.delete_namespaced_job(request.key, "spotd", propagation_policy="Background")
        with pytest.raises(client.ApiException) as absent:
            batch.read_namespaced_job(request.key, "spotd")
        assert absent.value.status == 404
