"""Lists of words, and made-up names, from which the model learns to copy instead of memorizing words."""

from __future__ import annotations

from random import Random

from training.topics.base import TEXT_DIR


def _read() -> dict[str, list[str]]:
    lines = (TEXT_DIR / "words.txt").read_text(encoding="utf-8").splitlines()
    sections = " ".join(line for line in lines if not line.startswith("#")).split("@ ")[1:]
    named = (section.split(" ", 1) for section in sections)
    return {name: [item.strip() for item in items.split(",")] for name, items in named}


_LISTS = _read()
NAMES = _LISTS["names"]
COLOURS = _LISTS["colours"]
ANIMALS = _LISTS["animals"]
FOODS = _LISTS["foods"]
CITIES = _LISTS["cities"]
JOBS = _LISTS["jobs"]
COUNTRIES = _LISTS["countries"]
WORKS = _LISTS["works"]
PEOPLE = _LISTS["people"]
THINGS = _LISTS["things"]
DISHES = _LISTS["dishes"]
TASKS = _LISTS["tasks"]
EVENTS = _LISTS["events"]
SOFTWARE = _LISTS["software"]
NOTES = _LISTS["notes"]
PLAIN = _LISTS["plain"]
_ONSETS = "b,c,d,f,g,h,j,k,l,m,n,p,r,s,t,v,w,z,br,dr,fr,gr,kr,pl,st,tr,sh,ch,th".split(",")  # noqa: SIM905
_VOWELS = "a,e,i,o,u,a,e,i,o,ai,ei,ou,ia".split(",")  # noqa: SIM905
_CODAS = ",,,n,r,l,s,m,k,t,nd,rt".split(",")  # noqa: SIM905


def made_up(rng: Random, syllables: int | None = None) -> str:
    """Return a made-up name of one to three syllables."""
    count = syllables or rng.choice([1, 2, 2, 2, 3])
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def person_name(rng: Random) -> str:
    """Return a first name, which is a common or a made-up one."""
    return made_up(rng).capitalize() if rng.random() < 0.35 else rng.choice(NAMES)


def city_name(rng: Random) -> str:
    """Return the name of a real or a made-up city."""
    return made_up(rng).capitalize() if rng.random() < 0.3 else rng.choice(CITIES)
