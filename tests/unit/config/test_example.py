from __future__ import annotations

import re
import tomllib
from pathlib import Path

from spotd.config.credentials import InstalledPlugins, RegistrySection
from spotd.config.example import example_text
from spotd.config.load import load, understand
from spotd.config.model import SECTIONS, BucketSection
from spotd.config.peers import NotifySection, UserSection
from tests.cases import every

COMMITTED = Path(__file__).parents[3] / "config.example.toml"


def test_the_committed_example_is_what_the_model_says() -> None:
    text = COMMITTED.read_text(encoding="utf-8")
    assert text == example_text(), "run: spotd config example > config.example.toml"


def test_the_example_is_a_config_that_works_and_equals_the_defaults() -> None:
    loaded = load(COMMITTED, environ={"HOME": "/nonexistent"})
    defaults = load(environ={"HOME": "/nonexistent"})
    assert loaded.warnings == ()
    assert loaded.config.daemon == defaults.config.daemon
    assert loaded.config.store == defaults.config.store
    assert loaded.config.budget == defaults.config.budget
    enabled = [provider for provider in loaded.config.providers if provider.common.enabled]
    assert [provider.name for provider in enabled] == ["local"]
    assert enabled[0].settings == defaults.config.providers[0].settings


@every("name", sorted(InstalledPlugins().bundled()))
def test_what_stands_in_the_section_of_a_provider_are_its_defaults(name: str) -> None:
    """In units as well: dollars that are kept as micro-dollars stood there a million times too high."""
    data = tomllib.loads(COMMITTED.read_text(encoding="utf-8"))["providers"][name]
    model = InstalledPlugins().load(name).settings_model
    written = {key: value for key, value in data.items() if key in model.model_fields}
    read = model.model_validate(written)
    for key in written:
        field = model.model_fields[key]
        if not field.is_required():
            assert getattr(read, key) == field.get_default(call_default_factory=True, validated_data={}), key


def test_every_key_is_there_and_each_commented_one_is_right_once_uncommented() -> None:
    text = example_text()
    named = r"^# (\w+ = \S.*|\[(?:notify|registries|buckets|users)\.\w+\])$"
    uncommented = re.sub(named, r"\1", text, flags=re.MULTILINE)
    data = tomllib.loads(uncommented)
    data["notify"]["phone"]["quiet"] = ["Sat,Sun"]  # the time zone beside it is of these
    assert set(data["buckets"]["corpus"]) == set(BucketSection.model_fields)
    assert set(data["users"]["ada"]) == set(UserSection.model_fields)
    del data["users"]["ada"]["token"]  # beside its hash
    data["providers"]["local"]["enabled"] = False  # beside it no user may submit only
    data["store"]["url"] = "s3://bucket/prefix"  # beside a folder the keys of a bucket are refused
    understand(data, "example", plugins=InstalledPlugins())
    for name, model in SECTIONS.items():
        assert set(data[name]) >= set(model.model_fields)
    assert set(data["notify"]["phone"]) == set(NotifySection.model_fields)
    assert set(data["registries"]["ghcr"]) == set(RegistrySection.model_fields)
    for plugin in InstalledPlugins().bundled():
        assert f"[providers.{plugin}]" in text


def test_every_key_has_a_sentence_that_explains_it() -> None:
    for name, model in SECTIONS.items():
        assert model.__doc__
        for key, field in model.model_fields.items():
            assert field.description, f"[{name}] {key}"


def test_a_config_that_launches_nothing_by_its_budget_is_warned_of(tmp_path: Path) -> None:
    place = tmp_path / "config.toml"
    place.write_text("[budget]\nmachines = 0\n", encoding="utf-8")
    place.chmod(0o600)
    (warning,) = load(place, environ={"HOME": "/nonexistent"}).warnings
    assert (warning.key, warning.message) == ("budget.machines", "is 0, so nothing is launched")
