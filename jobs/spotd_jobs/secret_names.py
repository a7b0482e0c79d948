"""Which files of a working folder are likely to hold keys.

They are recognised by their names and, where those can be harmless too, by their first bytes.

What is sent to a rented machine by mistake must be counted as public.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final

HEAD_BYTES: Final = 64 * 1024
"""So much of a file is read."""

_HARMLESS: Final = (
    "*.pub",
    ".env.example",
    ".env.sample",
    ".env.template",
    ".env.dist",
    ".env.defaults",
    "example.env",
    "sample.env",
)
_NAMES: Final = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".my.cnf", ".htpasswd",
    ".dockercfg", ".vault-token", ".secrets", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.ppk", "*.p12",
    "*.pfx", "*.jks", "*.keystore", "*.key", "kubeconfig", "*.kubeconfig", "application_default_credentials.json",
    "secrets.toml", "secrets.yml", "secrets.yaml", "secrets.json", ".boto", ".s3cfg", ".rclone.conf", "rclone.conf",
    ".npmrc", ".pypirc", "credentials.json", ".credentials.json", "credentials.csv", "*accesskeys.csv", "kaggle.json",
    "service-account*.json", "service_account*.json", "serviceaccount*.json", "client_secret*.json", "*.tfstate",
    "*.tfstate.*", "*.tfvars", "*.tfvars.json", ".terraformrc", "token.json", "token.pickle", "*.kdbx", "*.p8",
)  # fmt: skip
_FOLDERS: Final = (
    ".ssh",
    ".aws",
    ".gnupg",
    ".kube",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".config/rclone",
    ".docker",
)
_PATHS: Final = (".huggingface/token", ".cache/huggingface/token", ".config/wandb/settings", ".kaggle/kaggle.json")
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
_CERTIFICATE: Final = re.compile(rb"-----BEGIN [A-Z0-9 ]*(?:CERTIFICATE|PUBLIC KEY|CRL|PARAMETERS)")
_TOKEN: Final = re.compile(
    rb"(?im)^[^#;\n]*(?:_authtoken|_auth|_password|password|token|npmauthtoken)[\"']?\s*[:=]\s*\S"
)
_URL_PASSWORD: Final = re.compile(rb"://[^/\s:@]+:[^/\s:@]+@")
_SERVICE_ACCOUNT: Final = re.compile(rb'"(?:private_key|client_secret|refresh_token)"\s*:')
_BY_CONTENT: Final[tuple[tuple[str, re.Pattern[bytes]], ...]] = (
    (".yarnrc.yml", _TOKEN),
    ("pip.conf", _URL_PASSWORD),
    (".condarc", _URL_PASSWORD),
    ("*.json", _SERVICE_ACCOUNT),
)


def holds_keys(path: str, head: Callable[[], bytes]) -> bool:
    """Whether the file should not leave this computer unless its owner includes it by name.

    Args:
        path: relative, with `/`.
        head: gives its first `HEAD_BYTES`.
    """
    low = f"/{path.lower()}"
    name = low.rpartition("/")[2]
    if any(fnmatchcase(name, pattern) for pattern in _HARMLESS):
        return False
    if any(fnmatchcase(name, pattern) for pattern in _NAMES):
        return True
    if any(f"/{folder}/" in low for folder in _FOLDERS) or any(low.endswith(f"/{one}") for one in _PATHS):
        return True
    start = head()
    if fnmatchcase(name, "*.pem"):
        return _PRIVATE_KEY.search(start) is not None or _CERTIFICATE.search(start) is None
    if _PRIVATE_KEY.match(start.lstrip()) is not None:
        return True
    return any(fnmatchcase(name, pattern) and content.search(start) for pattern, content in _BY_CONTENT)
