"""Settings of other packages: the device that a device_map names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from agentcache import Engine, Loading, Sampling, foreign_settings
from agentcache.errors import ConfigError


@pytest.mark.parametrize(
    ("place", "device"),
    [(None, None), ("auto", "auto"), ("cuda:1", "cuda:1"), (0, "cuda:0"), (-1, "cpu"), ({"": 1}, "cuda:1"), ({"": "cpu"}, "cpu")],
)
def test_one_device(place: Any, device: str | None) -> None:
    assert foreign_settings.device_of(place) == device


@pytest.mark.parametrize("place", ["balanced", "sequential", {"lm_head": 0}, {"": 0, "lm_head": 1}, {}, True])
def test_several_devices_are_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match="device_map=.*: the weights lie on one device; say device="):
        foreign_settings.device_of(place)


def test_every_name_is_a_setting_here() -> None:
    known = {field.name for field in fields(Sampling)} | set(Engine.__init__.__annotations__) | set(Loading.__annotations__)
    assert {*foreign_settings.SAME.values(), *foreign_settings.DO_SAMPLE} <= known
    assert not known & foreign_settings.SAME.keys()


def test_what_changes_no_answer() -> None:
    same = {"pad_token_id": 3, "use_cache": False, "num_beams": 1, "n": 1, "presence_penalty": 0.0, "client_kwargs": {}}
    other = {"num_beams": 2, "n": 2, "presence_penalty": 0.1, "client_kwargs": {"timeout": 3}, "streamer": None, "store": None}
    assert [name for name, value in same.items() if not foreign_settings.changes_nothing(name, value)] == []
    assert [name for name, value in other.items() if foreign_settings.changes_nothing(name, value)] == []


def test_keys_and_headers_are_not_shown() -> None:
    private = {"api_key": "sk-1", "use_auth_token": "hf_1", "default_headers": {"Authorization": "x"}, "token": ("hf_1", "hf_2")}
    private |= {"default_headers": [("Authorization", "x")], "extra_body": {"api_key": "x"}, "openai_api_password": "x"}
    assert [foreign_settings.shown(name, value) for name, value in private.items()] == [f"{name}=..." for name in private]
    assert foreign_settings.shown("max_tokens", "5") == "max_tokens='5'"
    assert foreign_settings.shown("tokenizer_name", "x") == "tokenizer_name='x'"
    assert foreign_settings.shown("stop", "\n") == "stop='\\n'"
