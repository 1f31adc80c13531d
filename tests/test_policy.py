"""Policies: what a rule allows, what it refuses by name, and files that are no policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine, Reason, StoreOptions, scheduler
from agentcache.errors import ConfigError, PolicyError
from agentcache.policy import Policy
from tests.approximate.repeated_text import FIRST, GREEDY, OTHER, calibration, tiny_model
from tests.engines import SYSTEM, chat, decode, engine, long_text

Opened = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture
def ruled(tmp_path: Path) -> Opened:
    """An engine under the rules of a text."""

    def opened(text: str, **options: Any) -> AbstractContextManager[Engine]:
        (tmp_path / "policy.toml").write_text(text)
        return engine(policy=tmp_path / "policy.toml", **{"store": None, **options})

    return opened


def policies(receipt: Any) -> list[str]:
    return [refusal.detail for refusal in receipt.refusals if refusal.reason == Reason.POLICY]


def test_reuse_that_no_rule_allows_is_named(ruled: Opened) -> None:
    with ruled('[[rule]]\nname = "guests"\nnamespace = "guest-*"\nreuse = ["off"]') as running:
        for _ in range(2):
            guest = running.generate(chat("Fog?"), sampling=decode(2), namespace="guest-1").receipt
            own = running.generate(chat("Fog?"), sampling=decode(2), namespace="keeper").receipt
        assert guest.cached_tokens == 0
        assert policies(guest) == ["'guests' does not allow reuse='exact': 'off' instead"]
        assert (own.cached_tokens > 0, policies(own)) == (True, [])
        assert policies(running.generate(chat("Fog?"), sampling=decode(2), namespace="guest-1", reuse="off").receipt) == []


def test_inexact_reuse_becomes_exact_where_refused(tmp_path: Path) -> None:
    model, tokenizer, fingerprint = tiny_model()
    (tmp_path / "policy.toml").write_text('[[rule]]\nnamespace = "strict"\nreuse = ["exact"]')
    known = calibration(fingerprint=fingerprint)
    with Engine(model, tokenizer, store=None, reuse="approximate", calibration=known, policy=tmp_path / "policy.toml") as running:
        for namespace in ("strict", "other"):
            running.generate(FIRST, sampling=GREEDY, namespace=namespace)
        strict, other = (running.generate(OTHER, sampling=GREEDY, namespace=namespace).receipt for namespace in ("strict", "other"))
        own = running.generate(OTHER, sampling=GREEDY, namespace="strict", reuse=known).receipt
    assert (strict.precision, strict.segments, own.segments) == ("exact", (), ())
    assert other.segments
    assert policies(strict) == policies(own) == ["'rule 1' does not allow reuse='approximate': 'exact' instead"]


@pytest.mark.parametrize(("rule", "refused"), [('model = "Qwen3*"', True), ('model = "llama"', False), ('adapter = "judge"', False)])
def test_rules_fit_by_model_and_adapter(ruled: Opened, rule: str, refused: bool) -> None:
    with ruled(f'[[rule]]\n{rule}\nreuse = ["off"]') as running:
        assert bool(policies(running.generate("Fog.", sampling=decode(1)).receipt)) == refused


def test_the_first_rule_that_fits_counts(ruled: Opened) -> None:
    with ruled('[[rule]]\nnamespace = "default"\n[[rule]]\nreuse = ["off"]') as running:
        assert policies(running.generate("Fog.", sampling=decode(1)).receipt) == []
        assert policies(running.generate("Fog.", sampling=decode(1), namespace="x").receipt)


def test_requests_of_a_namespace_are_bounded(ruled: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    with ruled('[[rule]]\nname = "one"\nrequests = 1') as running:
        running.warm(SYSTEM * 5)  # no request
        for _ in range(2):  # the end of each counts, also of one that is left
            stream = running.stream("Fog.", sampling=decode(300))
            next(stream)
            with monkeypatch.context() as before:
                before.setattr(running.renderer, "render", None)  # nothing is laid out
                with pytest.raises(PolicyError, match="'one': 'default' has 1 requests running"):
                    running.stream("Fog.")
            running.generate("Fog.", sampling=decode(1), namespace="other")
            stream.close()
            assert running.generate("Fog.", sampling=decode(1)).ids


def test_a_request_that_is_left_counts_no_longer(ruled: Opened) -> None:
    forward = threading.Event()

    def until(row: Any) -> None:
        forward.wait(30)

    with ruled("[[rule]]\nrequests = 1") as running:
        left = running.stream("Fog.", sampling=decode(9), on_logits=until)
        try:
            with pytest.raises(PolicyError):
                running.stream("Fog.")
            left.close()
            second = running.stream("Fog.", sampling=decode(1))  # the forward of the first still runs
        finally:
            forward.set()
        assert second.completion.ids


def test_an_interrupted_request_leaves_its_place(ruled: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with ruled("[[rule]]\nrequests = 1") as running:
        with monkeypatch.context() as patched:
            patched.setattr(scheduler, "release_team", interrupt)
            with pytest.raises(KeyboardInterrupt):
                running.stream("Fog.")
        assert running.generate("Fog.", sampling=decode(1)).ids


@pytest.mark.parametrize(("bound", "said"), [("pages = 1", "may pin 1 pages: 1 are pinned"), ("bytes = 50000", "may pin 50000 bytes")])
def test_pinned_pages_are_bounded(ruled: Opened, bound: str, said: str) -> None:
    with ruled(f'[[rule]]\nname = "small"\n{bound}') as running:
        running.warm("You keep a lighthouse.", name="lamp")
        with pytest.raises(PolicyError, match=f"'small': 'default' {said}.*release"):
            running.warm("You keep a harbour.", name="buoy")
        with pytest.raises(PolicyError, match=f"'small': 'default' {said}.*shorten it, or let the rule allow more"):
            running.warm(SYSTEM * 40, name="large")
        assert [group.name for group in running.groups] == ["lamp"]
        with pytest.raises(PolicyError):
            running.warm(SYSTEM * 40, name="lamp")
        assert [group.pages for group in running.groups] == [1], "what was pinned under the name stays"
        assert running.warm("You keep a lighthouse.", name="buoy", namespace="other").pages == 1, "each namespace has its own bound"


def test_a_group_that_is_refused_is_not_recorded(ruled: Opened, tmp_path: Path) -> None:
    texts = {f"text-{number}": long_text(40, number) for number in range(4)}
    with ruled("[[rule]]\npages = 2", store=StoreOptions(tmp_path / "store")) as running:
        for _ in range(2):
            with pytest.raises(PolicyError, match="2 are pinned"):
                running.learn(texts, pack_tokens=1)
            assert running.flush()
            assert running.store.disk is not None
            assert len(running.store.disk.index.groups()) == len(running.documents()) == len(running.groups)


def test_only_named_groups_are_pinned(ruled: Opened, tmp_path: Path) -> None:
    with ruled('[[rule]]\ngroups = ["desk*"]', store=StoreOptions(tmp_path / "store")) as running:
        running.warm(SYSTEM, name="desk-1")
        with pytest.raises(PolicyError, match=r"may pin \['desk\*'\], not 'lamp'"):
            running.warm(SYSTEM, name="lamp")
        assert running.flush()
        assert [group.name for group in running.store.disk.index.groups()] == ["desk-1"], "nothing of it is left for others"


def test_a_pin_ends_with_its_lease(ruled: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("agentcache.policy.time.monotonic", lambda: now[0])
    with ruled('[[rule]]\nnamespace = "guest"\nlease_s = 60') as running:
        for namespace in ("guest", "keeper"):
            running.warm(SYSTEM, name="lamp", namespace=namespace)
        now[0] = 59
        running.generate("Fog.", sampling=decode(1))
        assert len(running.groups) == 2
        now[0] = 61
        running.generate("Fog.", sampling=decode(1))
        assert [group.namespace for group in running.groups] == ["keeper"]


WRONG = {
    "[[rule": "cannot be read",
    "": r"give it \[\[rule\]\]",
    'reuse = ["exact"]': r"holds \['reuse'\]",
    'rule = "all"': r"give it \[\[rule\]\]",
    '[[rule]]\nname = "a"\n\n[[rule]]\nname = "b"\nreuses = ["exact"]': r"line 6: 'reuses' is no key of a rule, choose from name, .*groups",
    '[[rule]]\nreuse = ["exakt"]': r"line 2: reuse=\['exakt'\] must be a list of 'exact', 'lossy'",
    '[[rule]]\n"requests" = 0': "line 2: requests=0 must be a whole number of at least 1",
    "[[rule]]\npages = true": "line 2: pages=True must be",
    "[[rule]]\n\nlease_s = -1": "line 3: lease_s=-1 must be a number of seconds above 0",
    '[[rule]]\ngroups = "desk"': "line 2: groups='desk' must be a list of texts",
    "[[rule]]\nnamespace = 3": "line 2: namespace=3 must be a text",
}


@pytest.mark.parametrize(("text", "said"), WRONG.items())
def test_what_is_no_policy_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Policy.read(tmp_path / "policy.toml")


def test_a_policy_is_read_before_the_model() -> None:
    with pytest.raises(ConfigError, match="'none.toml' cannot be read"):
        Engine("no-such-model", policy="none.toml")
