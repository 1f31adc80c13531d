"""The conversation of a request: by the id its log gives, else by its common part with the last request of each.

Under one id several agents may speak, each in conversations of its own: `agents` says which of them a request goes on.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from .agents import Conversation, Words, foreign, front_of, share, whose
from .history import alike, similar, speaks_of_summary
from .values import Request, Said
from .volatile import masked

OPEN = 2_048  # conversations kept open; the one that is silent longest goes first
HELD = 32 << 20  # characters of their last requests in all, at most
SAME = 0.4  # share of the earlier request's messages, by weight, that the later one must have
NEWEST = 0.2  # a conversation whose history was replaced is the last one that spoke, unless another one shares so many more words
NEAR = 64  # conversations, the newest ones, of which one may have been replaced
LEAST = 0.1  # the same, if its last message is among them: a window or a summary leaves little else


class Conversations:
    """Open conversations, found by name or by likeness. `closed` hears the name of each that had to go."""

    def __init__(self, most: int = OPEN, held: int = HELD, closed: Callable[[str], object] = lambda name: None) -> None:
        self._most, self._held, self._closed = most, held, closed
        self._size = 0
        self._open: OrderedDict[str, Conversation] = OrderedDict()
        # names of conversations, the newest last: by the marks of their last request, or by the id that they are under
        self._where: dict[bytes | str, dict[str, None]] = {}
        self._digests: OrderedDict[int, bytes] = OrderedDict()  # by the hash of a message, so that none is held
        self._made = 0

    def __len__(self) -> int:
        return len(self._open)

    def place(self, request: Request) -> tuple[Conversation, Request | None]:
        """The conversation, with `request` as its last now, and the request before it, if any."""
        marks: Counter[bytes] = Counter()
        if request.track is not None:
            here = self._where.get(request.track, ())
            known = whose([self._open[name] for name in reversed(here)], request)
        else:
            marks = self._marks(request)
            name = None if request.alone else self._likest(request, marks)
            known = self._open.get(name) if name is not None else None
        if known is None:
            known = self._opened(request)
        before = known.last if known.number and not request.alone else None
        known.followed |= not known.marks.keys().isdisjoint(marks)
        self._forget(known)
        self._size -= known.size
        known.set(request, marks, _size(request))
        self._size += known.size
        for key in marks if request.track is None else (request.track,):
            self._where.setdefault(key, {})[known.name] = None
        self._open.move_to_end(known.name)
        while len(self._open) > self._most or (self._size > self._held and len(self._open) > 1):
            gone = self._open.popitem(last=False)[1]
            self._size -= gone.size
            self._forget(gone)
            self._closed(gone.name)
        return known, before

    def _opened(self, request: Request) -> Conversation:
        """A new conversation: named by its id, with a number if it is not the first one under that."""
        self._made += 1
        count = 1
        name = given = request.track if request.track is not None else f"conversation {self._made}"
        while name in self._open:
            count += 1
            name = f"{given} ({count})"
        self._open[name] = track = Conversation(name, request, _begins(request))
        return track

    def _forget(self, track: Conversation) -> None:
        """Drop the keys that find it; placing it sets them again."""
        for key in track.marks if track.last.track is None else (track.last.track,):
            if (names := self._where.get(key)) is not None:
                names.pop(track.name, None)
                if not names:
                    del self._where[key]

    def _marks(self, request: Request) -> Counter[bytes]:
        """Digests of the messages with their weights; of the lines, where the prompt is raw text."""
        if request.prompt is not None:
            lines = [line for line in request.prompt.split("\n") if line.strip()]
            return Counter({_digest(masked(line)): _weight(line) for line in lines[-200:]})
        out: Counter[bytes] = Counter()
        for said in _speech(request):
            mark = self._mark(said)
            out[mark] = max(out[mark], _weight(said.content) + sum(_weight(call.arguments) for call in said.calls))
        return out

    def _mark(self, said: Said) -> bytes:
        """The digest of a message's words; each is compared with those of every conversation that begins alike, again and again."""
        key = hash(said)
        mark = self._digests.get(key)
        if mark is None:
            mark = self._digests[key] = _digest(repr(alike(said)))
            if len(self._digests) > 32_768:
                self._digests.popitem(last=False)
        return mark

    def _likest(self, request: Request, marks: Counter[bytes]) -> str | None:
        """The open conversation whose last request this one goes on from best."""
        shared: Counter[str] = Counter()
        for mark, weight in marks.items():
            for name in list(self._where.get(mark, ()))[-256:]:
                shared[name] += weight
        best, best_score = None, 0.0
        for name, track in self._open.items():  # the newest wins a tie
            if name not in shared or foreign(track.last, request):
                continue
            least = min(sum(track.marks.values()), sum(marks.values()))
            ended = (end := self._end(track.last)) in marks
            if request.prompt is None and end == self._end(request) and _asks_of_another(track, marks, request):
                continue
            score = shared[name] / least + 0.5 * ended - (0.25 if track.last.system[:1] != request.system[:1] else 0)
            score += 2 * (request.prompt is not None and request.prompt.startswith(track.last.prompt or "\0"))
            enough = shared[name] >= (LEAST if ended else SAME) * least
            if enough and score >= best_score and not self._starts_over(track, request, marks):
                best, best_score = name, score
        return self._replaced(request) if best is None and request.prompt is None else best

    def _replaced(self, request: Request) -> str | None:
        """The open conversation that this one may be with its history replaced: a request in the middle of a task without a beginning."""
        told, begins = [*request.system[1:], *request.history[:1]], _begins(request)
        if begins and not any(speaks_of_summary(said.content) for said in told):
            return None
        front, words = front_of(request), Words.of(request)
        best, best_score = None, 0.0
        for at, (name, track) in enumerate(islice(reversed(self._open.items()), NEAR)):
            last = track.last
            if not track.followed or last.track is not None or track.front != front or self._demonstrated(last, request):
                continue
            if begins and _begins(last):  # nothing was answered that could be summarised: each asks for a summary, as of one passage
                continue
            score = share(words.naming, track.words.naming) + NEWEST * (at == 0)
            if score >= NEWEST and score > best_score and words.overlap(track.words):  # the newest wins a tie
                best, best_score = name, score
        return best

    def _starts_over(self, track: Conversation, request: Request, marks: Counter[bytes]) -> bool:
        """True if the request is only the beginning of that conversation once more, or of another one; or a text that lacks its end."""
        last = track.last
        if (last.prompt is None) != (request.prompt is None):
            return True
        if request.prompt is not None:
            return not request.prompt.startswith(last.prompt or "") and _tail(last) not in masked(request.prompt)
        shown = self._demonstrated(last, request)
        if 0 < shown == len(request.history) - 1 < len(last.history) and request.history[-1].role == last.history[shown].role == "user":
            return True
        begun = len(request.history) < len(last.history) and marks.keys() <= track.marks.keys()
        return begun and all(said.role != "assistant" for said in request.history)

    def _demonstrated(self, last: Request, request: Request) -> int:
        """With how many messages both begin that tell of no conversation, else 0: examples, or a text that each asks about."""
        same = 0
        for was, now in zip(last.history, request.history):
            if self._mark(was) != self._mark(now):
                break
            same += 1
        return same if any(said.role == "assistant" for said in request.history[:same]) or (_begins(last) and _begins(request)) else 0

    def _end(self, request: Request) -> bytes:
        """The mark of a request's last message, or of its last whole line."""
        if request.prompt is not None:
            lines = [line for line in request.prompt.split("\n") if line.strip()]
            return _digest(masked(lines[-2 if len(lines) > 1 else -1])) if lines else b""
        return self._mark(_speech(request)[-1]) if request.history else b""


def _asks_of_another(track: Conversation, marks: Counter[bytes], request: Request) -> bool:
    """True if two histories that end alike share nothing else: the same is asked of another text, not of one that grew."""
    alone = len(track.marks.keys() & marks.keys()) == 1 < min(len(track.marks), len(marks))
    return alone and not similar(track.last.history[0].content, request.history[0].content)


def _speech(request: Request) -> Sequence[Said]:
    """The messages that tell of this conversation: instructions amid them are those of every conversation of one agent."""
    return [said for said in request.history if said.role != "system"] or request.history


def _begins(request: Request) -> bool:
    """True if there is no answer yet."""
    return all(said.role not in ("assistant", "tool") for said in request.history)


def _tail(request: Request) -> str:
    """The last whole lines of a raw prompt: enough of them to be this conversation's own."""
    return "\n".join(masked(request.prompt or "").split("\n")[-7:-1])


def _size(request: Request) -> int:
    said = sum(len(one.content) + len(one.reasoning) + sum(len(call.arguments) for call in one.calls) for one in request.history)
    return (
        said + sum(len(one.content) for one in request.system) + sum(len(tool.text) for tool in request.tools) + len(request.prompt or "")
    )


def _weight(text: str) -> int:
    return 20 + min(len(text), 400)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
