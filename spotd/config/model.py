"""What a user may set, section by section. The text under each key is also its comment in `config.example.toml`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spotd.config import values
from spotd.config.credentials import CredentialRef, RegistrySection, resolve_credential
from spotd.config.peers import ApiSection, McpSection, MetricsSection, NotifySection, UserSection
from spotd_jobs.objects.s3_client import is_private
from spotd_jobs.spec.problems import BadValue, Problem, key_path
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.kit.boundary import install_command

INSTALL_PATTERN: Final = r"[a-z0-9][a-z0-9-]{0,22}[a-z0-9]|[a-z0-9]"
SQLITE_DEFAULT: Final = "sqlite"
STORE_DEFAULT: Final = "file"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_OF_EVERY_STORE: Final = frozenset({"url", "flood_objects", "flood_bytes", "flood_logs"})
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._-]*[A-Za-z0-9_-])*/?")
_IDENTITY: Final = re.compile(r"[a-z0-9]{1,16}")
BUCKETS: Final = "buckets"
HUB_URL: Final = "https://huggingface.co"
_BUCKET_URL: Final = re.compile(r"s3://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?")
_BUCKET_KEYS: Final = ("access_key", "secret_key")


def require_endpoint(value: str | None, key: str, carried: str) -> str | None:
    """Return the address, if what is sent there cannot be read on the way.

    Raises:
        PydanticCustomError
    """
    way_out = f'write {key} = "https://..."'
    if value is None:
        return value
    parts = values.url_parts(value, way_out)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise values.hinted("is no URL", way_out)
    if not is_private(value):
        raise values.hinted(f"is plain http, by which {carried} would travel", way_out)
    return value


class BucketSection(values.Section):
    """A bucket with data of jobs, which machines read by signed URLs; docs/how-to/data.md."""

    url: Annotated[str, Field(examples=["s3://corpus/v1"])]
    """What jobs may name as a source: "s3://bucket", or a place in it, and all that is below."""

    endpoint_url: Annotated[str | None, Field(examples=["https://ACCOUNT.r2.cloudflarestorage.com"])] = None
    """Where a bucket that is not AWS's is reached, by this computer and by every host."""

    region: Annotated[str | None, Field(examples=["us-east-1"])] = None
    """Region of the bucket."""

    access_key: Annotated[CredentialRef | None, Field(examples=[{"env": "CORPUS_ACCESS_KEY"}])] = None
    """Where a key id is kept that may list and read the place. Absent, with secret_key: boto3's own search."""

    secret_key: Annotated[CredentialRef | None, Field(examples=[{"env": "CORPUS_SECRET_KEY"}])] = None
    """Where its secret is kept. It never leaves this computer."""

    egress_per_gb: Annotated[values.EgressPrice | None, Field(examples=[0.09])] = None
    """What its owner asks for each GB that a host reads, in dollars. Absent: the list price, as for the store."""

    @field_validator("url")
    @classmethod
    def _url_is_a_place(cls, value: str) -> str:
        if not _BUCKET_URL.fullmatch(value) or {".", ".."} & set(value.split("/")):
            raise values.hinted("names no place in a bucket", 'write url = "s3://bucket/prefix"')
        return value.rstrip("/")

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None) -> str | None:
        return require_endpoint(value, "endpoint_url", "the data")

    @model_validator(mode="after")
    def _keys_belong_together(self) -> BucketSection:
        if (self.access_key is None) != (self.secret_key is None):
            raise values.hinted("access_key and secret_key need each other", "write both, or neither")
        return self

    @property
    def is_bucket(self) -> bool:
        return True


class HubSection(values.Section):
    """The hub that hf:// sources of data are read from."""

    url: str = HUB_URL
    """Where it is; every host reads there, too."""

    token: Annotated[CredentialRef | None, Field(examples=[{"env": "HF_TOKEN"}])] = None
    """Where a token is kept that may read private or gated repositories. No host gets it: hosts read by the signed URLs
    that the hub gives for it."""

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str) -> str:
        return (require_endpoint(value, "url", "the token") or "").rstrip("/")


def read_buckets(tables: Any, store_url: str, problems: list[Problem]) -> dict[str, BucketSection]:
    """Return every `[buckets.NAME]`, understood; what is wrong is added to the problems.

    A place that holds the checkpoint store, or lies in it, is refused: the grants of all jobs are there, and a job
    could read them.
    """
    found: dict[str, BucketSection] = {}
    for name, one in values.named_tables(BUCKETS, tables, BucketSection, "[buckets.corpus]", problems).items():
        place = key_path((BUCKETS, name, "url"))
        twin = next((other for other, known in found.items() if known.url == one.url), None)
        if twin is not None:
            message = f"is the place of [{BUCKETS}.{twin}], too"
            problems.append(Problem(key=place, message=message, hint="a place has one table: remove one"))
        # Whatever the endpoints say: one service has many addresses.
        if _overlap(store_url, one.url):
            message = "overlaps with the checkpoint store, where the secrets of jobs are"
            problems.append(Problem(key=place, message=message, hint="name a place beside the store's prefix"))
        found[name] = one
    return found


def _overlap(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)


def source_warnings(
    buckets: Mapping[str, BucketSection], hub: HubSection, environ: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """Yield what keeps the data of these places from being read."""
    if buckets and find_spec("boto3") is None:
        message = "need boto3, which is not installed"
        yield Problem(key=BUCKETS, message=message, hint=install_command("s3"))
    refs = [((BUCKETS, name, key), getattr(one, key)) for name, one in buckets.items() for key in _BUCKET_KEYS]
    for where, ref in [*refs, (("hub", "token"), hub.token)]:
        try:
            if ref is not None:
                resolve_credential(ref, environ=environ)
        except BadValue as exc:
            yield Problem(key=key_path(where), message=str(exc), hint=exc.hint)


def _identity(value: str) -> str:
    if not _IDENTITY.fullmatch(value):
        raise values.hinted(
            "is no identity of an install: 1 to 16 of a-z and 0-9",
            hint='write take_over = ["k3f9x2"], the identity that `spotctl doctor` names',
        )
    return value


Identity = Annotated[str, AfterValidator(_identity)]


class DaemonSection(values.Section):
    """The daemon itself."""

    install: Annotated[str | None, Field(examples=["lab"])] = None
    """Owner label of this daemon: every machine carries it, and only machines that carry it are ever touched.
    Two daemons on one account need different labels. Absent: made up once and kept in the state directory."""

    take_over: Annotated[tuple[Identity, ...], Field(examples=[["k3f9x2"]], strict=False)] = ()
    """Identities of lost installs of the same label, as a refused start or `spotctl doctor` names them: their lease is
    taken at once, and machines that they bought and no job here knows are ended. "none" means machines that were bought
    before installs had identities. Only for a spotd that will never run again."""

    state: str = SQLITE_DEFAULT
    """Where jobs, attempts and spending are recorded: "sqlite" below the state directory, "sqlite:////path/file", or
    "postgresql://user@host/database", on which several daemons may be started: one leads, the others wait."""

    secrets_key: Annotated[CredentialRef | None, Field(examples=[{"file": "/etc/spotd/secrets.key"}])] = None
    """Where the key is kept that encrypts secrets of jobs in a state in PostgreSQL, the same for every daemon of it.
    `spotd secrets-key FILE` makes one. Absent: jobs with secrets are refused there."""

    former_secrets_key: Annotated[CredentialRef | None, Field(examples=[{"file": "/etc/spotd/former.key"}])] = None
    """Where the key is kept that secrets_key has replaced. A start or reload encrypts anew what it had encrypted."""

    poll_every: values.Interval = timedelta(seconds=60)
    """How often prices are asked for; each provider can have its own."""

    machines_every: values.Interval = timedelta(seconds=12)
    """How often the machines are listed while any lives, which is how a loss is seen. Never less often than
    prices, nor more often than the provider allows; `spotctl providers` shows the requests. Each can have its own."""

    silence_limit: values.Interval = timedelta(minutes=35)
    """How long a machine may give no sign of life while its provider does not say that it is gone. After half an hour
    without hearing from spotd a machine ends itself, so a shorter time only risks one that runs well."""

    save_limit: values.Interval = timedelta(hours=1)
    """How long beyond stop_grace a machine that was stopped may go on uploading its last checkpoint, as long as the
    upload advances and the budgets allow it."""

    time_scale: values.Scale = 1.0
    """How much faster than the wall the daemon's whole clock runs. Only for the local market, which follows it."""

    time_start: Annotated[AwareDatetime | None, Field(examples=[datetime(2026, 3, 2, tzinfo=UTC)])] = None
    """The instant at which an accelerated clock begins; absent: now. Kept from the first start on."""

    @field_validator("install")
    @classmethod
    def _install_is_a_label(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(INSTALL_PATTERN, value):
            raise values.hinted(
                f'"{value}" may hold only a-z, 0-9 and -, at most 24 of them, none of them a - at either end',
                'write install = "lab"',
            )
        return value

    @field_validator("state")
    @classmethod
    def _state_is_a_place(cls, value: str) -> str:
        if value == SQLITE_DEFAULT or re.fullmatch(r"sqlite:///.+", value):
            return value
        # the value is not repeated: a database URL may hold a password
        hint = 'write state = "sqlite", "sqlite:////path/to/file" or "postgresql://user@host/database"'
        if value.partition("://")[0] in ("postgres", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg"):
            raise values.hinted("begins with a scheme of another program", hint)
        if not re.fullmatch(r"postgresql://[^/]+/[^/?]+(\?.*)?", value):
            raise values.hinted("is no place for the state", hint)
        if ":" in value.removeprefix("postgresql://").rpartition("@")[0] or "password=" in value:
            raise values.hinted(
                "holds a password", "write it into a file of libpq, ~/.pgpass or the one that PGPASSFILE names"
            )
        return value


class StoreSection(values.Section):
    """The object store that checkpoints, logs and results pass through."""

    url: str = STORE_DEFAULT
    """"file" for a folder below the state directory, or "file:///path" for another one; a folder serves only hosts
    that see this computer's files. Or "s3://bucket/prefix" for a bucket, which needs spotd[s3]."""

    endpoint_url: Annotated[str | None, Field(examples=["https://ACCOUNT.r2.cloudflarestorage.com"])] = None
    """Where a bucket that is not AWS's is reached, by this computer and by every host."""

    region: Annotated[str | None, Field(examples=["us-east-1"])] = None
    """Region of the bucket; "auto" for some stores."""

    access_key: Annotated[CredentialRef | None, Field(examples=[{"env": "SPOTD_STORE_ACCESS_KEY"}])] = None
    """Where the bucket's access key id is kept. Absent, with secret_key: boto3's own search (environment, role)."""

    secret_key: Annotated[CredentialRef | None, Field(examples=[{"env": "SPOTD_STORE_SECRET_KEY"}])] = None
    """Where its secret is kept. It never leaves this computer."""

    signer_access_key: Annotated[CredentialRef | None, Field(examples=[{"env": "SPOTD_SIGNER_ACCESS_KEY"}])] = None
    """A key that signs what hosts may upload and needs no other right than to put objects. Absent: the one above."""

    signer_secret_key: Annotated[CredentialRef | None, Field(examples=[{"env": "SPOTD_SIGNER_SECRET_KEY"}])] = None
    """Its secret."""

    grants: Annotated[Literal["auto", "form", "sts", "r2", "b2"] | None, Field(examples=["auto"])] = None
    """How hosts get permission to write: by a signed upload form, or by a temporary credential of AWS STS (or what
    imitates it), Cloudflare R2 or Backblaze B2. "auto", as without it, tries what fits the store. Whatever the store
    does not enforce is never used."""

    role_arn: Annotated[str | None, Field(examples=["arn:aws:iam::123456789012:role/spotd-hosts"])] = None
    """With STS: the role that is narrowed for each host. Absent: the signer's own user is narrowed."""

    account: Annotated[str | None, Field(examples=["0123456789abcdef0123456789abcdef"])] = None
    """With R2: the account id, where endpoint_url does not begin with it."""

    grants_endpoint_url: Annotated[str | None, Field(examples=["https://sts.us-east-1.amazonaws.com"])] = None
    """Where temporary credentials are made, if not where they usually are."""

    egress_per_gb: Annotated[values.EgressPrice | None, Field(examples=[0.09])] = None
    """What the owner of the store asks for each GB that a host reads from it, in dollars. Absent: the list price, by
    the endpoint: AWS S3 0.09, Google 0.12, Backblaze B2 0.01, Cloudflare R2 and every other store 0. AWS hosts read S3
    of their own region for nothing, of another region for 0.02 at most. It counts where machines are ranked, in moves,
    budgets and receipts; no ceiling holds it."""

    flood_objects: Annotated[int, Field(ge=1_000, le=100_000_000)] = 1_000_000
    """How many objects one machine may write for each day, or part of one, that it has lasted; one that writes more is
    ended with the reason "flooded". A checkpoint is one for each 8 MiB of what changed, at least one a file, and one
    more."""

    flood_bytes: values.DayBytes = values.Bytes(11 * 10**12)
    """The same in bytes; as it stands, what a line of 1 Gbit/s carries in a day."""

    flood_logs: values.DayLogBytes = values.Bytes(10**9)
    """The same in bytes of logs; a runner of ours sends at most about 400 MB in a day."""

    @field_validator("url")
    @classmethod
    def _url_is_a_store(cls, value: str) -> str:
        way_out = 'write url = "file", "file:///path/to/folder" or "s3://bucket/prefix"'
        parts = values.url_parts(value, way_out)
        if value == STORE_DEFAULT or (parts.scheme == "file" and parts.path.startswith("/")):
            return value
        if parts.scheme == "s3":
            if _BUCKET.fullmatch(parts.netloc) and _PREFIX.fullmatch(parts.path):
                return value
            raise values.hinted("names no bucket", 'write url = "s3://bucket/prefix"')
        raise values.hinted("is no place for a store", way_out)

    @field_validator("endpoint_url", "grants_endpoint_url")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None, info: ValidationInfo) -> str | None:
        return require_endpoint(value, str(info.field_name), "the secrets of every job")

    @model_validator(mode="after")
    def _keys_belong_together(self) -> StoreSection:
        extra = sorted(self.model_fields_set - _OF_EVERY_STORE)
        if not self.is_bucket and extra:
            raise values.hinted(
                f"{extra[0]} belongs to a store in a bucket", 'write url = "s3://bucket/prefix", or remove it'
            )
        if (self.access_key is None) != (self.secret_key is None):
            raise values.hinted("access_key and secret_key need each other", "write both, or neither")
        if (self.signer_access_key is None) != (self.signer_secret_key is None):
            raise values.hinted("signer_access_key and signer_secret_key need each other", "write both, or neither")
        if self.grants in {"r2", "b2"} and self.access_key is None:
            raise values.hinted(
                f'grants = "{self.grants}" makes credentials from a key', "write access_key and secret_key"
            )
        return self

    @property
    def is_bucket(self) -> bool:
        return self.url.startswith("s3://")


class CeilingsSection(BaseModel):
    """Highest effective $ per GPU-hour, by GPU, also of what runs; a job's own max_price goes before it."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)
    __pydantic_extra__: dict[str, values.CeilingPrice] = Field(
        init=False
    )  # the keys are GPU names, checked by the reader

    default: Annotated[values.CeilingPrice | None, Field(examples=[1.0])] = None
    """For every GPU without a line of its own. Absent: a job for such a GPU needs its own max_price."""


class BudgetSection(values.Section):
    """What may be spent. What running machines are committed to counts as spent."""

    day: Annotated[values.Money | None, Field(examples=[50.0])] = None
    """Dollars from midnight to midnight UTC. Absent: no limit."""

    month: Annotated[values.Money | None, Field(examples=[800.0])] = None
    """Dollars in a calendar month. Absent: no limit."""

    machines: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Most machines at a time."""


class BidsSection(values.Section):
    """Machines for which a bid is paid."""

    raise_running: bool = True
    """Whether the bid of a running machine follows the lowest that wins. It is raised before it loses, under the job's
    ceiling, below the on-demand price of the same machine, and while that is cheaper than to move; it is lowered where
    that pays even if the machine is lost once for it."""

    hold: values.HoldSpan = timedelta(minutes=10)
    """How long an outbid machine is kept at most, for its disk's price, while no other machine is as cheap and once its
    job has saved. At most 15m. "0s": it is ended at once."""


class MovesSection(values.Section):
    """Healthy machines that are left for cheaper ones."""

    most: Annotated[int, Field(ge=0, le=1000)] = 2
    """How often one job may move to a machine on which its end costs at least 15 % less, with all that a move costs.
    It stays for an hour at least, and moves only while its newest checkpoint is less than an hour old. 0: never. A job
    with a deadline or windows does not move."""


class OwnSection(values.Section):
    """Own machines (ssh, slurm, kubernetes, and what says `owned = true`), before any is rented."""

    rent_after: values.OwnSpan = timedelta(0)
    """How long a job waits for an own machine that it could use before one is rented for it; a job's own rent_after
    goes before it, and a deadline that would be missed before both. "0s": the cheapest machine is taken at once,
    be it an own one or not."""


class ReuseSection(values.Section):
    """Machines that pass from a job that is done to the next one. docs/reference/rules.md."""

    wait: values.HoldSpan = timedelta(0)
    """How long the machine of a job that is done waits for the next job at most, and bills. At most 15m. A job takes it
    over where no other machine is better, and starts without a launch and a pull of the image. "0s": it is ended at
    once. Not at providers that bill by more than time (AWS, Lambda), nor for jobs with reuse = false."""


class CanarySection(values.Section):
    """A measurement of each rented machine before its job starts there. docs/how-to/costs.md."""

    time: values.CanarySpan = timedelta(0)
    """How long it takes at most, billed as all of its time: GPUs, a matrix multiply, disk, download. A machine that has
    fewer GPUs, less of their memory or far less speed than was sold is left for another. At most 5m. "0s": none."""


class ProviderSection(values.Section):
    """Keys that every provider has; the others under its table are the provider's own."""

    enabled: bool = True
    """Whether anything is launched there. Machines that run there already are managed either way."""

    api_key: CredentialRef | None = None
    """Where its key is kept: in an environment variable (env), a file, or a systemd credential (credential)."""

    fee_multiplier: values.FeePpm | None = None
    """What the bill is compared with the listed price. Absent: the provider's usual one."""

    poll_every: values.Interval | None = None
    """How often this provider is asked. Absent: as in [daemon]."""

    machines_every: values.Interval | None = None
    """How often machines are listed there while any lives. Absent: as in [daemon]."""

    owned: bool | None = None
    """Whether its machines count as your own. Absent: those of ssh, slurm and kubernetes do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderConfig:
    """One `[providers.NAME]`, understood.

    Attributes:
        settings: a value of the plugin's own settings model.
    """

    name: str
    common: ProviderSection
    plugin: ProviderPlugin
    settings: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a user set, with the defaults for the rest.

    Attributes:
        ceilings: micro-dollars per GPU-hour by canonical GPU name.
        ceiling_default: for every other GPU.
    """

    daemon: DaemonSection = field(default_factory=DaemonSection)
    store: StoreSection = field(default_factory=StoreSection)
    ceiling_default: int | None = None
    ceilings: Mapping[str, int] = field(default_factory=dict)
    budget: BudgetSection = field(default_factory=BudgetSection)
    bids: BidsSection = field(default_factory=BidsSection)
    moves: MovesSection = field(default_factory=MovesSection)
    own: OwnSection = field(default_factory=OwnSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    reuse: ReuseSection = field(default_factory=ReuseSection)
    canary: CanarySection = field(default_factory=CanarySection)
    mcp: McpSection = field(default_factory=McpSection)
    api: ApiSection = field(default_factory=ApiSection)
    users: Mapping[str, UserSection] = field(default_factory=dict)
    notify: Mapping[str, NotifySection] = field(default_factory=dict)
    registries: Mapping[str, RegistrySection] = field(default_factory=dict)
    hub: HubSection = field(default_factory=HubSection)
    buckets: Mapping[str, BucketSection] = field(default_factory=dict)
    providers: tuple[ProviderConfig, ...] = ()


SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "daemon": DaemonSection,
    "store": StoreSection,
    "ceilings": CeilingsSection,
    "budget": BudgetSection,
    "bids": BidsSection,
    "moves": MovesSection,
    "own": OwnSection,
    "metrics": MetricsSection,
    "reuse": ReuseSection,
    "canary": CanarySection,
    "mcp": McpSection,
    "api": ApiSection,
    "hub": HubSection,
}
"""Every table of fixed name; of the names of a user are those of providers, notify, registries, buckets and users."""
