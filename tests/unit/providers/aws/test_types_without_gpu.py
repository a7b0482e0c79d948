"""Instance types without a GPU: offered where they are named, and booted without waiting for a GPU."""

from __future__ import annotations

from typing import Any

from spotd_providers.aws.doctor import user_data
from spotd_providers.aws.region import kinds_of
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.aws.wire import Hardware, sets_of_types
from spotd_providers.contract.values import NO_GPU


def row(name: str, architecture: str = "x86_64") -> dict[str, Any]:
    return {
        "InstanceType": name,
        "SupportedUsageClasses": ["on-demand", "spot"],
        "ProcessorInfo": {"SupportedArchitectures": [architecture]},
        "VCpuInfo": {"DefaultVCpus": 8},
        "MemoryInfo": {"SizeInMiB": 32768},
    }


def test_only_types_that_are_named_are_offered_and_only_on_the_image_s_processor() -> None:
    rows = [row("m7i.2xlarge"), row("m7g.2xlarge", "arm64"), row("c7i.large"), row("p99.large")]
    found = kinds_of(rows, AwsSettings(cpu_types=("m7*",)), "us-east-1")
    assert found.usable == {
        "m7i.2xlarge": Hardware(
            instance_type="m7i.2xlarge",
            gpu=NO_GPU,
            gpu_count=0,
            gpu_vram_mb=None,
            cpus=8,
            memory_mb=32768,
            sold_as=frozenset({"on-demand", "spot"}),
        )
    }
    assert [one.offer_id for one in found.rejected] == ["m7g.2xlarge"]
    assert kinds_of(rows, AwsSettings(), "us-east-1").usable == {}


def test_types_without_a_gpu_use_up_no_question_for_scores() -> None:
    rows = [row(f"m7i.{size}xlarge") for size in (2, 4, 8)]
    usable = kinds_of(rows, AwsSettings(cpu_types=("m7i.*",)), "us-east-1").usable
    assert len(usable) == 3
    assert sets_of_types(usable.values()) == []


def test_a_machine_without_a_gpu_does_not_wait_for_one() -> None:
    def made(*, has_gpu: bool) -> str:
        return user_data(image="scratch", start_script="true", container="docker", has_gpu=has_gpu)

    assert "nvidia-smi" in made(has_gpu=True)
    assert "--ipc host --gpus all --user 0" in made(has_gpu=True)
    assert "nvidia-smi" not in made(has_gpu=False)
    assert "--ipc host --user 0" in made(has_gpu=False)
