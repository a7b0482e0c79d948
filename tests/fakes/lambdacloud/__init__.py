"""A Lambda Cloud on loopback: its HTTP API of spec 1.10.0, with instances that run their user data as processes.

cloud = LambdaCloud(root, clock=clock)
cloud.stock(*some_kinds())
faults = Faults(LambdaApi(cloud), classify=classify)
with serving(faults) as served:
    settings = LambdaSettings(base_url=served.url + BASE_PATH)

Knobs of the transport are those of `Faults`: `lose_answer(Call.LAUNCH)` (a launch that happens and whose answer is
lost), `hang`, `cut_body`, `truncate`, `edit`, `answer(Call.LIST, Canned(status=503))`, `answer(..., EDGE_ERROR)` (HTML
of the edge with a 403).

Methods of the cloud: `stock`, `sell_out`, `set_price` (also between offer and launch), `fail_next_boot` (`Failure`:
stuck, or unhealthy), `make_unhealthy` and `recover`, `preempt`, `end_by_itself`, `vanish`, `add_foreign`,
`fill_file_system`; `billed` and `spent_usd` are the bill, in whole minutes from the first passed health check.

Fields of `cloud.quirks`; a field marked [U] stands for a fact that is not certain, and has both behaviours:
* times: `boot` [U], `boot_eight_gpus` [U], `terminating`, `lingers` (terminated rows stay listed so long; 0 for not at
  all), `list_lag` and `show_lag` (a new instance is missing from the list, from its own route), `file_system_release`
  (a file system stays in use so long after its instance).
* limits: `rate_limits` (1 request a second, 1 launch in 12 s), `rate_limit_code` [U] (`None` for HTML without a code),
  `retry_after_s` [U], `quota_gpus`, `sells_nothing` (listed, but every launch is out of capacity).
* dialect: `takes_quantity` [U], `has_filesystems_route` [U], `shows_first_healthy` [U], `shows_is_reserved` [U],
  `statuses` [U] (HTTP status by error code, where the reference does not give one).
* money: `minute_rounds_up` [U], `bills_terminating` [U], `bills_preempted` [U], `price_follows` [U] (a new price holds
  for running instances), `price_at_next_launch` (by type, cents that hold from the moment of the launch).
* ends: `after_shutdown` [U] (the phase after a shutdown from inside: active, unhealthy or terminated),
  `terminate_again_conflicts` [U] (409 instead of 200 while terminating), `undead` (calls of terminate that an instance
  launched from now on survives).
* faults: `refusals` (by `Call`, the error code of every answer: `global/account-inactive`, `provider/...`),
  `fail_after_launch` (the error code of the next launch's answer, although the instance was started), `hidden` (ids
  that the list leaves out), `edit_instance` (by id, fields that replace a row's, or anything to stand for the row),
  `edit_types` (by type, anything to stand for its row of the price list).
"""

from tests.fakes.lambdacloud.app import BASE_PATH, EDGE_ERROR, LAUNCH_EVERY, LambdaApi, classify
from tests.fakes.lambdacloud.cloud import LambdaCloud
from tests.fakes.lambdacloud.records import (
    ACCOUNT_KEY,
    JUPYTER_TOKEN,
    REGIONS,
    STATUSES,
    Failure,
    FileSystem,
    Kind,
    LambdaInstance,
    Phase,
    Quirks,
    some_kinds,
)

__all__ = [
    "ACCOUNT_KEY",
    "BASE_PATH",
    "EDGE_ERROR",
    "JUPYTER_TOKEN",
    "LAUNCH_EVERY",
    "REGIONS",
    "STATUSES",
    "Failure",
    "FileSystem",
    "Kind",
    "LambdaApi",
    "LambdaCloud",
    "LambdaInstance",
    "Phase",
    "Quirks",
    "classify",
    "some_kinds",
]
