"""Receipts as evidence: JSON lines in a keyed chain, written by engines, checked and summed later. Knows no text and no tokens.

Each engine writes a chain of its own into a folder: NAME.000001.jsonl, then NAME.000002.jsonl, and so on. A line is one JSON object:

    {"n": 7, "id": ..., ..., "chain": H(key, chain of line 6 + the line without its chain)}        H: BLAKE3 keyed, 32 bytes in hex

so no line can be changed, left out, doubled or moved by those who do not have the folder's key. A chain ends with {"closed": true}.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from blake3 import blake3

from .errors import AgentCacheError, ConfigError, StoreCorruptError
from .private import KEY_BYTES, NEW, check, locked, put
from .receipt import Receipt
from .store.keys import Ids

FILE_BYTES = 16 << 20  # a file that is longer is followed by another one
LEDGERS = ("namespace", "model", "adapter", "group", "role")
_CHAIN = len(',"chain":""}') + 64
_COUNTS = (
    "prompt_tokens", "cached_tokens", "computed_tokens", "resumed_tokens", "shared_layers", "segment_tokens", "halo_tokens", "disk_tokens",
    "disk_bytes", "completion_tokens", "exact_until", "bitwise", "precision", "path", "finish_reason", "ttft_ms", "decode_ms",
)  # fmt: skip


class ReceiptLog:
    """One engine's chain. Thread safe; a line is in the system's hands when `append` returns."""

    def __init__(self, folder: str | os.PathLike[str], file_bytes: int = FILE_BYTES) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):  # "" would be the current folder, with a key in it
            raise ConfigError(f"receipts={folder!r:.100}: must name a folder; None writes no receipts")
        self.folder = Path(folder).expanduser().absolute()  # files come with requests, wherever the process is by then
        self._file_bytes = file_bytes
        try:
            self._key = _key(self.folder, create=True)
        except AgentCacheError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"receipts={str(folder)!r}: {error}; name a folder of your own, or one to be made") from error
        self._name = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(3)}"
        self._lock = threading.Lock()
        self._chain, self._lines, self._files, self._file = bytes(KEY_BYTES), 0, 0, -1
        self._room, self._closed = 0, False

    def append(self, receipt: Receipt, ids: Ids, fingerprint: str, saved_ms: float) -> str:
        """Add the receipt of a request that has ended; why that is impossible, if it is: no request fails for it.

        ids: its prompt, of which keyed digests are written, by span. saved_ms: what computing its cached tokens would have taken.
        """
        line = {
            "id": receipt.id,
            "time": round(receipt.began, 3),
            "namespace": receipt.namespace,
            "model": receipt.model,
            "weights": receipt.weights,
            "fingerprint": fingerprint,
            "adapter": receipt.adapter,
            "prompt": self._digest(ids),
            "spans": [[span.kind, span.start, span.stop, self._digest(ids[span.start : span.stop])] for span in receipt.spans],
            "segments": [[part.start, part.stop] for part in receipt.segments],
            "refusals": [[str(refusal.reason), refusal.start, refusal.stop] for refusal in receipt.refusals],
        }
        line |= {name: getattr(receipt, name) for name in _COUNTS} | {"saved_ms": round(saved_ms, 3)}
        with self._lock:
            try:
                if not self._closed:
                    self._write(line)
            except OSError as error:
                return f"its receipt is not in {str(self.folder)!r}: {error}"
        return ""

    def close(self) -> None:
        """End the chain. Closing twice is fine."""
        with self._lock:
            if not self._closed and self._file >= 0:
                with suppress(OSError):  # the disk is full: `verify` says that the chain is not closed
                    self._write({"closed": True})
                with suppress(OSError):  # a network's disk may tell only now
                    os.close(self._file)
            self._closed = True

    def _digest(self, ids: Ids) -> str:
        return blake3(ids.tobytes(), key=self._key).hexdigest(length=8)

    def _write(self, line: dict[str, Any]) -> None:
        if self._room <= 0 or not os.fstat(self._file).st_nlink:  # a file that was deleted takes lines that nobody can read
            fd = os.open(self.folder / f"{self._name}.{self._files + 1:06}.jsonl", NEW | os.O_APPEND, 0o600)
            spent, self._file, self._files, self._room = self._file, fd, self._files + 1, self._file_bytes
            with suppress(OSError):  # a network's disk may tell only now that it is full
                if spent >= 0:  # not before: where there is no next file, its number would be that of another thread's file
                    os.close(spent)
        body = json.dumps({"n": self._lines + 1} | line, separators=(",", ":")).encode()
        chain = _link(self._key, self._chain, body)
        whole = body[:-1] + b',"chain":"%b"}\n' % chain.hex().encode()
        if (written := os.write(self._file, whole)) < len(whole):  # the disk is full
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._chain, self._lines, self._room = chain, self._lines + 1, self._room - len(whole)


@dataclass(frozen=True, slots=True)
class Fault:
    """A place at which a chain is not what its engine wrote."""

    file: str
    line: int
    why: str


def verify(folder: str | os.PathLike[str]) -> tuple[int, list[Fault]]:
    """Check every chain of a folder: the number of receipts that hold, and the first fault of each chain."""
    place = Path(folder).expanduser()
    key, held, faults = _key(place), 0, list[Fault]()
    for files in _chains(place).values():
        found, fault = _verify(files, key)
        held += found
        faults += [fault] if fault else []
    return held, faults


def read(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """All receipts of a folder, chain by chain. StoreCorruptError names a line that is no receipt; `verify` says what is wrong with it."""
    place = Path(folder).expanduser()
    chains = _chains(place)
    if not chains and not (place / "key").exists():
        raise _no_receipts(place)
    for files in chains.values():
        for path in files:
            for number, raw in enumerate(_lines(path), 1):
                try:
                    line = json.loads(raw)
                    if line["n"] and "closed" not in line:
                        yield line
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise StoreCorruptError(
                        f"{path.name!r}, line {number}: {raw[:40]!r} is no receipt; see `agentcache receipts verify`"
                    ) from None


def totals(receipts: Iterator[dict[str, Any]], by: str) -> dict[str, dict[str, float]]:
    """Requests, tokens and saved_ms by namespace, model, adapter, group (digest of its tools) or role (kind of span), most saved first.

    By role, a request's saved_ms is shared out by cached tokens, and what segments attach counts where it stands.
    """
    if by not in LEDGERS:
        raise ConfigError(f"by={by!r}: must be one of {', '.join(LEDGERS)}")
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for one in receipts:
        try:
            cached = max(1, one["cached_tokens"])
            for name, prompt, found in _shares(one, by):
                sums[name].update(requests=1, prompt_tokens=prompt, cached_tokens=found, computed_tokens=prompt - found)
                sums[name]["saved_ms"] += one["saved_ms"] * (found / cached)  # type: ignore[assignment]
        except (KeyError, TypeError, ValueError) as error:
            raise StoreCorruptError(f"receipt {one.get('id')!r} was changed, see `agentcache receipts verify`: {error!r}") from None
    order = sorted(sums, key=lambda name: -sums[name]["saved_ms"])
    return {name: {key: round(value, 3) for key, value in sums[name].items()} for name in order}


def _shares(one: dict[str, Any], by: str) -> Iterator[tuple[str, int, int]]:
    """Name, prompt tokens and cached tokens of each entry that a receipt has in a ledger."""
    if by != "role":
        tools = next((digest for kind, _, _, digest in one["spans"] if kind == "tools"), "")
        yield (tools if by == "group" else one[by]) or "-", one["prompt_tokens"], one["cached_tokens"]
        return
    segments = one["segments"]
    prefix = one["cached_tokens"] - one["segment_tokens"]
    ranges = [(0, prefix), *segments]
    for kind in dict.fromkeys(kind for kind, *_ in one["spans"]):
        spans = [(start, stop) for other, start, stop, _ in one["spans"] if other == kind]
        found = sum(max(0, min(b, stop) - max(a, start)) for a, b in spans for start, stop in ranges)
        size = sum(b - a for a, b in spans)
        yield kind, size, min(found, size)


def _verify(files: list[Path], key: bytes) -> tuple[int, Fault | None]:
    chain, held, closed = bytes(KEY_BYTES), 0, False
    for number, path in enumerate(files, 1):
        if path.name.rsplit(".", 2)[1] != f"{number:06}":
            return held, Fault(path.name, 1, f"file {number:06} of this chain is missing")
        for at, raw in enumerate(_lines(path), 1):
            body, said = raw[:-_CHAIN] + b"}", raw[-_CHAIN:]
            linked = _link(key, chain, body)
            if said != b',"chain":"%b"}' % linked.hex().encode():
                return held, Fault(path.name, at, _why(raw, held + 1))
            chain, closed = linked, closed or b'"closed":true' in body
            held += not closed
    if not closed:
        return held, Fault(files[-1].name, held, "is not closed: its engine runs, or was killed, or lines after this one are missing")
    return held, None


def _why(raw: bytes, wanted: int) -> str:
    try:
        n = json.loads(raw)["n"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "is no JSON: it was changed, or cut"
    if isinstance(n, int) and n < wanted:
        return f"receipt {n} stands here again: it is doubled"
    if n != wanted:
        return f"receipt {wanted} is missing: {n!r} stands here"
    return f"receipt {wanted} was changed"


def _link(key: bytes, chain: bytes, body: bytes) -> bytes:
    return bytes(blake3(chain + body, key=key).digest())


def _chains(place: Path) -> dict[str, list[Path]]:
    chains: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(place.glob("*.??????.jsonl")):
        chains[path.name.rsplit(".", 2)[0]].append(path)
    return chains


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise StoreCorruptError(f"{str(path)!r} cannot be read: {error.strerror}; a folder of receipts holds plain files only") from error


def _no_receipts(place: Path) -> ConfigError:
    return ConfigError(f"{str(place)!r} holds no receipts: name the folder that was given to Engine(receipts=...)")


def _key(place: Path, create: bool = False) -> bytes:
    """The folder's key: of it alone, readable by its owner alone."""
    if create:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(place):
            if not (place / "key").exists() and not _chains(place):
                put(place / "key", secrets.token_bytes(KEY_BYTES))
    if not (place / "key").exists():
        raise _lost_key(place, "is missing") if _chains(place) else _no_receipts(place)
    check(place / "key", stat.S_ISREG)
    key = (place / "key").read_bytes()
    if len(key) != KEY_BYTES:
        raise _lost_key(place, f"has {len(key)} bytes instead of {KEY_BYTES}")
    return key


def _lost_key(place: Path, why: str) -> StoreCorruptError:
    said = "without it no receipt here can be verified; put it back from a copy, or move this folder away and begin a new one"
    return StoreCorruptError(f"{str(place / 'key')!r} {why}: {said}")
