"""The choices of a page. They live in the URL alone, so that a copied URL shows the same page.

A page reads its choices one after the other, each with the options that the earlier ones leave. An unknown value in a
URL is replaced by the default, with a note on the page.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

Options = Iterable[str | tuple[str, str]]
"""(value, label) of each option, or a value that is its own label."""


@dataclass(frozen=True, kw_only=True)
class Menu:
    """A choice as it is shown.

    Attributes:
        name: in the URL.
        label: for people.
        options: (value, label) of all.
        chosen: values that are chosen, one unless `several`.
        several: whether any number may be chosen.
        resets: names of the choices to forget when this one changes.
    """

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    chosen: tuple[str, ...]
    several: bool = False
    resets: tuple[str, ...] = ()


@dataclass(eq=False)
class Selection:
    """The choices of one request.

    Attributes:
        asked: what the URL asks for: name to values.
        menus: choices so far, in the order of the page.
        kept: choices without a menu that stay as they are when a menu changes.
        notes: messages on unknown values.
    """

    asked: Mapping[str, Sequence[str]]
    menus: list[Menu] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def one(
        self, name: str, label: str, options: Options, *, default: str | None = None, resets: Sequence[str] = ()
    ) -> str:
        """Add a menu with a single choice; by default the first of its options, of which there is at least one."""
        known = _labelled(options)
        values = [value for value, _ in known]
        fallback = values[0] if default is None else default
        wanted = next(iter(self.asked.get(name, ())), fallback)
        if wanted not in values:
            self.notes.append(f"There is no {label.lower()} “{wanted}” here; this shows {dict(known)[fallback]}.")
            wanted = fallback
        self.menus.append(Menu(name=name, label=label, options=known, chosen=(wanted,), resets=tuple(resets)))
        return wanted

    def several(self, name: str, label: str, options: Options) -> list[str]:
        """Add a menu with several choices; by default all of its options."""
        known = _labelled(options)
        values = [value for value, _ in known]
        wanted = self.asked.get(name, ())
        missing = [value for value in wanted if value not in values]
        if missing:
            self.notes.append(f"Not among the {label.lower()} here: {', '.join(f'“{value}”' for value in missing)}.")
        chosen = [value for value in values if value in wanted] or values
        self.menus.append(Menu(name=name, label=label, options=known, chosen=tuple(chosen), several=True))
        return chosen

    def number(self, name: str, *, default: int, least: int, most: int) -> int:
        """Read a number that has no menu, such as a page of a list."""
        text = next(iter(self.asked.get(name, ())), str(default))
        # Python refuses to read a number of thousands of digits.
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            self.notes.append(f"{name} “{text}” is not from {least} to {most}; this shows {default}.")
            return default
        return int(text)

    def text(self, name: str) -> str:
        """Read a text that has no menu, such as an id; empty if the URL has none."""
        return next(iter(self.asked.get(name, ())), "").strip()

    def keep(self, name: str, value: str) -> None:
        """Keep a choice that has no menu when a menu changes."""
        self.kept[name] = value

    def url(self, page: str, /, **changes: str | int | None) -> str:
        """A URL with these choices and some others; a choice of None is left out."""
        pairs = [(name, value) for name, value in self.kept.items() if name not in changes]
        for menu in self.menus:
            everything = menu.several and len(menu.chosen) == len(menu.options)
            if menu.name not in changes and not everything:
                pairs += [(menu.name, value) for value in menu.chosen]
        pairs += [(name, str(value)) for name, value in changes.items() if value is not None]
        return page_url(page, pairs)


def _labelled(options: Options) -> tuple[tuple[str, str], ...]:
    return tuple((option, option) if isinstance(option, str) else option for option in options)


def page_url(page: str, choices: Sequence[tuple[str, str | int]] | Mapping[str, str | int]) -> str:
    """URL of a page with some choices made, by name and value."""
    return f"/{page}?{urlencode(choices)}" if choices else f"/{page}"
