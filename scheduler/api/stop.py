"""Stop strings: finds the first one in a text that arrives in pieces, and never lets a part of one out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete; knows neither tokens nor time.

    The match that ends first wins, and of those that end together the longest one: so the result does not
    depend on how the text was cut into pieces. What could still become a stop string is held back. What follows
    the stop string is never returned, and the string itself only if it is to be included.

    Each stop string is followed by its own Knuth-Morris-Pratt automaton, at constant cost per character.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Raises ValueError if a stop string is empty."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._include = include
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._lengths = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece and return what may go out now.

        A stop string that ends inside a piece which is not `armed` does not count; one that merely begins
        there does.
        """
        if self._matched is not None or not self._stops:
            return "" if self._matched is not None else text
        text, start = self._held + text, len(self._held)
        for end in range(start, len(text)):
            found = self._step(text[end])
            if found is not None and armed:
                self._matched, self._held = found, ""
                return text[: end + 1 if self._include else end + 1 - len(found)]
        held = max(self._lengths)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Follow one character; return the longest stop string that it completes, or None."""
        found: str | None = None
        for i, (stop, borders) in enumerate(self._stops):
            length = self._lengths[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            if length == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                length = borders[length - 1]
            self._lengths[i] = length
        return found


def _borders(word: str) -> list[int]:
    """Return, for each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        length += word[i] == word[length]
        borders[i] = length
    return borders
