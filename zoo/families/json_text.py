"""Family `json`: one sentence is turned into a small JSON object."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from zoo.families import words as w
from zoo.families.base import Sample, Split, allowed, choose

Value = dict[str, Any]
LEADS = ("To JSON: ", "As JSON: ", "Make JSON: ")


def _person(rng: random.Random) -> Value:
    """Draw the fields of a person."""
    name = f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}"
    return {"name": name, "age": rng.randint(18, 89), "city": rng.choice(w.CITIES)}


def _order(rng: random.Random) -> Value:
    """Draw the fields of an order."""
    return {
        "item": rng.choice(w.GOODS),
        "quantity": rng.randint(2, 99),
        "price": rng.randint(2, 250),
    }


def _meeting(rng: random.Random) -> Value:
    """Draw the fields of a meeting."""
    time = f"{rng.randint(8, 18):02d}:{rng.choice((0, 15, 30, 45)):02d}"
    return {"day": rng.choice(w.DAYS), "time": time, "room": rng.choice(w.ROOMS)}


def _flight(rng: random.Random) -> Value:
    """Draw the fields of a flight."""
    start, goal = rng.sample(w.CITIES, 2)
    date = f"{rng.randint(1, 28)} {rng.choice(w.MONTHS)}"
    return {"from": start, "to": goal, "date": date}


def _pet(rng: random.Random) -> Value:
    """Draw the fields of a pet."""
    return {
        "pet": rng.choice(w.PET_NAMES),
        "kind": rng.choice(w.PET_KINDS),
        "age": rng.randint(2, 19),
    }


def _email(rng: random.Random) -> Value:
    """Draw the fields of an e-mail contact."""
    first, last = rng.choice(w.FIRST), rng.choice(w.LAST)
    mail = f"{first.lower()}.{last.lower()}@{rng.choice(w.MAIL_HOSTS)}"
    return {"name": f"{first} {last}", "email": mail}


def _phone(rng: random.Random) -> Value:
    """Draw the fields of a phone contact."""
    name = f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}"
    return {"name": name, "phone": rng.randint(1000, 9999)}


SCHEMAS: dict[str, Callable[[random.Random], Value]] = {
    "person": _person,
    "order": _order,
    "meeting": _meeting,
    "flight": _flight,
    "pet": _pet,
    "email": _email,
    "phone": _phone,
}

TRAIN = (
    ("person", "{name} is {age} years old and lives in {city}."),
    ("person", "{name}, {age}, from {city}."),
    ("person", "{name} lives in {city} and is {age}."),
    ("person", "In {city} lives {name}, aged {age}."),
    ("person", "{age}-year-old {name} comes from {city}."),
    ("order", "Please send {quantity} {item} at {price} dollars each."),
    ("order", "We order {quantity} {item} for {price} dollars."),
    ("order", "I want {quantity} {item}, price {price}."),
    ("order", "{quantity} {item} cost {price} dollars."),
    ("meeting", "The meeting is on {day} at {time} in {room}."),
    ("meeting", "We meet in {room} on {day} at {time}."),
    ("meeting", "Meeting: {day}, {time}, {room}."),
    ("meeting", "At {time} on {day} there is a meeting in {room}."),
    ("flight", "A flight from {from} to {to} on {date}."),
    ("flight", "On {date} I fly from {from} to {to}."),
    ("flight", "Book a flight to {to} from {from} for {date}."),
    ("flight", "The plane leaves {from} on {date} and goes to {to}."),
    ("pet", "{pet} is a {kind} and is {age} years old."),
    ("pet", "My {kind} {pet} is {age}."),
    ("pet", "We have a {kind}, {pet}, aged {age}."),
    ("pet", "The {age}-year-old {kind} is called {pet}."),
    ("email", "{name} has the email {email}."),
    ("email", "Write to {name} at {email}."),
    ("email", "Contact: {name}, {email}."),
    ("email", "Use {email} to reach {name}."),
    ("phone", "{name} has the phone number {phone}."),
    ("phone", "Call {name} at {phone}."),
    ("phone", "Phone: {name}, {phone}."),
    ("phone", "Dial {phone} to reach {name}."),
)
HELDOUT = (
    ("person", "{name} from {city} is {age} years old."),
    ("order", "Order: {quantity} {item} at {price} dollars."),
    ("meeting", "On {day} we meet at {time} in {room}."),
    ("flight", "I fly to {to} from {from} on {date}."),
    ("pet", "{pet}, our {kind}, is {age} years old."),
    ("email", "The email of {name} is {email}."),
)
NAMES = {text: f"{schema}.{i}" for i, (schema, text) in enumerate(TRAIN + HELDOUT)}


def sample(rng: random.Random, split: Split) -> Sample:
    """Draw one sentence together with its JSON object."""
    schema, text = choose(rng, split, TRAIN, HELDOUT)
    draw = SCHEMAS[schema]
    value = draw(rng)
    answer = json.dumps(value)
    while not allowed(f"{schema}|{answer}", split):
        value = draw(rng)
        answer = json.dumps(value)
    prompt = rng.choice(LEADS) + text.format_map(value)
    check = {"kind": "json", "value": value}
    return Sample("json", NAMES[text], prompt, answer, check)
