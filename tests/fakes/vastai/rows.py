"""How asks and contracts look in vast.ai's JSON."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from spotd_providers.contract.values import MICRO
from tests.fakes.vastai.asks import HOURS_PER_MONTH, Ask
from tests.fakes.vastai.contracts import Contract, Phase, status_words
from tests.fakes.vastai.quirks import Quirks


def ask_row(ask: Ask, *, kind: str, allocated_gb: float, now: datetime, quirks: Quirks) -> dict[str, Any]:
    """The row of a search answer; `kind` is the search's `type`."""
    bid = kind in ("bid", "interruptible")
    base = ask.min_bid if bid and quirks.base_shows_bid else ask.dph_base
    storage = ask.storage_cost * allocated_gb / HOURS_PER_MONTH
    return {
        **_hardware(ask),
        "id": ask.ask_id,
        "ask_contract_id": ask.ask_id,
        "rentable": ask.rentable,
        "rented": False,
        "is_bid": False,  # on every search row: the market is known by the search's `type` only
        "min_bid": ask.min_bid,
        "dph_base": base,
        "dph_total": base + storage,
        "dph_total_adj": base + storage,
        "storage_total_cost": storage,
        "duration": ask.duration_s,
        "start_date": now.timestamp() - 86400,
        "end_date": now.timestamp() + ask.duration_s,
        "search": {"gpuCostPerHour": base, "diskHour": storage, "totalHour": base + storage},
        "instance": {"gpuCostPerHour": 0, "diskHour": storage, "totalHour": storage},
        "time_remaining": "",
        "time_remaining_isbid": "",
        **ask.more,
    }


def contract_row(contract: Contract, *, now: datetime, quirks: Quirks) -> Any:
    """The row of an instance, as edited by the quirks.

    The official client reads `start_date` as a number and `extra_env` as pairs, and fails on anything else.
    """
    ask = contract.ask
    running = contract.phase is Phase.RUNNING
    base = contract.price / MICRO
    storage = ask.storage_cost * contract.disk_gb / HOURS_PER_MONTH
    row = {
        **_hardware(ask),
        "id": contract.contract_id,
        "label": contract.label,
        **status_words(
            contract,
            silent=now - contract.created_at < quirks.null_status_for,
            scheduling=quirks.outbid_as_scheduling,
        ),
        "is_bid": contract.is_bid,
        "min_bid": ask.min_bid,
        "dph_base": base,
        "dph_total": base + storage,
        "storage_total_cost": storage,
        "disk_space": contract.disk_gb,
        "disk_usage": -1,
        "disk_util": -1,
        "image_uuid": contract.image,
        "image_args": contract.args,
        "image_runtype": contract.runtype,
        "onstart": contract.onstart,
        "extra_env": [[name, value] for name, value in contract.env.items()],
        "start_date": contract.created_at.timestamp(),
        "end_date": contract.end_at.timestamp(),
        "duration": (contract.end_at - now).total_seconds(),
        "uptime_mins": None,
        "ports": _ports(contract, quirks.ports) if running else None,
        "public_ipaddr": "203.0.113.42 \n",
        "local_ipaddrs": "192.0.2.1 \n",
        "ssh_host": "ssh4.vast.ai",
        "ssh_idx": "4",
        "ssh_port": 10000 + contract.contract_id % 50000,
        "machine_dir_ssh_port": 43999,
        "direct_port_start": -1,
        "direct_port_end": -1,
        "gpu_util": 97.0 if running else None,
        "gpu_temp": 61.0 if running else None,
        "cpu_util": 12.0 if running else 0,
        "mem_limit": None,
        "mem_usage": None,
        "vmem_usage": None,
        "template_id": None,
        "template_hash_id": None,
        "template_name": None,
        "jupyter_token": "fake-jupyter-token",
        "country_code": (ask.geolocation or "").rpartition(",")[2].strip() or None,
        "credit_balance": None,
        "credit_discount": None,
        "client_run_time": 1.1,
        "host_run_time": 2592000.0,
        "volume_info": None,
        "search": {"gpuCostPerHour": base, "diskHour": storage, "totalHour": base + storage},
        "instance": {"gpuCostPerHour": base if running else 0, "diskHour": storage, "totalHour": base + storage},
        "time_remaining": "",
        "time_remaining_isbid": "",
    }
    edit = quirks.edit_instance.get(contract.contract_id, {})
    return {**row, **edit} if isinstance(edit, dict) else edit


def _ports(contract: Contract, shape: str) -> Any:
    """Where the container's ports are reached: those it asked for as keys of `env`, and sshd's where there is one."""
    wanted = ["22/tcp"] if contract.runtype.startswith(("ssh", "jupyter")) else []
    for name in contract.env:
        found = re.fullmatch(r"-p (\d+:)?(\d+)(/tcp|/udp)?", name)
        if found is not None:
            wanted.append(f"{found[2]}{found[3] or '/tcp'}")
    outside = [str(20_000 + number) for number in range(len(wanted))]
    if shape == "list":
        return [int(port) for port in outside]
    if shape == "null":
        return None
    return {
        inside: [{"HostIp": "0.0.0.0", "HostPort": port}, {"HostIp": "::", "HostPort": port}]  # noqa: S104 - what vast.ai prints, nothing binds here
        for inside, port in zip(wanted, outside, strict=True)
    }


def _hardware(ask: Ask) -> dict[str, Any]:
    share = ask.num_gpus / max(1, ask.machine_gpus)
    return {
        "machine_id": ask.machine_id,
        "host_id": ask.machine_id // 10,
        "bundle_id": ask.machine_id * 100 + ask.num_gpus,
        "gpu_name": ask.gpu_name,
        "gpu_arch": "nvidia",
        "num_gpus": ask.num_gpus,
        "gpu_frac": share,
        "gpu_ram": ask.gpu_ram,
        "gpu_total_ram": ask.gpu_ram * ask.num_gpus,
        "gpu_totalram": ask.gpu_ram * ask.num_gpus,
        "gpu_lanes": 16,
        "gpu_mem_bw": 884.4,
        "gpu_max_power": 450.0,
        "gpu_max_temp": 88.0,
        "gpu_display_active": False,
        "bw_nvlink": 0.0,
        "compute_cap": 890,
        "cuda_max_good": ask.cuda_max_good,
        "driver_version": "570.124.06",
        "driver_vers": 570124006,
        "cpu_arch": "amd64",
        "cpu_name": "AMD EPYC 7452 32-Core Processor",
        "cpu_cores": 64,
        "cpu_cores_effective": 64.0 * share,
        "cpu_ghz": 3.35,
        "cpu_ram": int(257655 * share),
        "has_avx": 1,
        "mobo_name": "ROMED8",
        "os_version": "22.04",
        "disk_name": "nvme",
        "disk_space": ask.disk_space,
        "disk_bw": 3120.0,
        "pci_gen": 4.0,
        "pcie_bw": 24.4,
        "inet_up": 812.3,
        "inet_down": 904.1,
        "inet_up_cost": ask.inet_up_cost,
        "inet_down_cost": ask.inet_down_cost,
        "internet_up_cost_per_tb": ask.inet_up_cost * 1024,
        "internet_down_cost_per_tb": ask.inet_down_cost * 1024,
        "storage_cost": ask.storage_cost,
        "geolocation": ask.geolocation,
        "geolocode": 1234,
        "verification": ask.verification,
        "vericode": 1 if ask.verification == "verified" else 0,
        "hosting_type": ask.hosting_type,
        "reliability": ask.reliability,
        "reliability2": ask.reliability,
        "reliability_mult": 0.98,
        "expected_reliability": 0.0,
        "external": None,
        "rentable": ask.rentable,
        "resource_type": "gpu",
        "vms_enabled": False,
        "cluster_id": None,
        "static_ip": True,
        "public_ipaddr": "203.0.113.42",
        "direct_port_count": ask.direct_port_count,
        "dlperf": 98.4 * ask.num_gpus,
        "dlperf_per_dphtotal": 246.0,
        "total_flops": 81.9 * ask.num_gpus,
        "flops_per_dphtotal": 204.0,
        "score": 412.7 * share,
        "vram_costperhour": 0.00002,
        "discount_rate": None,
        "discounted_hourly": 0,
        "discounted_dph_total": ask.dph_base,
        "credit_discount_max": 0.4,
        "logo": "/static/logos/vastai_small2.png",
        "webpage": None,
        "hostname": None,
        "bundled_results": None,
        "rn": 1,
    }
