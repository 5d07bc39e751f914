"""Tool calls: choosing a tool and its arguments, and answering from the result."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from training.topics import words
from training.topics.base import Context, Turn, ask, expand

_S = {"type": "string"}
_N = {"type": "number"}
TOOLS: dict[str, tuple[list[str], dict[str, dict[str, str]]]] = {
    "get_weather": (
        ["Get the weather of a city.", "Current weather in a city", "Weather for a place", "Get the current weather"],
        {"city": _S},
    ),
    "get_time": (
        ["Get the time in a city.", "Current time in a city", "The local time of a place", "Get the current time"],
        {"city": _S},
    ),
    "calculator": (
        ["Compute an expression.", "Evaluate arithmetic", "A calculator", "Evaluate a mathematical expression"],
        {"expression": _S},
    ),
    "search_notes": (["Search the user's notes.", "Find notes", "Full text search in notes"], {"query": _S}),
    "set_timer": (["Set a timer.", "Start a timer of some minutes", "Timer in minutes"], {"minutes": _N}),
    "send_message": (
        ["Send a message to a person.", "Send a text message", "Message somebody"],
        {"to": _S, "text": _S},
    ),
}
_ARGUMENT_NOTES = {
    "city": ["The city", "City name", "Name of the city"],
    "expression": ["What to compute", "The expression"],
    "query": ["What to find", "Search words"],
    "minutes": ["How many minutes", "Minutes"],
    "to": ["Who gets it", "The person"],
    "text": ["What to send", "The text"],
}


def tool_json(name: str, rng: Random) -> str:
    """Return the JSON of a tool in a form that clients send: OpenAI's or the bare function, some with descriptions."""
    notes, arguments = TOOLS[name]
    properties = {}
    for key, kind in arguments.items():
        properties[key] = dict(kind)
        if rng.random() < 0.3:
            properties[key]["description"] = rng.choice(_ARGUMENT_NOTES[key])
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        parameters["required"] = list(arguments)
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(notes)
    function["parameters"] = parameters
    if rng.random() < 0.6:
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)
    return json.dumps(function, ensure_ascii=False)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in the model's syntax."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


_WEATHER = [
    "what is the weather {in|like in} {v}",
    "how is the weather in {v}",
    "weather in {v}",
    "what's the weather like in {v}",
    "{v} weather",
    "is it {cold|warm|raining|sunny} in {v}",
    "will it rain in {v}",
    "tell me the weather {in|for} {v}",
    "do i need an umbrella in {v}",
    "how {cold|warm|hot} is it in {v}",
    "get the weather {of|for|in} {v}",
    "weather for {v} {today|now|}",
    "what is the temperature in {v}",
]
_TIME = [
    "what time is it in {v}",
    "what is the time in {v}",
    "time in {v}",
    "tell me the time in {v}",
    "how late is it in {v}",
    "what's the {local |}time in {v}",
    "current time in {v}",
    "do you know the time in {v}",
]
_CALC = [
    "{use the calculator|calculate|compute|work out|what is|evaluate} {v}",
    "how much is {v}",
    "{v}",
    "please {calculate|compute} {v}",
    "use the calculator {for|to compute} {v}",
]
_NOTES = [
    "search my notes for {v}",
    "find my notes {about|on} {v}",
    "what do my notes say about {v}",
    "look {for|up} {v} in my notes",
    "do i have notes {about|on} {v}",
    "search {the notes|notes} for {v}",
    "is there a note {about|on} {v}",
    "find {v} in my notes",
]
_TIMER = [
    "set a timer {for|of} {v} minutes",
    "start a timer of {v} minutes",
    "timer {v} minutes",
    "wake me in {v} minutes",
    "set a {v} minute timer",
    "remind me in {v} minutes",
]
_SEND = [
    "send a message to {a}: {v}",
    "tell {a}: {v}",
    "write to {a}: {v}",
    "send {a} a message: {v}",
    "message {a}: {v}",
    "text {a}: {v}",
]
_SKY = ["sunny", "rainy", "cloudy", "windy", "snow", "fog", "clear", "storm"]


def _words(rng: Random, most: int) -> str:
    return " ".join(rng.choice(words.PLAIN) for _ in range(rng.randint(1, most)))


def _fill(patterns: list[str], value: str, rng: Random, name: str = "") -> str:
    return (
        expand(rng.choice(patterns).replace("{v}", "\0").replace("{a}", "\1"), rng)
        .replace("\0", value)
        .replace("\1", name)
    )


def _weather(rng: Random) -> tuple[str, dict[str, Any], str, str]:
    city = words.city_name(rng)
    sky, degrees = rng.choice(_SKY), rng.randrange(-15, 40)
    forms = [
        (f"{sky}, {degrees} degrees", f"The weather in {city}: {sky}, {degrees} degrees."),
        (json.dumps({"temperature": degrees, "condition": sky}), f"The weather in {city}: {sky}, {degrees} degrees."),
        (
            json.dumps({"city": city, "temperature": degrees, "sky": sky}),
            f"The weather in {city}: {sky}, {degrees} degrees.",
        ),
        (f"{degrees} C, {sky}", f"The weather in {city}: {sky}, {degrees} degrees."),
        (sky, f"The weather in {city}: {sky}."),
    ]
    return (_fill(_WEATHER, city, rng), {"city": city}, *rng.choice(forms))


def _time(rng: Random) -> tuple[str, dict[str, Any], str, str]:
    city, clock = words.city_name(rng), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    forms = [clock, json.dumps({"time": clock}), f"It is {clock}", json.dumps({"city": city, "time": clock})]
    return _fill(_TIME, city, rng), {"city": city}, rng.choice(forms), f"It is {clock} in {city}."


def _calculator(rng: Random) -> tuple[str, dict[str, Any], str, str]:
    numbers = [rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 4])) for _ in range(rng.choice([2, 2, 2, 3]))]
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f" {rng.choice('+-**/')} {number}"
    result = str(rng.randrange(10 ** rng.choice([1, 2, 3, 4, 5])))
    if rng.random() < 0.2:
        result += "." + str(rng.randrange(1, 100))
    shown = text if rng.random() < 0.7 else text.replace(" ", "")
    return (
        _fill(_CALC, shown, rng),
        {"expression": shown},
        rng.choice([result, json.dumps({"result": result})]),
        f"{shown} = {result}",
    )


def _notes(rng: Random) -> tuple[str, dict[str, Any], str, str]:
    query = rng.choice(words.NOTES) if rng.random() < 0.6 else _words(rng, 3)
    found = _words(rng, 5)
    result, said = rng.choice(
        [
            (found, f"I found this in your notes: {found}"),
            (json.dumps({"notes": [found]}), f"I found this in your notes: {found}"),
            ("nothing found", f"I found nothing about {query} in your notes."),
            ("[]", f"I found nothing about {query} in your notes."),
        ]
    )
    return _fill(_NOTES, query, rng), {"query": query}, result, said


def _timer(rng: Random) -> tuple[str, dict[str, Any], str, str]:
    minutes = rng.randrange(1, 121)
    return (
        _fill(_TIMER, str(minutes), rng),
        {"minutes": minutes},
        rng.choice(["ok", "done", "timer set", '{"ok": true}']),
        f"The timer is set to {minutes} minutes.",
    )


def _send(rng: Random) -> tuple[str, dict[str, Any], str, str]:
    person, text = words.person_name(rng), _words(rng, 4)
    return (
        _fill(_SEND, text, rng, person),
        {"to": person, "text": text},
        rng.choice(["ok", "sent", "done", '{"ok": true}']),
        f"I sent your message to {person}.",
    )


_MAKERS = {
    "get_weather": _weather,
    "get_time": _time,
    "calculator": _calculator,
    "search_notes": _notes,
    "set_timer": _timer,
    "send_message": _send,
}
_CANNOT = {
    "get_weather": "weather",
    "get_time": "time",
    "calculator": "calculator",
    "search_notes": "notes",
    "set_timer": "timer",
    "send_message": "messages",
}


def tool_use(rng: Random, context: Context) -> list[Turn]:
    """Ask for something that needs an available tool, with the call, its result and the answer."""
    name = rng.choice(context.tool_names)
    question, arguments, result, said = _MAKERS[name](rng)
    question = question if rng.random() < 0.5 else ask(question, rng, typos=False)
    if name in ("calculator", "send_message", "search_notes") or question[-1] in "?.!":
        asked = question.rstrip("?.! ") if name == "send_message" else question
    else:
        asked = question + rng.choice(["?", "?", "", "", "."])
    shown = json.dumps(arguments, ensure_ascii=False)
    call = Turn("assistant", call_text(name, arguments), f"I need the tool {name} with {shown}.")
    if rng.random() < 0.06:
        result, said = (
            rng.choice(["error: timeout", "error", "error: not available", '{"error": "failed"}']),
            "The tool failed. Please try again later.",
        )
    return [
        Turn("user", asked),
        call,
        Turn("tool", result),
        Turn("assistant", said, "The result of the tool is there. I tell the user."),
    ]


def missing_tool(rng: Random, context: Context) -> list[Turn]:
    """Ask for something that needs an unavailable tool."""
    name = rng.choice(
        [
            n
            for n in ("get_weather", "search_notes", "set_timer", "send_message", "get_time")
            if n not in context.tool_names
        ]
    )
    question = _MAKERS[name](rng)[0]
    return [
        Turn("user", question if name == "send_message" else ask(question, rng, typos=False)),
        Turn(
            "assistant",
            f"I cannot do that: I have no tool for {_CANNOT[name]} here.",
            f"I have no tool for {_CANNOT[name]} here.",
        ),
    ]


def tool_list(rng: Random, context: Context) -> list[Turn]:
    """Ask for the available tools."""
    question = expand(
        rng.choice(
            [
                "which tools {do you have|are there|can you use}",
                "what tools {do you have|can you use}",
                "list your tools",
            ]
        ),
        rng,
    )
    names = ", ".join(context.tool_names)
    text = f"I can use these tools: {names}." if names else "I have no tools here."
    return [Turn("user", ask(question, rng)), Turn("assistant", text, "I look at the tools in the system text.")]
