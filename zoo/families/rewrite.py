"""Family `rewrite`: dates, times, names, identifiers, units and lists change format."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from zoo.families import words as w
from zoo.families.base import Sample, Split, allowed, choose, exact

Pair = tuple[str, str]


def _date(rng: random.Random) -> tuple[int, int, int]:
    """Draw a year, a month and a day."""
    return rng.randint(1980, 2030), rng.randint(1, 12), rng.randint(1, 28)


def _long_iso(rng: random.Random) -> Pair:
    """Rewrite a long date as an ISO date."""
    y, m, d = _date(rng)
    return f"{w.MONTHS[m - 1]} {d}, {y}", f"{y}-{m:02d}-{d:02d}"


def _iso_long(rng: random.Random) -> Pair:
    """Rewrite an ISO date as a long date."""
    return _long_iso(rng)[::-1]


def _dmy_iso(rng: random.Random) -> Pair:
    """Rewrite a day-first date as an ISO date."""
    y, m, d = _date(rng)
    return f"{d:02d}.{m:02d}.{y}", f"{y}-{m:02d}-{d:02d}"


def _mdy_dmy(rng: random.Random) -> Pair:
    """Swap the month and the day of a date."""
    y, m, d = _date(rng)
    return f"{m:02d}/{d:02d}/{y}", f"{d:02d}/{m:02d}/{y}"


def _to_12h(rng: random.Random) -> Pair:
    """Rewrite a 24-hour time as a 12-hour time."""
    h, m = rng.randrange(24), rng.randrange(60)
    return f"{h:02d}:{m:02d}", f"{(h + 11) % 12 + 1}:{m:02d} {'AM' if h < 12 else 'PM'}"


def _to_24h(rng: random.Random) -> Pair:
    """Rewrite a 12-hour time as a 24-hour time."""
    return _to_12h(rng)[::-1]


def _digits(rng: random.Random, n: int) -> str:
    """Draw a string of digits without a leading zero."""
    return str(rng.randint(10 ** (n - 1), 10**n - 1))


def _phone_dashes(rng: random.Random) -> Pair:
    """Put dashes into a phone number."""
    a, b, c = _digits(rng, 3), _digits(rng, 3), _digits(rng, 4)
    return a + b + c, f"{a}-{b}-{c}"


def _phone_parens(rng: random.Random) -> Pair:
    """Put the area code of a dashed phone number into parentheses."""
    a, b, c = _digits(rng, 3), _digits(rng, 3), _digits(rng, 4)
    return f"{a}-{b}-{c}", f"({a}) {b} {c}"


def _last_first(rng: random.Random) -> Pair:
    """Move the surname to the front."""
    first, last = rng.choice(w.FIRST), rng.choice(w.LAST)
    return f"{first} {last}", f"{last}, {first}"


def _first_last(rng: random.Random) -> Pair:
    """Move the surname to the end."""
    return _last_first(rng)[::-1]


def _initials(rng: random.Random) -> Pair:
    """Shorten the first name to its initial."""
    first, last = rng.choice(w.FIRST), rng.choice(w.LAST)
    return f"{first} {last}", f"{first[0]}. {last}"


def _parts(rng: random.Random) -> list[str]:
    """Draw the words of an identifier."""
    return rng.sample(w.IDENT, rng.randint(2, 3))


def _snake(parts: list[str]) -> str:
    """Join words in snake case."""
    return "_".join(parts)


def _camel(parts: list[str]) -> str:
    """Join words in camel case."""
    return parts[0] + "".join(part.title() for part in parts[1:])


def _title(parts: list[str]) -> str:
    """Join capitalised words with spaces."""
    return " ".join(part.title() for part in parts)


def _snake_camel(rng: random.Random) -> Pair:
    """Rewrite snake case as camel case."""
    parts = _parts(rng)
    return _snake(parts), _camel(parts)


def _camel_snake(rng: random.Random) -> Pair:
    """Rewrite camel case as snake case."""
    return _snake_camel(rng)[::-1]


def _snake_title(rng: random.Random) -> Pair:
    """Rewrite snake case as a title."""
    parts = _parts(rng)
    return _snake(parts), _title(parts)


def _title_snake(rng: random.Random) -> Pair:
    """Rewrite a title as snake case."""
    return _snake_title(rng)[::-1]


def _capitalise(rng: random.Random) -> Pair:
    """Capitalise a lower-case full name with its city."""
    words = [rng.choice(w.FIRST), rng.choice(w.LAST), "from", rng.choice(w.CITIES)]
    return " ".join(words).lower(), " ".join(words)


def _km_m(rng: random.Random) -> Pair:
    """Rewrite kilometres as metres."""
    n, tenth = rng.randint(1, 99), rng.randint(0, 9)
    return f"{n}.{tenth} km", f"{n}{tenth}00 m"


def _m_km(rng: random.Random) -> Pair:
    """Rewrite metres as kilometres."""
    return _km_m(rng)[::-1]


def _minutes(rng: random.Random) -> Pair:
    """Rewrite whole hours as minutes inside a short sentence."""
    hours = rng.randint(2, 12)
    start = f"{rng.choice(w.FIRST)} waits"
    return f"{start} {hours} hours.", f"{start} {hours * 60} minutes."


def _dozens(rng: random.Random) -> Pair:
    """Rewrite dozens as a plain count."""
    n, goods, name = rng.randint(2, 12), rng.choice(w.GOODS), rng.choice(w.FIRST)
    return f"{name} has {n} dozen {goods}.", f"{name} has {n * 12} {goods}."


def _goods(rng: random.Random) -> list[str]:
    """Draw the entries of a list."""
    return rng.sample(w.GOODS, rng.randint(3, 5))


def _bullets(rng: random.Random) -> Pair:
    """Rewrite a comma list as bullet lines."""
    goods = _goods(rng)
    return ", ".join(goods), "\n".join(f"- {item}" for item in goods)


def _commas(rng: random.Random) -> Pair:
    """Rewrite bullet lines as a comma list."""
    plain, bullets = _bullets(rng)
    return "\n" + bullets, plain


def _semicolons(rng: random.Random) -> Pair:
    """Rewrite a comma list with semicolons."""
    goods = _goods(rng)
    return ", ".join(goods), "; ".join(goods)


def _numbered(rng: random.Random) -> Pair:
    """Rewrite a comma list as numbered lines."""
    goods = _goods(rng)
    return ", ".join(goods), "\n".join(f"{i}. {x}" for i, x in enumerate(goods, 1))


@dataclass(frozen=True)
class Task:
    """One rewriting rule with its instruction wordings."""

    name: str
    draw: Callable[[random.Random], Pair]
    train: tuple[str, ...]
    heldout: str | None = None


TASKS = (
    Task("long_iso", _long_iso, ("ISO date: {}", "As ISO date: {}"), "To ISO date: {}"),
    Task("iso_long", _iso_long, ("Long date: {}", "Write out the date {}")),
    Task("dmy_iso", _dmy_iso, ("ISO date of {}", "ISO date: {}")),
    Task("mdy_dmy", _mdy_dmy, ("Day first: {}", "Swap day and month: {}")),
    Task("to_12h", _to_12h, ("12-hour time: {}", "As 12h: {}"), "To 12h: {}"),
    Task("to_24h", _to_24h, ("24-hour time: {}", "As 24h: {}")),
    Task("dashes", _phone_dashes, ("Phone with dashes: {}", "Add dashes: {}")),
    Task("parens", _phone_parens, ("Phone with brackets: {}", "Area code: {}")),
    Task(
        "last_first",
        _last_first,
        ("Last name first: {}", "Surname first: {}"),
        "Put the last name first: {}",
    ),
    Task("first_last", _first_last, ("First name first: {}", "Normal name: {}")),
    Task("initials", _initials, ("Initial: {}", "Shorten the name: {}")),
    Task(
        "snake_camel",
        _snake_camel,
        ("camelCase: {}", "As camelCase: {}"),
        "To camelCase: {}",
    ),
    Task("camel_snake", _camel_snake, ("snake_case: {}", "As snake_case: {}")),
    Task("snake_title", _snake_title, ("Title Case: {}", "As Title Case: {}")),
    Task(
        "title_snake",
        _title_snake,
        ("snake_case: {}", "As snake_case: {}"),
        "To snake_case: {}",
    ),
    Task("capitalise", _capitalise, ("Capitals: {}", "Add capitals: {}")),
    Task("km_m", _km_m, ("In metres: {}", "As metres: {}"), "To metres: {}"),
    Task("m_km", _m_km, ("In kilometres: {}", "As kilometres: {}")),
    Task("minutes", _minutes, ("In minutes: {}", "As minutes: {}")),
    Task("dozens", _dozens, ("Without dozen: {}", "As a number: {}")),
    Task("bullets", _bullets, ("Bullets: {}", "As bullets: {}"), "To bullets: {}"),
    Task("commas", _commas, ("Comma list: {}", "With commas: {}"), "As comma list: {}"),
    Task("semicolons", _semicolons, ("Semicolons: {}", "With semicolons: {}")),
    Task("numbered", _numbered, ("Numbered: {}", "As numbers: {}"), "As numbered: {}"),
)
Entry = tuple[Task, str, str]
TRAIN: tuple[Entry, ...] = tuple((task, f"{task.name}.{i}", text) for task in TASKS for i, text in enumerate(task.train))
HELDOUT: tuple[Entry, ...] = tuple((task, f"{task.name}.{len(task.train)}", task.heldout) for task in TASKS if task.heldout)


def sample(rng: random.Random, split: Split) -> Sample:
    """Draw one text together with its rewritten form."""
    task, name, text = choose(rng, split, TRAIN, HELDOUT)
    given, wanted = task.draw(rng)
    while not allowed(f"{task.name}|{given}", split):
        given, wanted = task.draw(rng)
    return Sample("rewrite", name, text.format(given), wanted, exact(wanted))
