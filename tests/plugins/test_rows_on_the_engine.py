"""Plugins' logits processors on the real engine affect only their own responses, and one that hangs is switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.installed_plugins import running

from notso.plugins.process import Plugins
from notso.smollm3 import Engine, InvalidRequestError, Message, RequestOptions, SamplingParams

QUESTION = [Message("user", "What is SmolLM3?")]
PARAMS = SamplingParams(max_tokens=16, temperature=0.7, seed=5)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugins]:
    with running(tmp_path, monkeypatch, "kind", "rows") as plugins:
        yield plugins


def test_stuck_logits_processor_fails_only_its_own_answer(plugins: Plugins) -> None:
    with Engine.load(context_tokens=512, threads=1, find_processor=plugins.logits_processor) as engine:

        def answer(*names: str, engine: Engine = engine) -> tuple[str, str]:
            options = RequestOptions(thinking=False, logits_processors=names)
            events = list(engine.submit(QUESTION, PARAMS, options).events())
            return "".join(event.text for event in events), str(events[-1].error or "")

        alone = answer()
        counted = answer("only_by_length")
        assert alone[0] and counted[0] != alone[0] and answer("only_by_length") == counted
        options = [
            RequestOptions(thinking=False, logits_processors=names) for names in ((), ("hang_row",), (), ("nan_row",))
        ]
        generations = [engine.submit(QUESTION, PARAMS, each) for each in options]
        ends = [list(each.events())[-1] for each in generations]
        texts = ["".join(event.text for event in each.events()) for each in generations]
        assert texts[0] == texts[2] == alone[0] and texts[1] == texts[3] == ""
        assert "logits processor hang_row took longer than 2 s" in str(ends[1].error)
        assert ends[3].kind == "error"
        stuck = plugins.find("rows")
        assert stuck is not None and stuck.state == "off"
        with pytest.raises(InvalidRequestError, match="no logits processor 'nan_row'"):
            answer("nan_row")
        assert answer() == alone and answer("only_by_length") == counted
